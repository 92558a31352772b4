"""Load a model to explain, with its tokenizer or image processor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._names import suggest
from .._optional import optional
from ..errors import CaptumSSMError, DataNotFoundError, OptionError
from ..models import load_vim, load_vmamba
from ..models.bundled import BUNDLED, weights_of
from ..models.checkpoints import as_checkpoint_error, check_complete, check_counts, read_checkpoint
from ..models.folders import PLAIN, VOCABULARY, load_folder, read_config
from ..models.sentences import CLASS_WORDS, CLS, TextReader, text_words
from ..models.vocabulary import WordVocabulary
from .image_inputs import image_side_of, processed, read_small_image, read_vim

#: A function from image files to the model's input (B, C, H, W).
Prepare = Callable[[Sequence[Path]], Tensor]

#: Endings of class names in configurations, and the transformers Auto class for each ending.
_KINDS = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForImageClassification": "AutoModelForImageClassification",
    "ForConditionalGeneration": "AutoModelForImageTextToText",
    "ForSemanticSegmentation": "AutoModelForSemanticSegmentation",
}


@dataclass(frozen=True)
class Source:
    """The name or path of a model, and options for loading the model.

    Attributes:
        name: the name of a bundled model, a folder saved by transformers or ``captum-ssm-bench
            train``, a weights file of Vision Mamba or VMamba, or with ``hub`` a name on the hub.
        tokenizer: the folder of a tokenizer, or with ``hub`` a name. Default: None, ``name``.
        hub: whether the model may be downloaded from the Hugging Face hub. Default: False.
        trust_remote_code: whether to run Python files in the model's folder. Default: False.

    Example:
        >>> from captum_ssm.explain.loading import Source
        >>> Source("my-mamba").options
        {'local_files_only': True, 'trust_remote_code': False}
    """

    name: str
    tokenizer: str | None = None
    hub: bool = False
    trust_remote_code: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for ``from_pretrained`` of transformers."""
        return {"local_files_only": not self.hub, "trust_remote_code": self.trust_remote_code}


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model in evaluation mode, with its tokenizer or image processor.

    Attributes:
        model: the model.
        tokenizer: the tokenizer, for a model of texts. Default: None.
        prepare: function from image files to inputs, for a model of images. Default: None.
        is_language: whether the model predicts the next token. Default: False.
        is_dense: whether the model returns logits for every pixel. Default: False.
        labels: class names, if the model's configuration lacks them. Default: None.

    Example:
        >>> from captum_ssm.explain.loading import Source, load
        >>> loaded = load(Source("recall-mamba")).move_to("cpu", "float64")
        >>> loaded.model.dtype, loaded.is_language
        (torch.float64, True)
    """

    model: nn.Module
    tokenizer: Any = None
    prepare: Prepare | None = None
    is_language: bool = False
    is_dense: bool = False
    labels: Sequence[str] | None = None

    def move_to(self, device: str, dtype: str) -> Loaded:
        """Move the model to a device and a dtype; return this :class:`Loaded`.

        Args:
            device: the name of the device, such as ``"cuda:0"``.
            dtype: the name of a torch dtype; ``"auto"`` keeps the dtype of the weights file.
        """
        try:
            self.model.to(device)
        except (RuntimeError, AssertionError) as error:
            raise OptionError(
                f"--device {device}: {error}. Pass an available device, such as cpu."
            ) from error
        if dtype != "auto":
            self.model.to(getattr(torch, dtype))
        return self

    def read_images(self, files: Sequence[Path]) -> Tensor:
        """Read image files to a batch (B, C, H, W) with the model's dtype and device."""
        if self.prepare is None:
            raise OptionError(f"{type(self.model).__name__} does not accept images. Pass a text.")
        return self.prepare(files).to(next(self.model.parameters()))


def load(source: Source) -> Loaded:
    """Load a model and its tokenizer or image processor, without downloads if ``hub`` is False.

    Raises:
        DataNotFoundError: if there is no such model, folder or file.
        OptionError: if the folder contains neither a language model, a classifier nor a
            segmentation model.
        CheckpointError: if configuration and weights do not fit, or if weights are missing, so that
            transformers would use random weights.

    Example:
        >>> from captum_ssm.explain.loading import Source, load
        >>> loaded = load(Source("recall-mamba"))
        >>> len(loaded.tokenizer.vocab), loaded.labels
        (55, None)
    """
    path = weights_of(source.name).parent if source.name in BUNDLED else Path(source.name)
    if source.name in BUNDLED or _is_bundled_kind(path):
        return _load_bundled_kind(path)
    if path.is_file():
        names = read_checkpoint(path)
        is_vmamba = any(name.startswith("layers.0.blocks.") for name in names)
        model = load_vmamba(path) if is_vmamba else load_vim(path)
        return Loaded(model, prepare=lambda files: torch.stack([read_vim(model, f) for f in files]))
    return _load_transformers(source)


def _is_bundled_kind(folder: Path) -> bool:
    """Return True if the folder has a classifier of the kinds ``captum-ssm-bench train`` writes."""
    with suppress(CaptumSSMError, OSError):  # other folders have no such files
        # an image classifier, or a language model whose vocabulary has the token for classes
        class_names = read_config(folder).get("architectures")
        return any(class_names == [name] for name in PLAIN) or CLS in WordVocabulary.from_json(
            folder / VOCABULARY
        )
    return False


