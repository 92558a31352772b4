"""Which parts of a prompt a language model's text is due to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from captum.attr import Attribution
from torch import Tensor, nn

from ...errors import InputError, OptionError, OutputError, TargetError
from ...tracing import find_model
from ..call import checks
from ..call.inputs import call_model
from ..call.targets import Against, Total, logits_of
from ..engine.linear_method import LinearMethod, answered
from ..engine.method import SSMAttribution
from .codec import Codec
from .hops import Hop, Row, follow
from .prompt import Prompt, SkipTokens, read_ids, read_prompt
from .result import SSMLLMAttributionResult, less, result_of_spans
from .resume import counted, fingerprint, kept
from .spans import Spans, joined, read_spans, with_spans

#: How many tokens are generated if nothing else is said.
_NEW_TOKENS = 25

#: Tokens of the run that tells whether a model reads ahead, where a text's own does not.
_FEW = 8
#: How much of relevance on later tokens is rounding, which Fourier transforms leave.
_ROUNDING = 1e-3

#: What is set for the method and cannot be set by the user.
_FIXED = ("inputs", "targets", "per_token", "return_convergence_delta")


class SSMLLMAttribution(Attribution):
    """A method of this package on prompts and texts, in the manner of Captum's LLMAttribution.

    A token of the text at position p is explained as ``target=(p - 1, token)``, where the model
    predicts it.  The model reads prompt and text in one forward run, however many tokens the text
    has; methods that take gradients then need one backward pass for each of them.

    Args:
        attr_method: the method, made with the language model: any class of this package, or of
            your own with a method ``attribute_each`` like theirs.
        tokenizer: the model's tokenizer, or anything with ``encode(text)`` and ``decode(ids)``.

    Raises:
        OptionError: when ``attr_method`` has no ``attribute_each``.
        OutputError: when the model has no language-modelling head.

    Example:
        >>> from captum_ssm import MambaAttribution, SSMLLMAttribution
        >>> from captum_ssm.models import load_bundled
        >>> model, vocabulary = load_bundled()
        >>> explain = SSMLLMAttribution(MambaAttribution(model), vocabulary)
        >>> result = explain.attribute("anna owns the lamp . ? anna owns the", target="lamp .")
        >>> tuple(result.token_attr.shape), result.output_tokens
        ((2, 9), ['lamp', '.'])
    """

    def __init__(self, attr_method: Any, tokenizer: Any) -> None:
        if not callable(getattr(attr_method, "attribute_each", None)):
            raise OptionError(
                f"attr_method is {type(attr_method).__name__}, which has no attribute_each(). Pass "
                "a method of this package, such as LatimFlow(model)."
            )
        super().__init__(attr_method.forward_func)
        self.attr_method = attr_method
        self.codec = Codec(tokenizer)
        self.model = find_model(self.forward_func, getattr(attr_method, "model", None))
        if isinstance(self.forward_func, nn.Module):
            _check_head(self.forward_func)
        self._reads_ahead: bool | None = None

    def __repr__(self) -> str:
        return f"SSMLLMAttribution({self.attr_method!r})"

    @classmethod
    def get_name(cls) -> str:
        """The name that Captum shows."""
        return "SSM LLM Attribution"

    def attribute_future(self, *args: Any, **kwargs: Any) -> Any:
        """Not offered; Captum's remote methods alone have it."""
        raise NotImplementedError("SSMLLMAttribution has no asynchronous form; call attribute().")

    def attribute(
        self,
        inp: Any,
        target: Any = None,
        *,
        spans: Spans | None = None,
        prompt_spans: Spans | Tensor | None = None,
        hops: int = 0,
        against: Any = None,
        resume: str | Path | None = None,
        show_progress: bool = False,
        skip_tokens: SkipTokens = None,
        gen_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> SSMLLMAttributionResult | list[SSMLLMAttributionResult]:
        """Relevance of the prompt to every token of a text that follows it.

        Args:
            inp: the prompt: a str; token ids as a list of ints or a tensor (L,) or (1, L); chat
                messages ``{"role": ..., "content": ...}`` as a list; Captum's TextTokenInput, or
                TextTemplateInput, whose values then are the features.
            target: the text: a str, which joins the prompt as it is, so that it begins with a
                space where the tokenizer wants one; token ids as for the prompt; or a list of
                either, for several texts, each of which costs a forward run. Default: None, what
                the model generates.
            spans: the stretches of the text that are explained, each as a whole, by one backward
                pass: ``"token"``, ``"word"``, ``"sentence"``, ``"paragraph"``, ``"all"``, a
                compiled pattern of what stands between them, or ranges of the text's tokens. What
                is explained is the sum of what the method explains of each token; with
                ``contrast="all"`` that is the log-probability of the span. They share one forward
                run and are explained one after another, so that any number of them takes the
                memory of one. Default: None, each token, and no sums of constants.
            prompt_spans: the same for what the prompt's features are, or ``"turn"`` for the
                messages of a chat, or Captum's feature mask, integers (L,). Default: None, its
                tokens.
            hops: how often relevance that went to the text's own tokens goes on along their own
                explanations, towards the prompt; each hop of a span is one backward pass. With
                hops LatimFlow goes by ``rule="centred"`` unless another is named: by ``"frozen"``
                nothing goes on from tokens that only ask. Default: 0, it stays on the text.
            against: a second text, in the forms of the target and of any length: relevance is that
                of the text less that of this one, each in a run of its own; with ``spans="all"``.
                Default: None, of the text alone.
            resume: a folder that takes the answer to each span and hop as soon as it is found, so
                that a call that was ended goes on from there; with ``spans``. Default: None, no
                folder.
            show_progress: show a progress bar over spans and hops, or if the method has one the
                method's own. Default: False.
            skip_tokens: ids or strings of tokens whose relevance is left out of the result, such
                as the tokenizer's own. Default: None.
            gen_args: arguments of the model's ``generate``, for a target of None. Default: None,
                the likeliest 25 tokens, one by one.
            **options: further arguments of the method's ``attribute``, such as ``rule``,
                ``components`` or ``contrast``, with its defaults. Positions in them, and tokens in
                ``baselines``, are those of the sequence that the model reads, the prompt and all of
                the text but its last token.

        Returns:
            The result, on the CPU and in float32; for several targets a list of them.

        Raises:
            InputError: for a prompt or text without tokens, or with ids that the model does not
                embed.
            OptionError: for a model that reads both ways, options that are set here, spans of no
                known form, hops with a method whose parts have no sum, or a ``generate`` that adds
                nothing.
            TargetError: when the model's output has no logits (B, L, vocabulary).
        """
        for name in _FIXED:
            if name in options:
                raise OptionError(f"{name}={options[name]!r} cannot be set here; leave it out.")
        prompt = read_prompt(inp, self.codec, skip_tokens)
        if prompt_spans is not None:
            prompt = with_spans(prompt, prompt_spans, self.codec, inp)
        if checks.integer("hops", hops) < 0:
            raise OptionError(f"hops={hops} must be at least 0.")
        if hops and not _adds_up(self.attr_method):
            raise OptionError(
                f"hops={hops} needs a method whose parts add up to the output, such as LatimFlow, "
                f"but attr_method is {type(self.attr_method).__name__}."
            )
        self._check_ids(prompt.ids)
        checks.flags(show_progress=show_progress)
        if against is not None and spans != "all":
            raise OptionError(
                f"against= holds whole texts against each other, not spans={spans!r}."
            )
        if resume is not None and (spans is None or not _adds_up(self.attr_method)):
            raise OptionError("resume= is for spans, and a method whose parts add up.")
        if hops and getattr(self.attr_method, "default_rule", None) == "frozen":
            options.setdefault("rule", "centred")  # the frozen rule gives nothing to what asks
        asked = _Asked(
            spans if spans is not None or not hops else "token",
            hops,
            None if against is None else self._read_target(against),
            None if resume is None else Path(resume),
            show_progress,
        )
        if target is None:
            return self._explained(prompt, self._generated(prompt.ids, gen_args), asked, options)
        if gen_args is not None:
            raise OptionError("gen_args is for generating a target, but target is given as well.")
        if not _is_several(target):
            return self._explained(prompt, self._read_target(target), asked, options)
        texts = [self._read_target(text) for text in target]
        return [self._explained(prompt, text, asked, options) for text in texts]

    def _explained(
        self, prompt: Prompt, text: Tensor, asked: _Asked, options: Mapping[str, Any]
    ) -> SSMLLMAttributionResult:
        length = len(prompt.ids)
        ids = torch.cat([prompt.ids, text[:-1]])[None].to(self._device)  # the last predicts nothing
        if asked.spans is not None:
            found = self._of_spans(prompt, text, ids, asked, options)
            if asked.against is None:
                return found
            resume = None if asked.resume is None else asked.resume / "against"
            other = replace(asked, against=None, resume=resume)
            return less(found, self._explained(prompt, asked.against, other, options))
        if asked.show_progress:
            options = {**options, "show_progress": True}
        # counted from the end: models may put virtual tokens in front
        targets = [(i - len(text), token) for i, token in enumerate(text.tolist())]
        try:
            found = self.attr_method.attribute_each(ids, targets, **options)  # (n_out, 1, L)
        except TargetError as error:
            raise TargetError(
                f"The text's tokens are looked up in the model's output as (position, token): "
                f"{error} The model must return logits (B, L, vocabulary)."
            ) from error
        relevance = found[:, 0].detach().cpu()
        self._check_order(relevance, [length + i for i in range(len(text))])
        token_attr = prompt.features(relevance[:, :length]).float()
        return SSMLLMAttributionResult(
            seq_attr=token_attr.sum(0),
            token_attr=token_attr,
            generated_attr=F.pad(relevance[:, length:], (0, 1)).float(),
            input_tokens=prompt.names,
            output_tokens=self.codec.names(text),
            input_pieces=prompt.pieces,
            output_pieces=self.codec.pieces(text),
        )

    def _of_spans(
        self, prompt: Prompt, text: Tensor, ids: Tensor, asked: _Asked, options: Mapping[str, Any]
    ) -> SSMLLMAttributionResult:
        """The text's spans, each as a whole."""
        spans = read_spans("spans", asked.spans, text, self.codec)  # type: ignore[arg-type]
        length, method, given = len(prompt.ids), self.attr_method, dict(options)
        positions = [i - len(text) for i in range(len(text))]
        contrast = given.pop("contrast", None)
        if _adds_up(method):  # of one example, whatever the number
            checks.count("internal_batch_size", given.pop("internal_batch_size", None))

        def ask(logits: Callable[[], Tensor]) -> Generator[Against, Row, list[Hop]]:
            questions = follow(text, spans, length, contrast, asked.hops, logits)
            if asked.show_progress:
                questions = counted(questions, method.name, len(spans) * (1 + asked.hops))
            if asked.resume is None:
                return questions
            name = type(method).__name__
            told = ids, text, spans, contrast, asked.hops, name, vars(method).get("rule")
            return kept(questions, asked.resume, fingerprint(self.model, options, *told))

        if hasattr(method, "answer_in_turn"):
            hops = method.answer_in_turn(ids, positions, ask, **given)
        elif _adds_up(method):
            hops = self._one_by_one(ids, ask, positions, given)
        else:
            hops = [self._without_sums(ids, text, spans, length, options)]
        last = [length + span.stop - 1 for span in spans]
        self._check_order(torch.cat([hops[0].prompt, hops[0].text[:, :-1]], 1), last)
        if self._reads_ahead is None and _adds_up(method) and len(text) > 1:
            few = ids if "additional_forward_args" in options else ids[:, :_FEW]
            row = method.decompose(few, (-few.shape[1], int(text[0])), **given)
            self._check_order(row.tokens.detach().cpu(), [1])
        names = [self.codec.text_of(text[span.start : span.stop]) for span in spans]
        pieces = joined(self.codec.pieces(text), spans)
        return result_of_spans(prompt, hops, spans, names, pieces)

    def _check_order(self, relevance: Tensor, last: list[int]) -> None:
        """Raise for relevance on tokens that a text's words come before.

        Args:
            relevance: of S words or spans (S, L), by a method of this package; others mean by it
                what they like.
            last: the token that each of them ends at.
        """
        if not isinstance(self.attr_method, SSMAttribution):
            return
        later = torch.arange(relevance.shape[1]) >= torch.tensor(last)[:, None]
        size, beyond = (x.abs().sum(1) for x in (relevance, relevance * later))
        if bool((beyond > _ROUNDING * size).any()):
            self._reads_ahead = True
        elif bool(later.any()):
            self._reads_ahead = False
        if self._reads_ahead:
            raise OptionError(
                f"{type(self.model).__name__} reads both ways: what it says at a word depends on "
                "the words that follow, so that it writes no texts word by word. Explain single "
                "outputs of it with the method itself."
            )

    def _one_by_one(
        self, ids: Tensor, ask: Any, positions: list[int], options: Mapping[str, Any]
    ) -> list[Hop]:
        """Questions to a method that runs the model anew for each."""

        def logits() -> Tensor:
            with torch.no_grad():
                return logits_of(call_model(self.forward_func, ids, ()))[0, positions]

        def answer(question: Against) -> Row:
            found: Row = self.attr_method.decompose(
                ids, question.target, contrast=question.contrast, **options
            )
            return found

        return answered(ask(logits), answer)

    def _without_sums(
        self,
        ids: Tensor,
        text: Tensor,
        spans: Sequence[range],
        length: int,
        options: Mapping[str, Any],
    ) -> Hop:
        """Spans by a method whose parts have no sum."""
        several = [torch.arange(span.start, span.stop) for span in spans]
        targets = [Total(some - len(text), text[some]) for some in several]
        rows = self.attr_method.attribute_each(ids, targets, **options)[:, 0].detach().cpu()
        if not getattr(self.attr_method, "needs_gradient", True):  # rows are means over positions
            rows = rows * torch.tensor([len(span) for span in spans]).to(rows)[:, None]
        rows = rows.double()
        on_text = F.pad(rows[:, length:], (0, 1))
        return Hop(rows[:, :length], on_text, torch.zeros_like(on_text), rows.new_zeros(len(rows)))

    def _read_target(self, target: Any) -> Tensor:
        if not isinstance(target, str):
            text = read_ids(target, "The target")
        else:
            text = self.codec.encode(target, special=False)
            if not len(text):
                raise InputError(f"target={target!r} has no tokens. Pass a text that has some.")
        self._check_ids(text)
        return text

    def _generated(self, ids: Tensor, gen_args: Mapping[str, Any] | None) -> Tensor:
        """What the model generates behind the prompt, (n_out,)."""
        generate = getattr(self.model, "generate", None)
        if not callable(generate):
            raise OptionError(
                f"target=None has the model generate a text, but {type(self.model).__name__} has "
                "no generate(). Pass the target."
            )
        if not isinstance(gen_args, Mapping | None):
            raise OptionError(
                f"gen_args={gen_args!r} must be a dict of arguments of generate(), for example "
                "gen_args={'max_new_tokens': 10}."
            )
        inputs = ids[None].to(self._device)
        options = dict(_default_gen_args(generate, len(ids)) if gen_args is None else gen_args)
        if "attention_mask" in inspect.signature(type(self.model).forward).parameters:
            options.setdefault("attention_mask", torch.ones_like(inputs))
        found = generate(inputs, **options)
        found = getattr(found, "sequences", found)
        if len(found) != 1 or found.shape[1] <= len(ids):
            raise OptionError(
                f"gen_args={gen_args!r} made the model return sequences of shape "
                f"{tuple(found.shape)} for a prompt of {len(ids)} tokens; one that is longer than "
                "the prompt is needed."
            )
        return read_ids(found[0, len(ids) :], "The generated text")

    @property
    def _device(self) -> torch.device:
        """Where the model takes its ids; offloaded parameters do not tell."""
        devices = (p.device for p in self.model.parameters() if p.device.type != "meta")
        return next(devices, torch.device("cpu"))

    def _check_ids(self, ids: Tensor) -> None:
        """Raise for ids that the model has no embedding for."""
        embeddings = getattr(self.model, "get_input_embeddings", lambda: None)()
        size = getattr(embeddings, "num_embeddings", None)
        if size is not None and int(ids.max()) >= size:
            raise InputError(
                f"Token id {int(ids.max())} is none of the {size} that the model embeds. Does the "
                "tokenizer belong to this model?"
            )


@dataclass(frozen=True)
class _Asked:
    """How a text is explained: by which spans, over how many hops, against what, kept where."""

    spans: Spans | None
    hops: int
    against: Tensor | None
    resume: Path | None
    show_progress: bool


def _adds_up(method: Any) -> bool:
    """Whether a method's parts add up to the output, with what belongs to no token."""
    return isinstance(method, LinearMethod) and hasattr(method, "decompose")


def _check_head(model: nn.Module) -> None:
    """Raise if a model of transformers says that it returns no logits over a vocabulary."""
    head = getattr(model, "get_output_embeddings", None)
    if callable(head) and head() is None:
        raise OutputError(
            f"{type(model).__name__} has no language-modelling head: it returns no logits (B, L, "
            "vocabulary) in which a text's tokens could be looked up. Use the ...ForCausalLM class."
        )


def _is_several(target: Any) -> bool:
    """Whether a target is a list of texts, not the token ids of one."""
    if not isinstance(target, list | tuple):
        return False
    if not target:
        raise InputError("target is an empty list; pass a text, token ids, or a list of texts.")
    return all(isinstance(t, str | list | tuple) or getattr(t, "ndim", 0) > 0 for t in target)


def _default_gen_args(generate: Any, tokens: int) -> dict[str, Any]:
    """The likeliest token each time; mamba_ssm's own generate counts the prompt too."""
    if "max_length" in inspect.signature(generate).parameters:
        return {"max_length": tokens + _NEW_TOKENS}
    return {"max_new_tokens": _NEW_TOKENS, "do_sample": False, "temperature": None, "top_p": None}
