"""Direct paths from each module's output to the model's output, through no other module.

Mixers, and nonlinear modules that act within tokens, such as MLPs, are cut from their inputs. Their
outputs are the sources of a graph that contains only the residual stream, norms and the head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..mixers.base import Call
from ..tracing import Layer, Mixer, find_mixers
from ..tracing.hooks import hooked, swap_first
from ..tracing.observe import Arguments, Watcher
from ..tracing.parts import INPUT, Part, places_of_parts
from ..tracing.replays import Replays
from .mode import Linearizing
from .network import under_rules


@dataclass(frozen=True, eq=False)
class Local:
    """The output of a module that acts within tokens, or the sequence entering the first block.

    Attributes:
        output: the output, or the sequence, (B, L, E).
        mixers: the number of the last mixer call, from 1, on which the output depends; 0 for none.
            Before :meth:`DirectPaths.place`, the number of mixer calls that ran before.
        part: the module and call that return the output. Default: the run's input.
        given: for each token of the first layer the token's index in the output (B, L), or -1 for
            none; None if all indices are the same. Default: None.
        is_placed: whether ``mixers`` and ``given`` are known. Default: True.

    Example:
        >>> import torch
        >>> from captum_ssm.linear import Local
        >>> Local(output=torch.zeros(1, 4, 8), mixers=2).mixers
        2
    """

    output: Tensor
    mixers: int
    part: Part = INPUT
    given: Tensor | None = None
    is_placed: bool = True


@dataclass(eq=False)
class DirectPaths(Watcher):
    """The sources of a network's direct paths, as :func:`direct_paths` yields them.

    Attributes:
        mode: the torch function mode that applies the rules and records constants.
        entries: the sequences that entered the modules with the first mixer. The residual stream
            begins at one of these sequences, or at the input. Default: empty.
        outputs: the output of each mixer call, in order. Default: empty.
        locals: the outputs of nonlinear modules that act within tokens, in order. Default: empty.

    Example:
        >>> import torch
        >>> from captum_ssm import trace
        >>> from captum_ssm.linear import direct_paths
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> with direct_paths(model, ids) as paths, trace(model, watchers=[paths]):
        ...     _ = model(ids)
        >>> [tuple(out.shape[:2]) for out in (paths.entries[0].output, *paths.outputs)]
        [(1, 4), (1, 4), (1, 4)]
    """

    mode: Linearizing
    entries: list[Local] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    locals: list[Local] = field(default_factory=list)
    _placed_root: Local | None = None
    _calls: Counter[nn.Module] = field(default_factory=Counter)

    def enters(self, module: nn.Module, given: Arguments, is_block: bool) -> Arguments | None:
        """Begin new graphs at the sequences that enter modules containing the first mixer."""
        if self.outputs:  # a mixer has run
            return None
        self._calls[module] += 1
        part = Part(module, call=self._calls[module], enters=True, ran=0)

        def cut(x: Tensor) -> Tensor:
            """Return a new leaf for the sequence ``x``, and add it to ``entries``."""
            if x.dim() != 3 and not is_block:
                return x  # no sequence: an image, or a mask
            leaf = self.mode.leaf(x)
            self.entries.append(Local(leaf, 0, part))
            return leaf

        changed: Arguments = swap_first(given, cut)[0]
        return changed

    @property
    def root(self) -> Local | None:
        """The input, if it is a sequence of embeddings; else None."""
        root = self.mode.root
        if root is None or root.dim() != 3:
            return None
        return self._placed_root or Local(root, 0)

    @property
    def beginnings(self) -> list[Local]:
        """The sequences at which direct paths may begin: ``entries``, and the input itself."""
        root = self.root
        return self.entries if root is None else [*self.entries, root]

    def place(
        self,
        replays: Replays,
        stages: Sequence[Sequence[Layer]],
        given: Tensor | None,
        order: Tensor | None,
    ) -> None:
        """Find by replays the tokens and mixers on which each source depends, and set both.

        Args:
            replays, stages, given, order: see :func:`~captum_ssm.tracing.parts.places_of_parts`.
        """
        sources = [*self.locals, *self.beginnings]
        keys = [source.part for source in sources]
        places = places_of_parts(replays, stages, given, order, keys, self.mode.given)
        placed = [
            replace(source, is_placed=False)
            if location is None
            else replace(source, mixers=location.mixers, given=location.given)
            for source, location in zip(sources, places, strict=True)
        ]
        count = len(self.locals)
        self.locals, self.entries = placed[:count], placed[count : count + len(self.entries)]
        self._placed_root = None if self.root is None else placed[-1]

    def while_mixing(
        self, module: nn.Module, sequence: Tensor | None
    ) -> Sequence[AbstractContextManager[Any]]:
        """Return contexts in which the mixer runs without a graph and without the rules."""
        return torch.no_grad(), *self.mode.looking_away()

    def returned(self, mixer: Mixer, call: Call) -> Tensor:
        """Begin a new graph at the mixer's output, and return a copy of the new leaf."""
        self.outputs.append(self.mode.leaf(call.output_tensor))
        return self.outputs[-1].clone()  # hooks and the model may write to it

    def cut_if_bent(self, local_module: nn.Module, stack: ExitStack) -> None:
        """Hook a module so that its output begins a new graph if a function inside is not linear.

        Args:
            local_module: the module, which acts within tokens.
            stack: the exit stack that removes the hooks when it closes.
        """
        # calls that have not ended: nonlinear functions and mixers before, and number of the call
        running_calls: list[tuple[int, int, int]] = []
        call_number = 0

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            nonlocal call_number
            call_number += 1
            running_calls.append((self.mode.bends, len(self.outputs), call_number))

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            """Return a new leaf for the output if a function since :func:`before` is not linear."""
            bends_before, mixers, call = running_calls.pop()
            if bends_before == self.mode.bends or output is None:  # None if the call has failed
                return None

            def cut_output(x: Tensor) -> Tensor:
                leaf = self.mode.leaf(x)
                part = Part(local_module, call, enters=False, ran=mixers)
                self.locals.append(Local(leaf, mixers, part))
                return leaf.clone()

            return swap_first(output, cut_output)[0]

        stack.enter_context(hooked(local_module.register_forward_pre_hook, before))
        stack.enter_context(hooked(local_module.register_forward_hook, after, always_call=True))