def _load_bundled_kind(folder: Path) -> Loaded:
    """Load a model that is bundled or was trained with ``captum-ssm-bench train``."""
    model, words = load_folder(folder)  # an image classifier has class names instead of words
    if not isinstance(words, WordVocabulary):
        side = image_side_of(model)
        return Loaded(
            model,
            prepare=lambda files: torch.stack([read_small_image(f, side) for f in files]),
            labels=words,
        )
    if CLS not in words:
        return Loaded(model, words, is_language=True)
    encoder = type(model).__name__.endswith("ForSequenceClassification")
    reader = TextReader(words, encoder)
    classes = tuple(word.strip("<>") for word in CLASS_WORDS)
    return Loaded(
        model if encoder else SentenceClassifier(model, reader), _Tokenizer(reader), labels=classes
    )


class SentenceClassifier(nn.Module):
    """A classifier of sentences: a language model that predicts one of two class words."""

    def __init__(self, model: nn.Module, reader: TextReader) -> None:
        super().__init__()
        self.model, self._reader = model, reader

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the two classes (B, 2), for token ids (B, L)."""
        return self._reader.logits(self.model, ids)


class _Tokenizer:
    """The tokenizer of a sentence classifier, with the interface of transformers."""

    def __init__(self, reader: TextReader) -> None:
        self._reader = reader

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with or without the special token of the class."""
        words = self._reader.vocabulary
        if not add_special_tokens:
            return [words.id_of(word) for word in ([text] if text in words else text_words(text))]
        ids: list[int] = self._reader.ids([text_words(text)])[0].tolist()
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids."""
        return self._reader.vocabulary.decode(ids)


def config_of(source: Source) -> Any:
    """Load and check the configuration of a transformers model or a bundled model."""
    transformers = optional("transformers", "transformers", f"Loading {source.name}")
    name = str(weights_of(source.name).parent) if source.name in BUNDLED else source.name
    if not Path(name).is_dir() and not source.hub:
        raise DataNotFoundError(
            f"{source.name} is neither a folder, a file nor a bundled model "
            f"({', '.join(BUNDLED)}).{suggest(source.name, BUNDLED)} To download a model of this "
            "name from the hub, add --hub."
        )
    with as_checkpoint_error(f"{source.name} has no usable configuration"):
        config_dict, _ = transformers.PretrainedConfig.get_config_dict(name, **source.options)
        check_counts(config_dict, f"The configuration of {source.name}")
        return transformers.AutoConfig.from_pretrained(name, **source.options)


def _load_transformers(source: Source) -> Loaded:
    """Load a transformers model with its tokenizer or image processor."""
    transformers = optional("transformers", "transformers", f"Loading {source.name}")
    config = config_of(source)
    names = list(getattr(config, "architectures", None) or [])
    autos = dict(_KINDS)
    if not hasattr(config, "vision_config"):  # without images, these are encoder-decoder models
        autos.pop("ForConditionalGeneration")
    match = next(
        ((name, auto) for end, auto in autos.items() for name in names if name.endswith(end)), None
    )
    if match is None:
        raise OptionError(
            f"{source.name} contains {' or '.join(names) or 'a model without architectures'}. The "
            "command accepts language models, text and image classifiers, and image segmentation "
            "models. Load other models in Python, and use captum_ssm.report."
        )
    name, auto = match
    is_remote = source.trust_remote_code and auto in (getattr(config, "auto_map", None) or {})
    # by class name, because other packages replace the entries of transformers' Auto classes
    model_class = getattr(transformers, auto if is_remote else name, getattr(transformers, auto))
    with as_checkpoint_error(f"{source.name}: configuration and weights do not fit"):
        # otherwise transformers' error would not name weights of a wrong shape
        model, info = model_class.from_pretrained(
            source.name, output_loading_info=True, ignore_mismatched_sizes=True, **source.options
        )
        check_complete(model, info, source.name)
    model.eval()
    if auto in ("AutoModelForImageClassification", "AutoModelForSemanticSegmentation"):
        processor = transformers.AutoImageProcessor.from_pretrained(source.name, **source.options)
        is_dense = auto == "AutoModelForSemanticSegmentation"
        return Loaded(model, prepare=lambda files: processed(processor, files), is_dense=is_dense)
    is_language = auto in ("AutoModelForCausalLM", "AutoModelForImageTextToText")
    return Loaded(model, _load_tokenizer(transformers, source), is_language=is_language)


def _load_tokenizer(transformers: Any, source: Source) -> Any:
    """Load a model's tokenizer, or the word vocabulary of ``captum-ssm-bench train``."""
    name = source.name if source.tokenizer is None else source.tokenizer
    folder = Path(name)
    vocabulary_file = folder / VOCABULARY
    # a tokenizer of transformers comes before the vocabulary
    own = any((folder / f"tokenizer{end}").exists() for end in (".json", "_config.json", ".model"))
    if vocabulary_file.exists() and not own and not (folder / "merges.txt").exists():
        return WordVocabulary.from_json(vocabulary_file)
    return transformers.AutoTokenizer.from_pretrained(name, **source.options)
