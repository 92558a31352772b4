"""Relevance of a prompt to the text that a language model generates."""

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
from ..call.progress import bar, shown
from ..call.targets import Against, SumTarget, logits_of
from ..engine.linear_method import LinearMethod, answer_questions
from ..engine.method import SSMAttribution
from .codec import Codec
from .hops import Row, SpanHop, follow
from .prompt import Prompt, SkipTokens, read_ids, read_prompt
from .result import SSMLLMAttributionResult, result_of_spans, subtract_results
from .resume import answer_saved, fingerprint
from .spans import Spans, joined, read_spans, with_spans

#: The default number of generated tokens.
_NEW_TOKENS = 25

#: The number of tokens of an additional run that checks whether a model is causal.
_FEW = 8
#: Largest accepted fraction of relevance on later tokens, from rounding in Fourier transforms.
_ROUNDING = 1e-3

#: Options of methods that :class:`SSMLLMAttribution` sets, so that users cannot.
_FIXED = ("inputs", "targets", "per_token", "return_convergence_delta")


class SSMLLMAttribution(Attribution):
    """Attributes a generated or fixed text to its prompt, like Captum's LLMAttribution.

    A token of the text at position p is explained as ``target=(p - 1, token)``, where the model
    predicts it.  One forward run processes the prompt and the whole text. Methods with gradients
    need one more backward pass for each token of the text.

    Args:
        attr_method: a method of this package, created with the language model; or a custom object
            with a method ``attribute_each``.
        tokenizer: the model's tokenizer, or any object with ``encode(text)`` and ``decode(ids)``.

    Raises:
        OptionError: if ``attr_method`` has no ``attribute_each``.
        OutputError: if the model has no language-modeling head.

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
                f"attr_method is {type(attr_method).__name__}, which has no method "
                "attribute_each(). Pass a method of this package, such as LatimFlow(model)."
            )
        super().__init__(attr_method.forward_func)
        self.attr_method = attr_method
        self.codec = Codec(tokenizer)
        self.model = find_model(self.forward_func, getattr(attr_method, "model", None))
        if isinstance(self.forward_func, nn.Module):
            _check_head(self.forward_func)
        #: Whether relevance was found on later tokens; None if that was not checked.
        self._is_bidirectional: bool | None = None

    def __repr__(self) -> str:
        return f"SSMLLMAttribution({self.attr_method!r})"

    @classmethod
    def get_name(cls) -> str:
        """Return the name that Captum shows."""
        return "SSM LLM Attribution"

    def attribute_future(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError, because no method is asynchronous."""
        raise NotImplementedError("SSMLLMAttribution is not asynchronous. Call attribute().")

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
        """Attribute every token of a text to the prompt before it.

        Args:
            inp: the prompt: a str; token ids as a list of ints or a tensor (L,) or (1, L); a list
                of chat messages ``{"role": ..., "content": ...}``; or Captum's TextTokenInput or
                TextTemplateInput (its values are the features).
            target: the text: a str, appended to the prompt unchanged, often with a space in front;
                token ids as for the prompt; or a list of texts, with one forward run each.
                Default: None, a text that the model generates.
            spans: the spans of the text to explain, each with one backward pass: ``"token"``,
                ``"word"``, ``"sentence"``, ``"paragraph"``, ``"all"``, a compiled pattern of the
                separators, or ranges of tokens. The output of a span is the sum over its tokens;
                with ``contrast="all"`` it is the log-probability of the span. All spans share one
                forward run. Default: None, each token, without contributions of constants.
            prompt_spans: the prompt's features, in the same forms; ``"turn"`` for the messages of
                a chat; or Captum's feature mask, integers (L,). Default: None, each token.
            hops: how many times the relevance of generated tokens is passed on to earlier tokens
                and the prompt, with one backward pass per span and hop. LatimFlow's rule
                ``"frozen"`` gives no relevance to queries, so it finds fewer hops. Default: 0.
            against: a second text, in the forms of the target and of any length, whose relevance is
                subtracted; needs ``spans="all"`` and a second run. Default: None.
            resume: a folder that stores the result of each span and hop, from which an interrupted
                call continues; needs ``spans``. Default: None, no folder.
            show_progress: show a progress bar. Default: False.
            skip_tokens: ids or strings of prompt tokens to leave out of the result, such as
                special tokens. Default: None.
            gen_args: arguments of the model's ``generate``, if target is None. Default: None, 25
                tokens by greedy decoding.
            **options: further arguments of the method's ``attribute``, such as ``rule``,
                ``components`` or ``contrast``, with the same defaults. Positions in these arguments
                refer to the model's input: the prompt and the text without its last token.

        Returns:
            The result, on the CPU and in float32; for a list of targets a list of results.

        Raises:
            InputError: if a prompt or text has no tokens, or ids outside the model's vocabulary.
            OptionError: if the model is bidirectional, if an option is not accepted, if hops are
                used with a method without sums, or if the model generates no text.
            TargetError: if the model's output has no logits (B, L, vocabulary).
        """
        for name in _FIXED:
            if name in options:
                raise OptionError(f"{name}={options[name]!r} is set internally. Leave {name} out.")
        prompt = read_prompt(inp, self.codec, skip_tokens)
        if prompt_spans is not None:
            prompt = with_spans(prompt, prompt_spans, self.codec, inp)
        if checks.integer("hops", hops) < 0:
            raise OptionError(f"hops={hops} is negative. Pass an integer of at least 0.")
        if hops and not _sums_to_output(self.attr_method):
            raise OptionError(
                f"hops={hops} needs a method whose relevance sums to the output, but attr_method "
                f"is {type(self.attr_method).__name__}. Pass attr_method=LatimFlow(model)."
            )
        self._check_ids(prompt.ids)
        if against is not None and spans != "all":
            raise OptionError(f"against= needs one span, but {spans=}. Pass spans='all'.")
        if resume is not None and (spans is None or not _sums_to_output(self.attr_method)):
            raise OptionError(
                f"resume={str(resume)!r} with {spans=} and {type(self.attr_method).__name__} is "
                "not accepted. Pass spans, such as 'token', and attr_method=LatimFlow(model)."
            )
        plan = _TextPlan(
            spans if spans is not None or not hops else "token",  # hops need sums, as spans have
            hops,
            None if against is None else self._read_target(against),
            None if resume is None else Path(resume),
        )
        if gen_args is not None and target is not None:
            raise OptionError(f"gen_args={gen_args!r} needs target=None. Pass only one of them.")
        if target is None:
            texts = [self._generate(prompt.ids, gen_args)]
        else:
            texts = [self._read_target(x) for x in (target if _are_texts(target) else [target])]
        with bar(type(self.attr_method).__name__, show_progress):
            results = [self._explain_text(prompt, text, plan, options) for text in shown(texts)]
        return results if _are_texts(target) else results[0]

    def _explain_text(
        self, prompt: Prompt, text: Tensor, plan: _TextPlan, options: Mapping[str, Any]
    ) -> SSMLLMAttributionResult:
        """Explain one text (n,) by spans or tokens; subtract ``plan.against``, explained alike."""
        prompt_length = len(prompt.ids)
        ids = torch.cat([prompt.ids, text[:-1]])[None].to(self._device)  # the last predicts none
        if plan.spans is not None:
            result = self._explain_spans(prompt, text, ids, plan, options)
            if plan.against is None:
                return result
            resume = None if plan.resume is None else plan.resume / "against"
            without_against = replace(plan, against=None, resume=resume)  # ends the recursion
            against = self._explain_text(prompt, plan.against, without_against, options)
            return subtract_results(result, against)
        # counted from the end, because models may insert tokens at the beginning
        targets = [(i - len(text), token) for i, token in enumerate(text.tolist())]
        try:
            rows = self.attr_method.attribute_each(ids, targets, **options)  # (n_out, 1, L)
        except TargetError as error:
            raise TargetError(
                f"A text's tokens are explained as targets (position, token): {error} Pass a model "
                "that returns logits (B, L, vocabulary)."
            ) from error
        relevance = rows[:, 0].detach().cpu()  # (n, L)
        self._check_causal(relevance, [prompt_length + i for i in range(len(text))])
        token_attr = prompt.features(relevance[:, :prompt_length]).float()
        return SSMLLMAttributionResult(
            seq_attr=token_attr.sum(0),
            token_attr=token_attr,
            generated_attr=F.pad(relevance[:, prompt_length:], (0, 1)).float(),  # 0: not read
            input_tokens=prompt.names,
            output_tokens=self.codec.names(text),
            input_pieces=prompt.pieces,
            output_pieces=self.codec.pieces(text),
        )

    def _explain_spans(
        self, prompt: Prompt, text: Tensor, ids: Tensor, plan: _TextPlan, options: Mapping[str, Any]
    ) -> SSMLLMAttributionResult:
        """Explain the spans of a text, one output value per span, in ``plan.hops`` hops.

        Args:
            prompt: the prompt.
            text: the ids of the text (n,).
            ids: the ids of prompt and text, without the last one (1, L).
            plan: the checked arguments of :meth:`attribute`.
            options: further arguments of the method.
        """
        spans = read_spans("spans", plan.spans, text, self.codec)  # type: ignore[arg-type]
        prompt_length, method, method_options = len(prompt.ids), self.attr_method, dict(options)
        positions = [i - len(text) for i in range(len(text))]
        contrast = method_options.pop("contrast", None)
        if _sums_to_output(method):  # there is one example, so the batch size has no effect
            checks.count("internal_batch_size", method_options.pop("internal_batch_size", None))

        def explain_in_hops(logits: Callable[[], Tensor]) -> Generator[Against, Row, list[SpanHop]]:
            """Return a generator that yields targets, is sent their rows, and returns the hops."""
            questions = follow(text, spans, prompt_length, contrast, plan.hops, logits)
            steps = len(spans) * (1 + plan.hops)
            if plan.resume is None:
                return answer_saved(questions, steps)
            name = type(method).__name__  # rows depend on the following, the model and options
            call_contents = ids, text, spans, contrast, plan.hops, name, vars(method).get("rule")
            return answer_saved(
                questions, steps, plan.resume, fingerprint(self.model, options, *call_contents)
            )

        # three types of methods: one run of the model; one run per target; no hops and constants
        if hasattr(method, "answer_in_turn"):
            hops = method.answer_in_turn(ids, positions, explain_in_hops, **method_options)
        elif _sums_to_output(method):
            hops = self._decompose_each_span(ids, explain_in_hops, positions, method_options)
        else:
            hops = [self._attribute_spans(ids, text, spans, prompt_length, options)]
        last_positions = [prompt_length + span.stop - 1 for span in spans]
        # [:, :-1]: the model does not read the last token
        self._check_causal(torch.cat([hops[0].prompt, hops[0].text[:, :-1]], 1), last_positions)
        if self._is_bidirectional is None and _sums_to_output(method) and len(text) > 1:
            # no span had later tokens to check: explain the output at the first input token.  A few
            # ids are enough, but additional arguments may fit only all of them
            first_ids = ids if "additional_forward_args" in options else ids[:, :_FEW]
            row = method.decompose(first_ids, (-first_ids.shape[1], int(text[0])), **method_options)
            self._check_causal(row.tokens.detach().cpu(), [1])
        names = [self.codec.text_of(text[span.start : span.stop]) for span in spans]
        pieces = joined(self.codec.pieces(text), spans)
        return result_of_spans(prompt, hops, spans, names, pieces)

    def _check_causal(self, relevance: Tensor, last_positions: list[int]) -> None:
        """Raise if a row of relevance (S, L) is nonzero from its entry of ``last_positions`` on.

        Such tokens come after the explained output, so the model looks ahead. The answer is kept
        in ``_is_bidirectional``. Methods of other packages are not checked.
        """
        if not isinstance(self.attr_method, SSMAttribution):
            return
        is_later = torch.arange(relevance.shape[1]) >= torch.tensor(last_positions)[:, None]
        total, on_later = (x.abs().sum(1) for x in (relevance, relevance * is_later))
        if bool((on_later > _ROUNDING * total).any()):
            self._is_bidirectional = True
        elif bool(is_later.any()):
            self._is_bidirectional = False
        if self._is_bidirectional:
            raise OptionError(
                f"{type(self.model).__name__} is bidirectional: its output at a token depends on "
                "later tokens, so it cannot generate a text token by token. Call attribute() of "
                "the method itself to explain single outputs."
            )

    def _decompose_each_span(
        self, ids: Tensor, explain_in_hops: Any, positions: list[int], options: Mapping[str, Any]
    ) -> list[SpanHop]:
        """Decompose the targets that ``explain_in_hops`` yields, with one model run per target."""

        def logits() -> Tensor:
            """Run the model, and return its logits (n, V) for the text's tokens."""
            with torch.no_grad():
                return logits_of(call_model(self.forward_func, ids, ()))[0, positions]

        def answer(target: Against) -> Row:
            """Decompose one target, with its contrast."""
            row: Row = self.attr_method.decompose(
                ids, target.target, contrast=target.contrast, **options
            )
            return row

        return answer_questions(explain_in_hops(logits), answer)

    def _attribute_spans(
        self,
        ids: Tensor,
        text: Tensor,
        spans: Sequence[range],
        prompt_length: int,
        options: Mapping[str, Any],
    ) -> SpanHop:
        """Explain spans with a method whose relevance does not sum to the output: no constants."""
        index_lists = [torch.arange(span.start, span.stop) for span in spans]
        targets = [SumTarget(index - len(text), text[index]) for index in index_lists]
        rows = self.attr_method.attribute_each(ids, targets, **options)[:, 0].detach().cpu()
        # without gradients a method returns means over the span's positions: convert to sums
        if not getattr(self.attr_method, "needs_gradient", True):
            rows = rows * torch.tensor([len(span) for span in spans]).to(rows)[:, None]
        rows = rows.double()
        on_text = F.pad(rows[:, prompt_length:], (0, 1))
        return SpanHop(
            rows[:, :prompt_length], on_text, torch.zeros_like(on_text), rows.new_zeros(len(rows))
        )

    def _read_target(self, target: Any) -> Tensor:
        """Convert a target (a text or token ids) to token ids (n,)."""
        if not isinstance(target, str):
            text = read_ids(target, "The target")
        else:
            text = self.codec.encode(target, special=False)
            if not len(text):
                raise InputError(f"target={target!r} has no tokens. Pass a text with tokens.")
        self._check_ids(text)
        return text

    def _generate(self, ids: Tensor, gen_args: Mapping[str, Any] | None) -> Tensor:
        """Generate a text after the prompt with the model, and return its token ids (n_out,)."""
        generate = getattr(self.model, "generate", None)
        if not callable(generate):
            raise OptionError(
                f"target=None needs a generated text, but {type(self.model).__name__} has no "
                "generate(). Pass the text as target."
            )
        if not isinstance(gen_args, Mapping | None):
            raise OptionError(
                f"gen_args={gen_args!r} is not a dict. Pass the arguments of generate(), such as "
                "gen_args={'max_new_tokens': 10}."
            )
        inputs = ids[None].to(self._device)
        options = dict(_default_gen_args(generate, len(ids)) if gen_args is None else gen_args)
        # without a mask, `generate` may treat prompt tokens equal to the padding token as padding
        if "attention_mask" in inspect.signature(type(self.model).forward).parameters:
            options.setdefault("attention_mask", torch.ones_like(inputs))
        sequences = generate(inputs, **options)
        sequences = getattr(sequences, "sequences", sequences)  # of an output object
        if len(sequences) != 1 or sequences.shape[1] <= len(ids):
            raise OptionError(
                f"With gen_args={gen_args!r} the model generated sequences of shape "
                f"{tuple(sequences.shape)} for a prompt of {len(ids)} tokens. Pass gen_args that "
                "generate one sequence longer than the prompt, or a target."
            )
        return read_ids(sequences[0, len(ids) :], "The generated text")

    @property
    def _device(self) -> torch.device:
        """The device for token ids, from the first parameter that is not offloaded."""
        devices = (p.device for p in self.model.parameters() if p.device.type != "meta")
        return next(devices, torch.device("cpu"))

    def _check_ids(self, ids: Tensor) -> None:
        """Raise if an id is outside the model's embedding table."""
        embeddings = getattr(self.model, "get_input_embeddings", lambda: None)()
        size = getattr(embeddings, "num_embeddings", None)
        if size is not None and int(ids.max()) >= size:
            raise InputError(
                f"Token id {int(ids.max())} is outside the model's vocabulary of {size} ids. Pass "
                "the tokenizer, or token ids, of this model."
            )