@contextmanager
def direct_paths(
    model: nn.Module, inputs: Tensor, *, layers: Sequence[str | nn.Module] | None = None
) -> Iterator[DirectPaths]:
    """Give a run inside the ``with`` a graph that contains only the network's direct paths.

    Gradients of the output at the sources go through the residual stream, the frozen norms and the
    head, but through no mixer or MLP. These are the direct paths of LATIM's ALTI-Logit.

    Args:
        model: the module; it is not changed.
        inputs: the explained token ids, or a floating input. For a floating input, run the model
            on its copy ``mode.root``.
        layers: names or modules of the mixers to use. Default: None, all.

    Yields:
        The :class:`DirectPaths`. Pass them to :func:`~captum_ssm.trace` as ``watchers``; they are
        complete when the run has ended.

    Raises:
        NoMixerError, UnsupportedMixerError: as :func:`~captum_ssm.tracing.find_mixers` does.
        NotLinearError: for a function without a known linear form.

    Example:
        >>> import torch
        >>> from captum_ssm import trace
        >>> from captum_ssm.linear import direct_paths
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> with direct_paths(model, ids) as paths, trace(model, watchers=[paths]):
        ...     logit = model(ids).logits[0, -1, 5]
        >>> sources = [paths.entries[0].output, *paths.outputs]
        >>> # the logit of a Mamba without biases:
        >>> gradients = torch.autograd.grad(logit, sources)
        >>> parts = sum((g * x).sum() for g, x in zip(gradients, sources))
        >>> torch.allclose(parts, logit, atol=1e-4)
        True
    """
    with ExitStack() as stack:
        mode = stack.enter_context(under_rules(model, inputs))
        # A function without a linear form is refused only if a gradient reaches it.  None reaches
        # one that only mixers and parts within tokens read: these are cut.
        mode.defers = True
        paths = DirectPaths(mode)
        for module in _modules_within_tokens(model, find_mixers(model, layers)):
            paths.cut_if_bent(module, stack)
        yield paths


def _modules_within_tokens(model: nn.Module, mixers: Sequence[Mixer]) -> list[nn.Module]:
    """Return the largest modules inside layers that contain no mixer and are not norms.

    Layers are the members of each module list in which some member contains a mixer.
    """
    enclosing = {outer for mixer in mixers for outer in mixer.around}
    mixer_modules = {mixer.module for mixer in mixers}

    def parts_of(module: nn.Module) -> Iterator[nn.Module]:
        """Yield the children without mixers, and the parts of children that contain a mixer."""
        for child in module.children():
            if child in enclosing:
                yield from parts_of(child)
            elif child not in mixer_modules and "norm" not in type(child).__name__.lower():
                yield child

    lists = [outer for outer in enclosing if isinstance(outer, nn.ModuleList | nn.Sequential)]
    return list(dict.fromkeys(x for layers in lists for layer in layers for x in parts_of(layer)))
