"""Loading the model to explain, and its tokenizer or image processor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._names import meant
from .._optional import optional
from ..errors import CaptumSSMError, DataNotFoundError, OptionError
from ..models import load_vim, load_vmamba
from ..models.bundled import BUNDLED, weights_of
from ..models.checkpoints import check_complete, check_counts, naming, read_checkpoint
from ..models.folders import PLAIN, VOCABULARY, load_folder, read_config
from ..models.sentences import CLASS_WORDS, CLS, TextReader, text_words
from ..models.vocabulary import WordVocabulary
from .image_inputs import for_vim, processed, scene, side_of

#: Makes images (B, C, H, W), as the model wants them, of files.
Prepare = Callable[[Sequence[Path]], Tensor]

#: Endings of the class in a configuration, and the class of transformers that loads it.
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
    """The place of a model, and permissions to load it.

    Attributes:
        name: the bundled model, a folder of transformers or ``captum-ssm-bench train``, a file of
            Vision Mamba's or VMamba's weights, or with ``hub`` a name on the hub.
        tokenizer: the folder of a tokenizer, or with ``hub`` a name. Default: None, the model's.
        hub: whether the model may be downloaded. Default: False.
        trust_remote_code: whether Python files beside the weights may be run. Default: False.

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
        """Arguments for transformers."""
        return {"local_files_only": not self.hub, "trust_remote_code": self.trust_remote_code}


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model in evaluation mode, with its tokenizer or image processor.

    Attributes:
        model: the model.
        tokenizer: the tokenizer of a model of texts. Default: None.
        prepare: converts image files for a model of images. Default: None.
        is_language: whether the model predicts the next token. Default: False.
        is_dense: whether the model predicts every pixel. Default: False.
        labels: class names, if the model's configuration lacks them. Default: None.

    Example:
        >>> from captum_ssm.explain.loading import Source, load
        >>> loaded = load(Source("recall-mamba")).on("cpu", "float64")
        >>> loaded.model.dtype, loaded.is_language
        (torch.float64, True)
    """

    model: nn.Module
    tokenizer: Any = None
    prepare: Prepare | None = None
    is_language: bool = False
    is_dense: bool = False
    labels: Sequence[str] | None = None

    def on(self, device: str, dtype: str) -> Loaded:
        """Move the model to a device and a precision; return this :class:`Loaded`.

        Args:
            device: name of the device, such as ``"cuda:0"``.
            dtype: name of a dtype of torch; ``"auto"`` keeps the file's.
        """
        try:
            self.model.to(device)
        except (RuntimeError, AssertionError) as error:
            raise OptionError(f"--device {device}: {error}") from error
        if dtype != "auto":
            self.model.to(getattr(torch, dtype))
        return self

    def prepared(self, files: Sequence[Path]) -> Tensor:
        """Return images (B, C, H, W) in the model's precision, on its device."""
        if self.prepare is None:
            raise OptionError(f"{type(self.model).__name__} takes no images.")
        return self.prepare(files).to(next(self.model.parameters()))


def load(source: Source) -> Loaded:
    """Load the model; nothing is fetched unless ``source.hub``.

    Returns:
        The model with its tokenizer or image processor.

    Raises:
        DataNotFoundError: when there is no such model, folder or file.
        OptionError: when the folder holds neither a language model, a classifier nor a model that
            segments images.
        CheckpointError: when configuration and weights do not fit, or weights are missing:
            transformers would fill these at random.

    Example:
        >>> from captum_ssm.explain.loading import Source, load
        >>> loaded = load(Source("recall-mamba"))
        >>> len(loaded.tokenizer.vocab), loaded.labels
        (55, None)
    """
    path = weights_of(source.name).parent if source.name in BUNDLED else Path(source.name)
    if source.name in BUNDLED or _is_trained_here(path):
        return _trained_here(path)
    if path.is_file():
        names = read_checkpoint(path)
        is_vmamba = any(name.startswith("layers.0.blocks.") for name in names)
        model = load_vmamba(path) if is_vmamba else load_vim(path)
        return Loaded(model, prepare=lambda files: torch.stack([for_vim(model, f) for f in files]))
    return _of_transformers(source)


def _is_trained_here(folder: Path) -> bool:
    """Return True if a folder holds a classifier written by ``captum-ssm-bench train``."""
    with suppress(CaptumSSMError, OSError):  # of folders of others
        named = read_config(folder).get("architectures")
        return any(named == [name] for name in PLAIN) or CLS in WordVocabulary.from_json(
            folder / VOCABULARY
        )
    return False