@dataclass(frozen=True)
class _TextPlan:
    """Checked arguments of :meth:`SSMLLMAttribution.attribute`, by the names of the arguments."""

    spans: Spans | None
    hops: int
    against: Tensor | None
    resume: Path | None


def _sums_to_output(method: Any) -> bool:
    """Return True if a method's relevance and constants sum to the output."""
    return isinstance(method, LinearMethod) and hasattr(method, "decompose")


def _check_head(model: nn.Module) -> None:
    """Raise if a transformers model has no language-modeling head."""
    head = getattr(model, "get_output_embeddings", None)
    if callable(head) and head() is None:
        raise OutputError(
            f"{type(model).__name__} has no language-modeling head, so it returns no logits (B, L, "
            "vocabulary). Pass a model of a ...ForCausalLM class."
        )


def _are_texts(target: Any) -> bool:
    """Return True if a target is a list of texts, and False if it is the token ids of one text."""
    if not isinstance(target, list | tuple):
        return False
    if not target:
        raise InputError("target is an empty list. Pass a text, token ids, or a list of texts.")
    return all(isinstance(t, str | list | tuple) or getattr(t, "ndim", 0) > 0 for t in target)


def _default_gen_args(generate: Any, tokens: int) -> dict[str, Any]:
    """Return arguments for greedy decoding; mamba_ssm's ``max_length`` includes the prompt."""
    if "max_length" in inspect.signature(generate).parameters:
        return {"max_length": tokens + _NEW_TOKENS}
    # temperature and top_p of the model's own configuration would cause warnings
    return {"max_new_tokens": _NEW_TOKENS, "do_sample": False, "temperature": None, "top_p": None}
