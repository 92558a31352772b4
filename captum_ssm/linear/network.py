"""A whole network, linear at its input for the time of a ``with``.

No block of any model is written again: the model's own code runs, its mixers replaced by their
frozen operators through hooks, and every other function of torch read by the rules of
:mod:`.rules`.  What the model computes stays what it was; the graph it leaves is that of a linear
network, so one ordinary backward pass is the exact decomposition of its output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..mixers.base import Call, LinearMixer
from ..operators.kernels.arithmetic import full_precision, unseen
from ..tracing import Mixer, find_mixers, repaired_scans, require_real_tokens
from ..tracing.caches import without_caches
from ..tracing.eager import eagerly
from ..tracing.gradients import checkpoints_off, recordable
from ..tracing.hooks import Running, hooked
from ..tracing.offload import linearize
from ..tracing.places import Places
from ..tracing.record import none_ran
from ..tracing.verification import (
    relative_error,
    require_same,
    rounding_explains,
    tolerance_for,
)
from .mixer import through
from .mode import Gate, Linearising
from .substitution import substituted


@dataclass(frozen=True, eq=False)
class Step:
    """One mixer call of a linear network.

    Attributes:
        name: the mixer's qualified name in the model.
        entering: the live tensors that entered its block, whose sum is the residual stream.
        output: what the mixer returned, (B, L, E).

    Example:
        >>> import torch
        >>> from captum_ssm.linear import Step
        >>> Step("layers.0.mixer", entering=(), output=torch.zeros(1, 4, 8)).name
        'layers.0.mixer'
    """

    name: str
    entering: tuple[Tensor, ...]
    output: Tensor


@dataclass(eq=False)
class Network:
    """A network linear in its input, as :func:`linearised` yields it.

    Attributes:
        mode: the rules and the constants.
        mixers: the mixers of the model.
        ran: whether one of them has run. Default: False.
        mask: True for real tokens (B, L), as the mixers were told; None if none is padding.
            Default: None.
        steps: its mixer calls, in the order in which they ran; none if they are not kept. Default:
            empty.

    Example:
        >>> import torch
        >>> from captum_ssm.linear import linearised
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> with linearised(model, ids) as network:
        ...     _ = model(ids)
        >>> [step.name for step in network.steps], tuple(network.root.shape[:2])
        (['backbone.layers.0.mixer', 'backbone.layers.1.mixer'], (1, 4))
    """

    mode: Linearising
    mixers: Sequence[Mixer]
    ran: bool = False
    mask: Tensor | None = None
    steps: list[Step] = field(default_factory=list)

    @property
    def root(self) -> Tensor:
        """The input: embeddings (B, L, E), or the floating input itself.

        Raises:
            InputError: when token ids were given, and no embedding layer has looked them up.
        """
        if self.mode.root is None:
            raise InputError(
                "No embedding layer of the model looked up the token ids given as inputs, so they "
                "have no embeddings to attribute to. Pass embeddings (B, L, E) as inputs."
            )
        return self.mode.root

    def took(self, linear: LinearMixer, name: str) -> LinearMixer:
        """The linear mixer, in which there is nothing to complain of.

        Args:
            linear: it.
            name: of the mixer.

        Raises:
            PaddedExampleError, NonFiniteError: as :func:`linearised` does.
        """
        require_real_tokens(linear.mask)
        linear.check_finite(name)
        self.mask = linear.mask if self.mask is None else self.mask
        return linear

    def check_ran(self) -> None:
        """Raise if none of the model's mixers ran.

        Raises:
            NoMixerError: naming them.
        """
        if not self.ran:
            raise none_ran(self.mixers)


@contextmanager
def linearised(
    model: nn.Module,
    inputs: Tensor,
    *,
    gate: Gate = "frozen",
    constants: bool = True,
    layers: Sequence[str | nn.Module] | None = None,
    steps: bool = True,
    verify: bool | float = False,
) -> Iterator[Network]:
    """Make the forward runs inside the ``with`` leave a linear graph.

    What the model computes stays what it was.  The gradient of its output with respect to
    ``network.root`` is that of the frozen network: gradient times input, summed, and what the
    constants add make up the output.  Take gradients after the ``with``.

    Args:
        model: the module; it is not changed, and its hooks are removed when the block ends.
        inputs: the explained token ids, or a floating input; of the latter ``root`` is a live copy
            to run the model on.
        gate: which factor of a gated product carries its relevance, ``"frozen"`` (the stream) or
            ``"half"`` (both alike). Default: ``"frozen"``.
        constants: whether biases and other constants are kept. Default: True.
        layers: names or modules of the mixers that have adapters to use. Default: None, all.
        steps: whether what enters and leaves the mixers is kept. Default: True.
        verify: check that every operator reproduces its module's output; a number is the
            tolerance. What is compared is there already, but without constants, when the mixers
            are linearised once more. Default: False.

    Yields:
        The :class:`Network`, complete when the forward run is.

    Raises:
        NoMixerError, UnsupportedMixerError: as :func:`~captum_ssm.tracing.find_mixers` does.
        NotLinearError: for a function of which no linear form is known.
        PaddedExampleError: when all tokens of an example are padding.
        ReconstructionError: when ``verify`` finds an operator that is not its module.

    Example:
        >>> import torch
        >>> from captum_ssm.linear import linearised
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> with linearised(model, ids, constants=False) as network:
        ...     logit = model(ids).logits[0, -1, 5]
        >>> (gradient,) = torch.autograd.grad(logit, network.root)
        >>> torch.allclose((gradient * network.root).sum(), logit, atol=1e-4)
        True
    """
    mixers = find_mixers(model, layers)
    with ExitStack() as stack:
        mode = stack.enter_context(under_rules(model, inputs, gate=gate, constants=constants))
        network = Network(mode, mixers)
        entering: dict[nn.Module, tuple[Tensor, ...]] = {}

        def frozen(mixer: Mixer, call: Call) -> Tensor:
            with full_precision(call.output_tensor.device):
                out = through(network.took(linearize(mixer, call), mixer.name), mode)
            if verify is not False:
                _verify(mixer, call, out if constants else None, verify)
            network.ran = True
            if steps:
                block = () if call.block is None else entering[call.block]
                network.steps.append(Step(mixer.name, block, out))
            return out

        for block in {block for mixer in mixers for block in mixer.blocks}:
            before = _block_hook(entering, mode if steps else None)
            register = block.register_forward_pre_hook
            stack.enter_context(hooked(register, before, with_kwargs=True))
        for mixer in mixers:
            stack.enter_context(substituted(mixer, frozen, entering, mode))
        yield network


@contextmanager
def under_rules(
    model: nn.Module, inputs: Tensor, *, gate: Gate = "frozen", constants: bool = True
) -> Iterator[Linearising]:
    """Run a model under the rules, its mixers aside.

    Args:
        model, inputs, gate, constants: as for :func:`linearised`.
    """
    running = Running(model)
    ids = None if inputs.is_floating_point() else inputs
    follow = None if ids is None or ids.dim() != 2 else Places(running.name, ids_only=True)
    mode = Linearising(ids, gate, running.name, constants, follow)
    if ids is None:
        mode.begin(inputs)
    with ExitStack() as stack:
        without_caches(model, stack)
        running.watch(stack)
        stack.enter_context(recordable(model))
        stack.enter_context(checkpoints_off(model))
        stack.enter_context(eagerly(model))
        stack.enter_context(repaired_scans())  # faster forwards, too
        stack.enter_context(torch.enable_grad())
        stack.enter_context(mode)
        if follow is not None and ids is not None:
            follow.begin(ids)
            stack.enter_context(follow)
        yield mode


def _verify(mixer: Mixer, call: Call, rebuilt: Tensor | None, verify: bool | float) -> None:
    """Hold what an operator returns to what its module did.

    Args:
        mixer, call: the mixer and its call.
        rebuilt: what the operator returns; None if constants were dropped from it on the way, to
            have it computed once more, out of sight of the rules that drop them.
        verify: as for :func:`linearised`.
    """
    real = call.output_tensor
    limit = tolerance_for(real, mixer.module) if verify is True else verify
    with torch.no_grad(), unseen(), full_precision(real.device):
        found = linearize(mixer, call).output() if rebuilt is None else rebuilt
        error = relative_error(found, real)
        overflowed = not math.isfinite(error) and not bool(torch.isfinite(real).all())
        if overflowed:  # it is the model's output that will be refused
            return
        if error > limit and verify is True and rounding_explains(mixer, call, found, linearize):
            return
    require_same(mixer.name, mixer.architecture.family, error, limit)


def _block_hook(entering: dict[nn.Module, tuple[Tensor, ...]], mode: Linearising | None) -> Any:
    """Notes a block, the one entered last coming last, with the live tensors that enter it."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering.pop(module, None)
        given = () if mode is None else (*args, *kwargs.values())
        entering[module] = tuple(x for x in given if mode is not None and mode.is_live(x))

    return hook