def _trained_here(folder: Path) -> Loaded:
    model, key = load_folder(folder)
    if not isinstance(key, WordVocabulary):
        side = side_of(model)
        return Loaded(
            model, prepare=lambda files: torch.stack([scene(f, side) for f in files]), labels=key
        )
    if CLS not in key:
        return Loaded(model, key, is_language=True)
    encoder = type(model).__name__.endswith("ForSequenceClassification")
    reader = TextReader(key, encoder)
    classes = tuple(word.strip("<>") for word in CLASS_WORDS)
    return Loaded(
        model if encoder else SentenceClassifier(model, reader), _Sentences(reader), labels=classes
    )


class SentenceClassifier(nn.Module):
    """A language model that learned two words alone, as a classifier of sentences."""

    def __init__(self, model: nn.Module, reader: TextReader) -> None:
        super().__init__()
        self.model, self._reader = model, reader

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the classes, (B, 2), for words and mark (B, L)."""
        return self._reader.logits(self.model, ids)


class _Sentences:
    """The tokenizer of a bundled classifier of sentences."""

    def __init__(self, reader: TextReader) -> None:
        self._reader = reader

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text's words, with or without the mark of the class."""
        known = self._reader.vocabulary
        if not add_special_tokens:
            return [known.id_of(word) for word in ([text] if text in known else text_words(text))]
        ids: list[int] = self._reader.ids([text_words(text)])[0].tolist()
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the words of ids."""
        return self._reader.vocabulary.decode(ids)


def config_of(source: Source) -> Any:
    """Return the configuration of a model of transformers, or of a bundled one."""
    transformers = optional("transformers", "transformers", f"Loading {source.name}")
    name = str(weights_of(source.name).parent) if source.name in BUNDLED else source.name
    if not Path(name).is_dir() and not source.hub:
        raise DataNotFoundError(
            f"{source.name}: there is no such folder or file, and no bundled model of that name "
            f"({', '.join(BUNDLED)}).{meant(source.name, BUNDLED)} To fetch a model of that name "
            "from the hub, add --hub."
        )
    with naming(f"{source.name} has no usable configuration"):
        plain, _ = transformers.PretrainedConfig.get_config_dict(name, **source.options)
        check_counts(plain, f"The configuration of {source.name}")
        return transformers.AutoConfig.from_pretrained(name, **source.options)


def _of_transformers(source: Source) -> Loaded:
    transformers = optional("transformers", "transformers", f"Loading {source.name}")
    config = config_of(source)
    kinds = list(getattr(config, "architectures", None) or [])
    ends = dict(_KINDS)
    if not hasattr(config, "vision_config"):  # others of that name encode one text to write another
        ends.pop("ForConditionalGeneration")
    found = next(
        ((kind, auto) for end, auto in ends.items() for kind in kinds if kind.endswith(end)), None
    )
    if found is None:
        raise OptionError(
            f"{source.name} holds {' or '.join(kinds) or 'a model that its config does not name'}, "
            "which is none of a language model, a classifier of texts or images, or a model that "
            "segments images. Load it in Python and use captum_ssm.report."
        )
    kind, auto = found
    remote = source.trust_remote_code and auto in (getattr(config, "auto_map", None) or {})
    # asked for by name: other packages replace the models of transformers' Auto classes
    model_class = getattr(transformers, auto if remote else kind, getattr(transformers, auto))
    with naming(f"{source.name}: its configuration and its weights make no model"):
        # weights of another shape would be refused as well, but not named
        model, info = model_class.from_pretrained(
            source.name,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **source.options,
        )
        check_complete(model, info, source.name)
    model.eval()
    if auto in ("AutoModelForImageClassification", "AutoModelForSemanticSegmentation"):
        processor = transformers.AutoImageProcessor.from_pretrained(source.name, **source.options)
        is_dense = auto == "AutoModelForSemanticSegmentation"
        return Loaded(model, prepare=lambda files: processed(processor, files), is_dense=is_dense)
    is_language = auto in ("AutoModelForCausalLM", "AutoModelForImageTextToText")
    return Loaded(model, _tokenizer(transformers, source), is_language=is_language)


def _tokenizer(transformers: Any, source: Source) -> Any:
    """Return a model's tokenizer; for models of captum-ssm-bench train their vocabulary."""
    where = source.name if source.tokenizer is None else source.tokenizer
    folder = Path(where)
    words = folder / VOCABULARY
    own = any((folder / f"tokenizer{end}").exists() for end in (".json", "_config.json", ".model"))
    if words.exists() and not own and not (folder / "merges.txt").exists():
        return WordVocabulary.from_json(words)
    return transformers.AutoTokenizer.from_pretrained(where, **source.options)
