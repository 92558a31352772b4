"""Run published experiments: cut edges in windows of layers, or switch off parts of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attr.call import checks
from ..attr.call.inputs import as_tuple, call_model, single_input
from ..attr.call.targets import contrasted, logits_of, require_real_target, target_index
from ..errors import NoMixerError, OptionError, TargetError
from ..mixers.base import Call
from ..operators.kernels.arithmetic import full_precision
from ..tracing import Mixer, find_mixers, find_model
from ..tracing.observe import Watcher, observe
from ..tracing.offload import linearize
from ..tracing.record import none_ran
from .cut import Replacement
from .cutting import knock_out
from .messages import is_attention
from .pairs import Edges, OneLayer, Tokens

#: Layers, in the forms of ``Edges.layers``.
Layers = OneLayer | slice | range | Sequence[OneLayer] | None


@dataclass(frozen=True, eq=False)
class KnockoutWindows:
    """Probabilities of an answer after cutting edges from kinds of tokens in windows of layers.

    Attributes:
        kinds: the names of the K kinds of tokens.
        layers: the names of the N layers, in the order in which they ran; each is the middle of one
            window.
        window: the number of layers in a window; windows at the ends have fewer.
        plain: the probability of the answer in the unchanged model (B,).
        probabilities: the probability with one kind's edges cut in one window (K, N, B).

    Example:
        >>> import torch
        >>> from captum_ssm.edges import KnockoutWindows
        >>> plain, without = torch.tensor([0.5]), torch.tensor([[[0.25], [0.5]]])
        >>> found = KnockoutWindows(("subject",), ("first", "last"), 1, plain, without)
        >>> found.change.tolist(), found.layers_of(1)
        ([[[-50.0], [0.0]]], ('last',))
    """

    kinds: tuple[str, ...]
    layers: tuple[str, ...]
    window: int
    plain: Tensor
    probabilities: Tensor

    @property
    def change(self) -> Tensor:
        """Relative change of the probability after each cut, in percent as published, (K, N, B)."""
        return 100 * (self.probabilities / self.plain - 1)

    @property
    def difference(self) -> Tensor:
        """Change of the probability after each cut, (K, N, B)."""
        return self.probabilities - self.plain

    def layers_of(self, number: int) -> tuple[str, ...]:
        """Return the names of the layers in the window around the layer with index ``number``."""
        return tuple(self.layers[i] for i in _window(number, self.window, len(self.layers)))


def knockout_windows(
    forward_func: Callable[..., Any],
    inputs: Tensor | tuple[Tensor, ...],
    target: Any,
    kinds: Mapping[str, Tokens],
    *,
    targets: Tokens = -1,
    window: int = 9,
    layers: Layers = None,
    model: nn.Module | None = None,
    additional_forward_args: Any = None,
    component: str | Sequence[str] | None = None,
    selection: bool = False,
    replace: Replacement = None,
    verify: bool | float = True,
) -> KnockoutWindows:
    """Measure an answer's probability after cutting edges from kinds of tokens in layer windows.

    For every kind of tokens, such as a question's subject, and every layer, edges from these tokens
    to the answering tokens are cut in a window of layers, with this layer in the middle: Mamba
    Knockout (arXiv:2505.24244), and for attention Geva et al. (arXiv:2304.14767).

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        inputs: token ids (B, L), embeddings (B, L, E) or images (B, C, H, W); or a tuple of one
            such tensor.
        target: the answer, in Captum's forms: a class, or for outputs (B, L, V) a tuple
            (position, token).
        kinds: a mapping from names to source tokens, in the forms of :attr:`Edges.sources`.
        targets: the tokens that the answer is read from, in the same forms. Default: -1, the last.
        window: number of layers; windows at the ends have fewer. With an even number, one more
            layer comes before the middle. Default: 9.
        layers: the layers of windows, in the forms of :attr:`Edges.layers`; for a hybrid
            ``"attention"`` or ``"ssm"``. Default: None, all.
        model: the module, if forward_func does not reveal it. Default: None.
        additional_forward_args: further positional arguments of forward_func. Default: None.
        component, selection: the part of an edge to cut, as in :class:`Edges`. Default: None and
            False, the whole message.
        replace, verify: as in :func:`~captum_ssm.knock_out`. Default: None and True.

    Returns:
        The probabilities, with and without the edges.

    Raises:
        OptionError: for kinds that are not a mapping or empty, and unknown options.
        TargetError: when the target is not one of several classes or tokens, or is at a padded
            position.
        InputError, NoMixerError, QueryError, ReconstructionError: as in
            :func:`~captum_ssm.knock_out`.

    Example:
        >>> import torch
        >>> from captum_ssm.edges import knockout_windows
        >>> from captum_ssm.models import load_bundled
        >>> model, vocabulary = load_bundled()
        >>> prompt = "anna owns the lamp . bob owns the kite . ? anna owns the"
        >>> ids = torch.tensor([vocabulary.encode(prompt)])
        >>> kinds = {"other thing": 8, "thing": 3}
        >>> found = knockout_windows(model, ids, (-1, vocabulary.id_of("lamp")), kinds, window=1)
        >>> found.kinds, tuple(found.probabilities.shape)
        (('other thing', 'thing'), (2, 2, 1))
        >>> [[round(float(one)) for one in change] for change in found.change]  # percent, by layer
        [[0, 0], [0, -85]]
    """
    if not isinstance(kinds, Mapping) or not kinds:
        raise OptionError(
            f"kinds={kinds!r} is not accepted. Pass a mapping with at least one kind of tokens, "
            'such as {"subject": [2, 3], "last": -1}.'
        )
    if checks.count("window", window) is None:
        raise OptionError("window=None is not accepted. Pass an integer of at least 1.")
    verify = checks.tolerance("verify", verify)
    tensor, _ = single_input(inputs)
    additional, module = as_tuple(additional_forward_args), find_model(forward_func, model)

    def run() -> Any:
        return logits_of(call_model(forward_func, tensor, additional))

    with torch.inference_mode(False), torch.no_grad():
        output, parts = _run_and_record(module, run)
        index = _answer_index(target, output)
        mask = next((part.mask for part in parts.values() if part.mask is not None), None)
        require_real_target(index, output, mask)
        mixers = _mixers_that_ran(module, parts, layers)
        probabilities = []
        for sources in kinds.values():
            for i in range(len(mixers)):
                names = [mixers[j].name for j in _window(i, window, len(mixers))]
                cut = Edges(names, sources, targets, component=component, selection=selection)
                with knock_out(module, cut, replace=replace, verify=verify):
                    probabilities.append(_probabilities(run(), index))
    return KnockoutWindows(
        kinds=tuple(map(str, kinds)),
        layers=tuple(mixer.name for mixer in mixers),
        window=window,
        plain=_probabilities(output, index),
        probabilities=torch.stack(probabilities).view(len(kinds), len(mixers), -1),
    )


@dataclass(frozen=True, eq=False)
class PartScores:
    """Scores of a model with some mixers or heads off: scalars (), or one per example (B,).

    Attributes:
        plain: the score of the whole model.
        kinds: the scores without all mixers of a kind, ``"attention"`` or ``"ssm"``.
        layers: the scores without one mixer, by the mixer's name.
        heads: the scores without one head (Mamba-1: one channel), by mixer name, (H,) or (H, B);
            empty unless requested.
    """

    plain: Tensor
    kinds: Mapping[str, Tensor]
    layers: Mapping[str, Tensor]
    heads: Mapping[str, Tensor]


def parts_off(
    model: nn.Module | Callable[..., Any],
    score: Callable[[], Any],
    *,
    layers: Layers = None,
    heads: bool = False,
) -> PartScores:
    """Score a model while parts of it are switched off: kinds of mixers, layers or heads.

    A mixer that is off returns zero. A first run of the unchanged model finds the mixers.

    Args:
        model: a module, wrapped or not, or a function that runs one.
        score: a function without arguments that runs the model on any number of batches, and
            returns a number, such as the accuracy, or a tensor with one number per example.
        layers: the layers to switch off one by one, in the forms of :attr:`Edges.layers`. Default:
            None, all.
        heads: whether to also switch off each head of these layers; for Mamba-1, each channel.
            Default: False.

    Returns:
        The scores by part.

    Raises:
        OptionError: when score is not a function, or does not return numbers.
        NoMixerError: when the model has no mixer, or score runs none.

    Example:
        >>> import torch
        >>> from captum_ssm.edges import parts_off
        >>> from captum_ssm.models import load_bundled
        >>> from captum_ssm.models.recall import accuracy, generate
        >>> model, _ = load_bundled()
        >>> found = parts_off(model, lambda: accuracy(model, generate(16, seed=0)))
        >>> found.plain.item(), list(found.kinds), list(found.layers)
        (1.0, ['ssm'], ['backbone.layers.0.mixer', 'backbone.layers.1.mixer'])
        >>> found.kinds["ssm"].item() < 1
        True
    """
    if not callable(score):
        raise OptionError(f"score={score!r} is not accepted. Pass a function without arguments.")
    checks.flags(heads=heads)
    module = find_model(model)
    with torch.inference_mode(False), torch.no_grad():
        returned, parts = _run_and_record(module, score)
        plain = _score(returned)

        def without(*edges: Edges) -> Tensor:
            with knock_out(module, *edges):
                return _score(score())

        kinds: dict[str, list[str]] = {}
        for mixer, part in parts.items():
            kinds.setdefault("attention" if part.is_attention else "ssm", []).append(mixer.name)
        by_kind = {kind: without(Edges(names)) for kind, names in sorted(kinds.items())}
        mixers = _mixers_that_ran(module, parts, layers)
        by_layer = {mixer.name: without(Edges(mixer.name)) for mixer in mixers}
        by_head = {
            mixer.name: torch.stack(
                [without(Edges(mixer.name, heads=head)) for head in range(parts[mixer].heads)]
            )
            for mixer in (mixers if heads else ())
        }
    return PartScores(plain, by_kind, by_layer, by_head)


class _Part(NamedTuple):
    """Properties of a mixer that ran, which :func:`parts_off` needs to switch it off.

    Attributes:
        is_attention: whether the mixer is softmax attention.
        heads: the number of heads.
        mask: True for tokens that are not padding (B, L); None without padding.
    """

    is_attention: bool
    heads: int
    mask: Tensor | None


class _PartRecorder(Watcher):
    """Records the properties of the mixers, in the order in which they run."""

    def __init__(self) -> None:
        self.parts: dict[Mixer, _Part] = {}

    def returned(self, mixer: Mixer, call: Call) -> None:
        if mixer not in self.parts:  # its first call
            with torch.no_grad(), full_precision(call.output_tensor.device):
                linear = linearize(mixer, call, running=True)
            heads = linear.operator.shape.heads
            self.parts[mixer] = _Part(is_attention(linear), heads, linear.mask)


def _run_and_record(model: nn.Module, run: Callable[[], Any]) -> tuple[Any, dict[Mixer, _Part]]:
    """Call a function that runs the model; return the result and the outermost mixers that ran."""
    mixers, recorder = find_mixers(model), _PartRecorder()
    with ExitStack() as stack:
        observe(model, mixers, (recorder,), stack, gradients=False, vouched=False)
        returned = run()
    if not recorder.parts:
        raise none_ran(mixers)
    inside = {mixer.module for mixer in mixers}
    return returned, {m: part for m, part in recorder.parts.items() if inside.isdisjoint(m.around)}


def _mixers_that_ran(model: nn.Module, parts: Mapping[Mixer, _Part], layers: Layers) -> list[Mixer]:
    """Return the mixers that ``layers`` names and that ran, in the order in which they ran."""
    edges = Edges(layers)
    selected = {mixer.module for mixer in edges.chosen(find_mixers(model))}
    mixers = [
        mixer
        for mixer, part in parts.items()
        if mixer.module in selected and edges.is_of_kind(part.is_attention)
    ]
    if not mixers:
        raise NoMixerError(
            f"layers={layers!r} names none of the mixers that ran. Pass one or more of "
            f"{', '.join(mixer.name for mixer in parts)}, or None for all."
        )
    return mixers


def _window(middle: int, size: int, count: int) -> range:
    """Return the indices of ``size`` of ``count`` layers around one layer; fewer at the ends.

    The middle is the second of two middle layers if ``size`` is even.
    """
    return range(max(0, middle - size // 2), min(count, middle + (size + 1) // 2))


def _answer_index(target: Any, output: Tensor) -> Tensor:
    """Return the target's indices in the output; raise if the target has no probability."""
    index = target_index(target, output)
    # without a last dimension to choose from, each example has one number
    if index is None or not index.shape[1] or output.shape[-1] == 1:
        raise TargetError(
            f"target={target!r} has no probability in an output of shape {tuple(output.shape)}. "
            "Pass one of several classes, or (position, token). For a model that returns one "
            "number, use parts_off or knock_out."
        )
    return index


def _probabilities(output: Tensor, index: Tensor) -> Tensor:
    """Return the probabilities of the answers, (B,), in float64."""
    example = torch.arange(len(output), device=output.device)
    entries = output[(example, *index[:, :-1].unbind(-1))].detach().cpu().double()  # (B, V)
    return contrasted(entries, index[:, -1].tolist(), "all")[0].exp()  # "all": log-probability


def _score(returned: Any) -> Tensor:
    """Convert the result of the user's ``score`` function to a tensor () or (B,)."""
    number = checks.as_number(returned)
    if number is not None:
        return torch.tensor(number, dtype=torch.float64)
    if isinstance(returned, Tensor) and returned.dim() <= 1 and not returned.is_complex():
        return returned.detach().cpu().double()
    got = f"a tensor {tuple(returned.shape)}" if isinstance(returned, Tensor) else repr(returned)
    raise OptionError(
        f"score returned {got}. Pass a function that returns one number, or one per example (B,)."
    )
