"""Make a whole network linear in its input inside a ``with``.

The model's own code runs, and the rules of :mod:`.rules` are applied to every torch function. The
kernels of many mixers have rules as well (:mod:`.kernels`); hooks replace all other mixers by their
frozen operators. The model's results stay the same, but its graph is linear. One ordinary backward
pass therefore decomposes the output exactly.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CachedStateError, InputError, OptionError
from ..mixers.base import Call, LinearMixer, joined_end_to_end, refused_cache
from ..operators import Chain, Diagonal, Operator, Sum
from ..operators.coefficients import follow_mask, live_coefficients
from ..operators.kernels.arithmetic import full_precision, unseen
from ..operators.kernels.truths import all_finite
from ..tracing import Mixer, find_mixers, require_real_tokens
from ..tracing.caches import cache_of, copied
from ..tracing.chance import refusals
from ..tracing.gradients import checkpoints_off, recordable
from ..tracing.hooks import hooked, name_of_running, swapped, tensors_in
from ..tracing.observe import Arguments, Watcher, observe
from ..tracing.offload import linearize
from ..tracing.record import none_ran
from ..tracing.split import gathered_weights, require_gathered
from ..tracing.verification import (
    accepted,
    output_errors,
    require_same,
    rounding_explains,
    tolerance_for,
)
from .blocks import Blocks, lists_of_blocks
from .carried import Carried
from .kernels import entries
from .mode import Linearizing
from .reading import Reading, is_read, mask_of
from .shares import FAMILY, Rule, apply_with_shares, has_shares
from .sites import Site, SiteActivation, Sites


@dataclass(frozen=True, eq=False)
class Step:
    """One mixer call of a linear network.

    Attributes:
        name: the mixer's qualified name in the model.
        entering: the tensors depending on the input that entered the mixer's block; their sum is
            the residual stream.
        output: the mixer's output (B, L, E).
        again: for each entering tensor an id if other blocks may receive the same tensor, else
            None. Default: empty, None for all.

    Example:
        >>> import torch
        >>> from captum_ssm.linear import Step
        >>> Step("layers.0.mixer", entering=(), output=torch.zeros(1, 4, 8)).name
        'layers.0.mixer'
    """

    name: str
    entering: tuple[Tensor, ...]
    output: Tensor
    again: tuple[int | None, ...] = ()


@dataclass(eq=False)
class Network(Watcher):
    """A network linear in its input, as :func:`linearized` yields it.

    Attributes:
        mode: the torch function mode that applies the rules and records constants.
        mixers: the mixers of the model.
        sites: the activations that are read or cut.
        keeps_steps: whether the inputs and outputs of mixers are kept. Default: True.
        verify: whether operators are checked; see :func:`linearized`. Default: False.
        begins: the activation from which the network is explained. Default: None, the input.
        calls: the number of calls of each mixer so far. Default: none.
        granted: the largest error that was accepted for an operator. Default: 0.
        mask: True for real tokens (B, L), from the first mixer that reads the input and has a mask;
            None if no token is padding. Default: None.
        steps: the mixer calls, in the order in which they ran, if they are kept. Default: empty.
        content_only: the names of called mixers in which only the content, and no other factor,
            can get relevance; one per call. Default: empty.
        continues: whether the run continues from a cache. Default: False.
        has_past: whether the cache has values other than zeros. Default: False.
        carried: what the run receives and passes on as one chunk of a sequence. Default: None, the
            run is of a whole sequence.

    Example:
        >>> import torch
        >>> from captum_ssm.linear import linearized
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> with linearized(model, ids) as network:
        ...     _ = model(ids)
        >>> [step.name for step in network.steps], tuple(network.root.shape[:2])
        (['backbone.layers.0.mixer', 'backbone.layers.1.mixer'], (1, 4))
    """

    mode: Linearizing
    mixers: Sequence[Mixer]
    sites: Sites
    keeps_steps: bool = True
    verify: bool | float = False
    begins: Site | None = None
    calls: Counter[Mixer] = field(default_factory=Counter)
    granted: float = 0.0
    mask: Tensor | None = None
    steps: list[Step] = field(default_factory=list)
    content_only: list[str] = field(default_factory=list)
    continues: bool = False
    has_past: bool = False
    carried: Carried | None = None
    _entering: dict[nn.Module, tuple[Tensor, ...]] = field(default_factory=dict)  # by block
    _entered: dict[int, Tensor] = field(default_factory=dict)  # tensors that entered a block, by id
    _first_id: dict[int, int] = field(default_factory=dict)  # by a view's id, the viewed tensor's
    _passed_on: dict[Mixer, Mapping[int, Tensor]] = field(default_factory=dict)  # see left()
    _reads_root: dict[Any, bool] = field(default_factory=dict)  # by graph node
    _runs_own_code: dict[nn.Module, bool] = field(default_factory=dict)  # see _uses_own_code()
    _readings: list[Reading] = field(default_factory=list)

    @property
    def root(self) -> Tensor:
        """The tensor from which the network is explained.

        Embeddings (B, L, E) of token ids, the floating input, or the activation at ``begins``.

        Raises:
            InputError: if the model looked up no token ids, or ids whose positions among the given
                ids are not known.
            LayerError: if the module at ``begins`` did not run.
        """
        if self.begins is not None:
            leaf = self.met(self.begins).leaf
            assert leaf is not None
            return leaf
        if self.mode.root is None:
            raise InputError(
                "No embedding layer of the model looked up the token ids given as inputs, so they "
                "have no embeddings to attribute to. Pass embeddings (B, L, E) as inputs."
            )
        if not self.mode.knows_root:
            raise InputError(
                "The token ids that the model looked up are not the ids given as inputs, and torch "
                "functions do not show which token is which. forward_func may compute new ids, "
                "from a list or by arithmetic. Pass the ids that the model reads as inputs, or "
                "embeddings (B, L, E)."
            )
        return self.mode.root

    @property
    def roots(self) -> list[Tensor]:
        """The root and, if the root is a look-up of ids, the look-ups in further tables."""
        further = [] if self.begins is not None else self.mode.again
        return [self.root, *(x.leaf for x in further)]

    @property
    def passing(self) -> list[Tensor]:
        """The inputs whose residual stream may bypass ``begins``; empty if ``begins`` is None."""
        if self.begins is None or self.mode.root is None:
            return []
        return [self.mode.root, *(x.leaf for x in self.mode.again)]

    def met(self, site: Site) -> SiteActivation:
        """Return the activation that was recorded at one of ``sites``.

        Raises:
            LayerError: if the site's module did not run.
        """
        return self.sites.activation_at(site)

    def check_ran(self) -> None:
        """Raise NoMixerError if none of the model's mixers ran."""
        if not self.calls:
            raise none_ran(self.mixers)

    @property
    def looks_away(self) -> bool:
        """True while a block runs without a graph, before it runs again in a backward pass."""
        return self.mode.blocks is not None and self.mode.blocks.entering is not None

    def enters(self, module: nn.Module, given: Arguments, is_block: bool) -> Arguments | None:
        """Record the tensors that enter a block; return views, to separate the paths of blocks."""
        blocks = self.mode.blocks
        waits = blocks is not None and blocks.waits_for(module)  # it runs again later
        if waits or not (is_block and self.keeps_steps):
            return None
        live = [x for x in (*given[0], *given[1].values()) if self.mode.is_live(x)]
        # gradients at views come from this block alone. They are needed if several tensors enter,
        # of which one may be computed from another, or one that entered an earlier block.
        has_several = len({id(x) for x in live}) > 1
        views = {id(x): x.view_as(x) for x in live if has_several or id(x) in self._entered}
        self._first_id |= {id(view): self._first_id.get(key, key) for key, view in views.items()}
        self._entered |= {id(x): x for x in (*live, *views.values())}
        self._entering[module] = tuple(views.get(id(x), x) for x in live)
        return swapped(given, views) if views else None

    def begin_again(self) -> None:
        """Clear the records of tensors that entered blocks, after a block has run again."""
        for records in (self._entering, self._entered, self._first_id):
            records.clear()

    def leaves(self, module: nn.Module, output: Any) -> Any:
        """Replace a block's outputs by views, to separate them from uses inside the block."""
        live = {id(x): x for x in tensors_in(output) if self.mode.is_live(x)}
        return swapped(output, {key: x.view_as(x) for key, x in live.items()})

    def _uses_own_code(self, module: nn.Module, sequence: Tensor | None) -> bool:
        """Return True if the mixer is explained by its own running code; see :mod:`.reading`.

        This is decided when the mixer's input is first known; ``sequence`` is None if it is not.
        An operator is needed instead if heads are read or cut, for relevance by role with rule
        ``"half"``, and without constants, to keep the coefficients of the run with constants.
        """
        if sequence is not None and module not in self._runs_own_code:
            sites = [site.at for site in self.sites.cut if site.module is module]
            halves_by_role = self.mode.divides and not self.mode.follows_tangents
            needs_operator = "heads" in sites or halves_by_role or not self.mode.ledger.kept
            self._runs_own_code[module] = not needs_operator and is_read(
                module, sequence, self.mode.divides, self.continues
            )
            if halves_by_role and self.continues:
                raise CachedStateError(
                    "The call continues from a cache, for which rule='half' cannot compute "
                    "relevance by role. Pass roles=False, or the whole sequence without a cache."
                )
        return self._runs_own_code.get(module, False)

    def continued(self, name: str, cache: Any) -> Any:
        """Return a copy of a run's cache, with leaves as tensors; refuse caches of some kinds."""
        kinds = {type(layer).__name__ for layer in getattr(cache, "layers", ())}
        kinds = {kind for kind in kinds if "Static" in kind or "Quantized" in kind}
        if kinds:  # with room for later tokens, or integers
            raise CachedStateError(
                f"{name}={type(cache).__name__} was passed, whose layers ({', '.join(kinds)}) "
                "cannot be split. Pass a DynamicCache, or pass the whole sequence in one call."
            )
        if self.mode.blocks is not None:
            raise OptionError(
                f"recompute=True runs blocks twice, but {name}={type(cache).__name__} was passed, "
                "which each run of a block changes. Leave recompute out, or pass the whole "
                "sequence without a cache."
            )
        self.continues = True
        new_cache = copied(cache, self._cache_leaf)
        if self.carried is not None:
            self.carried.cache = new_cache
        return new_cache

    def _cache_leaf(self, x: Tensor) -> Tensor:
        """Return a copy of a cache's tensor with a graph, and note whether it holds a past."""
        self.has_past = self.has_past or bool(x.any())  # states of an empty cache are 0
        copy = self.mode.cached(x)
        if self.carried is not None and x.is_floating_point():
            self.carried.watch_leaf(self.mode.ledger.leaves[-1], self.mode.labels)
        return copy

    def while_mixing(
        self, module: nn.Module, sequence: Tensor | None
    ) -> Sequence[AbstractContextManager[Any]]:
        """Return contexts for the mixer's own code: under the rules, or without a graph."""
        with unseen():
            if self._uses_own_code(module, sequence):
                reading = Reading(self.mode, sequence, self.continues, self.carried, module)
                self._readings.append(reading)
                return (reading.activate(),)
        return torch.no_grad(), *self.mode.looking_away()

    def returned(self, mixer: Mixer, call: Call) -> Tensor | None:
        """Return the mixer's output with a linear graph, computed by its operator if necessary."""
        output = call.output_tensor
        if self.mode.blocks is None or not self.mode.blocks.runs_again:  # count no rerun
            self.calls[mixer] += 1
        if self.looks_away:
            self._record_mask(mixer, call)
            return None
        self.mode.known(call.hidden_states)  # refuse memory that a kernel may have written
        if self._runs_own_code.get(mixer.module, False):
            with unseen():
                if self._is_explained(self._readings.pop(), mixer, call):
                    return None
        call = replace(call, around={})  # windows stay windows, as later code expects them
        with full_precision(output.device):
            replace_heads = functools.partial(self.sites.record_heads, mixer.module)
            linear = self._check_linear(linearize(mixer, call, running=True), mixer, call)
            out = apply_mixer(linear, self.mode, replace_heads)
        if self.verify is not False:
            self._verify(mixer, call, out)
        self._record_call(mixer, call, out, linear.mask)
        return out.to(output.dtype)

    def _is_explained(self, reading: Reading, mixer: Mixer, call: Call) -> bool:
        """Return True if a mixer's own code has explained the call, and record the call."""
        output = call.output_tensor
        if not self.continues:
            name, cache = cache_of(mixer.module, call.args, dict(call.kwargs))
            if cache is not None:
                raise refused_cache(name, cache)
        if not reading.explains(call) or not all_finite(output):  # an adapter names the cause
            return False
        self._error_limit(output, mixer)  # for ``granted``
        reading.mask = mask = mask_of(mixer.module, call)
        mask = None if mask is None else mask[:, -output.shape[1] :]  # without cached tokens
        self._record_call(mixer, call, output, mask)
        return True

    def _record_call(self, mixer: Mixer, call: Call, out: Tensor, mask: Tensor | None) -> None:
        """Record the mask of a mixer call, and its output as a :class:`Step`."""
        require_real_tokens(mask)
        if mask is not None and self.mask is None and self._reads_input(call):
            self.mask = mask
        if self.keeps_steps and self.mode.is_live(out):
            entering = () if call.block is None else self._entering[call.block]
            first_ids = tuple(self._first_id.get(id(x)) for x in entering)
            self.steps.append(Step(mixer.name, entering, out, first_ids))

    def _record_mask(self, mixer: Mixer, call: Call) -> None:
        """Record only the mask of a mixer call, in a block that now runs without a graph."""
        named_masks = [x for name, x in call.kwargs.items() if "mask" in name]
        if self.mask is None and any(isinstance(x, Tensor) for x in (*call.args[1:], *named_masks)):
            mask = linearize(mixer, call, running=True).mask
            require_real_tokens(mask)
            if mask is not None and self._reads_input(call):
                self.mask = mask

    def left(self, mixer: Mixer, output: Any) -> Any:
        """Replace further outputs, which later mixers read directly, by tensors with a graph."""
        replacements = self._passed_on.pop(mixer, None)
        if not replacements:
            return None
        items = list(output)
        for index, tensor in replacements.items():
            items[index] = tensor.to(items[index].dtype)
        return type(output)(items)

    def _reads_input(self, call: Call) -> bool:
        """Return True if a mixer reads the first input, so that both have the same tokens.

        The mixers of an image encoder read only further inputs. The graph is searched from the
        mixer's input; the answer for each node is kept in ``_reads_root`` until the run ends.
        """
        entering = None if self.mode.blocks is None else self.mode.blocks.entering
        inputs = [call.hidden_states] if entering is None else entering
        if not self.mode.others:
            return any(map(self.mode.is_live, inputs))
        root, reads_root = self.mode.root, self._reads_root
        if root is None:
            return False
        nodes = [x.grad_fn for x in inputs]
        while nodes:
            node = nodes[-1]
            if node is None or node in reads_root:
                nodes.pop()
                continue
            earlier = [x for x, _ in node.next_functions if x is not None]
            unvisited = [x for x in earlier if x not in reads_root]
            if unvisited:  # answer for these first; the node stays on the stack
                nodes += unvisited
                continue
            is_root = getattr(node, "variable", None) is root
            reads_root[nodes.pop()] = is_root or any(reads_root[x] for x in earlier)
        return any(reads_root.get(x.grad_fn, False) for x in inputs)

    def _check_linear(self, linear: LinearMixer, mixer: Mixer, call: Call) -> LinearMixer:
        """Check a linear mixer's mask and coefficients; record outputs for later mixers."""
        require_real_tokens(linear.mask)
        linear.check_finite(mixer.name)
        self._passed_on[mixer] = linear.passed_on
        divides = self.mode.follows_tangents and linear.values.requires_grad
        if divides and not has_shares(linear.operator, self.mode.rule):
            self.content_only.append(mixer.name)
        return linear

    def _error_limit(self, output: Tensor, mixer: Mixer) -> float:
        """Return the largest accepted error of a mixer's output, and record it in ``granted``."""
        limit = tolerance_for(output, mixer.module) if self.verify is True else float(self.verify)
        self.granted = max(self.granted, limit)
        return limit

    def _verify(self, mixer: Mixer, call: Call, out: Tensor) -> None:
        """Raise if the operator's output ``out`` differs from the module's output.

        If constants are not kept, the output is computed again with constants for this check.
        """
        output = call.output_tensor
        limit = self._error_limit(output, mixer)
        with torch.no_grad(), unseen(), full_precision(output.device):
            rebuild = functools.partial(linearize, running=True)
            from_operator = out if self.mode.ledger.kept else rebuild(mixer, call).output()
            errors = output_errors(from_operator, output)
            error = errors.strict if self.verify is True else errors.numbers  # with sums or not
            if accepted(error, limit):
                return
            assert not isinstance(error, tuple)  # on a GPU it is accepted for now, and read later
            overflowed = not math.isfinite(error) and not bool(torch.isfinite(output).all())
            if overflowed:  # the model's output will be refused, which names the cause
                return
            if self.verify is True and rounding_explains(mixer, call, from_operator, rebuild):
                self.granted = max(self.granted, error)
                return
        require_same(mixer.name, mixer.architecture, error, limit)


@contextmanager
def linearized(
    model: nn.Module,
    inputs: Tensor,
    *,
    rule: Rule = "frozen",
    by_role: bool = False,
    constants: bool = True,
    others: Sequence[Tensor] = (),
    layers: Sequence[str | nn.Module] | None = None,
    steps: bool = True,
    verify: bool | float = False,
    begins: Site | None = None,
    cuts: Sequence[Site] = (),
    reads: Sequence[Site] = (),
    recompute: bool = False,
    carried: Carried | None = None,
) -> Iterator[Network]:
    """Give forward runs inside the ``with`` an autograd graph that is linear in the input.

    The model's results stay the same. The gradient of an output at ``network.root`` is the gradient
    of the frozen network: gradient times input, summed, plus the constants' contributions equals
    the output. Take gradients after the ``with``.

    Args:
        model: the module; it is not changed, and hooks are removed when the block ends.
        inputs: the explained token ids, or a floating input. For a floating input, run the model
            on its copy ``root``.
        rule: the division of relevance among mixers' factors; see :mod:`.shares`. Default:
            ``"frozen"``.
        by_role: whether backward passes can follow the paths of one role. Default: False.
        constants: whether biases and other constants are kept. Default: True.
        others: further floating inputs, such as images beside a text; run the model on the copies
            ``mode.others``. Default: none.
        layers: names or modules of the mixers to use. Default: None, all with adapters.
        steps: whether the inputs and outputs of mixers are kept. Default: True.
        verify: whether operators are checked against their modules' outputs; a number is the
            tolerance. With ``constants=False`` this linearizes mixers twice. Default: False.
        begins: the activation from which the network is explained; a residual stream that bypasses
            the activation is separate. Default: None, the input.
        cuts: further activations at which the graph ends and begins anew. Default: none.
        reads: activations that are only read. Default: none.
        recompute: whether blocks run again in backward passes, one at a time, instead of keeping
            their graph; see :mod:`.blocks`. Blocks with one of ``begins``, ``cuts`` and ``reads``
            inside keep their graph. Default: False.
        carried: what the run receives and passes on as one chunk of a sequence; see
            :mod:`.carried`. Default: None, the run is of a whole sequence.

    Yields:
        The :class:`Network`, which is complete when the forward run has ended.

    Raises:
        NoMixerError, UnsupportedMixerError: as :func:`~captum_ssm.tracing.find_mixers` does.
        NotLinearError: for a function without a known linear form.
        PaddedExampleError: when all tokens of an example are padding.
        ReconstructionError: when ``verify`` finds an operator that differs from its module.

    Example:
        >>> import torch
        >>> from captum_ssm.linear import linearized
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> with linearized(model, ids, constants=False) as network:
        ...     logit = model(ids).logits[0, -1, 5]
        >>> (gradient,) = torch.autograd.grad(logit, network.root)
        >>> torch.allclose((gradient * network.root).sum(), logit, atol=1e-4)
        True
    """
    mixers = find_mixers(model, layers)
    with ExitStack() as stack:
        mode = stack.enter_context(
            under_rules(model, inputs, rule=rule, by_role=by_role, constants=constants)
        )
        mode.begin_others(others)
        cut = {**dict.fromkeys(reads, False), **dict.fromkeys(cuts, True)}
        sites = Sites(mode, cut if begins is None else {**cut, begins: True})
        network = Network(mode, mixers, sites, steps, verify, begins, carried=carried)
        vouched = layers is not None
        # under_rules has let autograd record the runs
        enter = observe(model, mixers, (network,), stack, gradients=False, vouched=vouched)
        stack.enter_context(entries())
        if steps:
            for block in {block for mixer in mixers for block in mixer.blocks}:
                hook = functools.partial(_separate_outputs, network)
                stack.enter_context(hooked(block.register_forward_hook, hook))
        sites.watch(stack)
        if recompute:
            blocks = mode.blocks = Blocks(network, enter)
            # the blocks refer to the network, and hold all that has entered them
            stack.callback(setattr, mode, "blocks", None)
            blocks_to_repeat = lists_of_blocks(model, mixers, sites.modules_around(model))
            stack.enter_context(blocks.watch(blocks_to_repeat))
        yield network


def _separate_outputs(network: Network, module: nn.Module, args: Any, output: Any) -> Any:
    return network.leaves(module, output)


@contextmanager
def under_rules(
    model: nn.Module,
    inputs: Tensor,
    *,
    rule: Rule = "frozen",
    by_role: bool = False,
    constants: bool = True,
) -> Iterator[Linearizing]:
    """Apply the rules for torch functions to the runs of a model inside the ``with``.

    A watcher of the run handles the mixers: :class:`Network` or :class:`.DirectPaths`.

    Args:
        model: the model.
        inputs: the explained input. If it holds ids, the linear network begins at their look-up.
        rule, by_role, constants: as in :func:`linearized`.

    Yields:
        The torch function mode with the rules.
    """
    names = {module: name for name, module in model.named_modules()}

    def where(otherwise: str) -> str:
        """Return the name of the running module; ``otherwise``, or the model's class, if none."""
        return name_of_running(names, otherwise or type(model).__name__)

    ids = None if inputs.is_floating_point() else inputs
    mode = Linearizing(ids, rule, where, constants, by_role)
    mode.checks.update(refusals(model))  # of dropout, batch statistics and the like
    if ids is None:
        mode.begin(inputs)
    with ExitStack() as stack:
        require_gathered(model, model.modules())
        stack.enter_context(gathered_weights(model.modules()))  # sharded weights are gathered
        stack.enter_context(recordable(model))  # weights made in inference mode are copied
        stack.enter_context(checkpoints_off(model))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(mode)
        yield mode


def apply_mixer(
    linear: LinearMixer, mode: Linearizing, replace_heads: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Compute a mixer's output (B, L, E) by its operator, with a linear graph.

    Args:
        linear: the linear mixer, whose values depend on the input.
        mode: the rules, which must be active, since the output projection runs under them.
        replace_heads: a function that replaces the operator's output (B, L, H, P). Default: None.
    """
    project, operator, values = linear.project, linear.operator, [linear.values]
    mask, end_to_end = linear.mask, linear.end_to_end
    del linear  # so that the values, large for long inputs, are freed once they are read
    _detach_frozen(operator, mode.rule)
    out = _apply(operator, values, mode, mask)
    out = project(out if replace_heads is None else replace_heads(out))
    return joined_end_to_end(out, mask) if end_to_end else out


def _detach_frozen(operator: Operator, rule: Rule) -> None:
    """Detach the coefficients of an operator to whose role a rule gives no relevance."""
    for (leaf, name), coefficient in live_coefficients(operator).items():
        if leaf.roles[name] not in FAMILY[rule]:
            leaf.live = {**leaf.live, name: coefficient.detach()}


def _apply(
    operator: Operator, values: list[Tensor], mode: Linearizing, mask: Tensor | None
) -> Tensor:
    """Apply an operator with its offset to values (B, L, H, P); the graph follows the rule.

    Products and sums are applied part by part, except for factors that share relevance as one
    product. ``values`` has one tensor, which is removed from the list so that it can be freed.
    """
    rule, ledger, labels = mode.rule, mode.ledger, mode.labels
    share = functools.partial(apply_with_shares, rule=rule, ledger=ledger, labels=labels)
    if isinstance(operator, Chain):
        # rule "half" is of products of two, one after the other
        as_one = mode.divides and mode.rule != "half"
        for index in reversed(range(len(operator.parts))):  # the last part acts first
            if as_one and has_shares(operator.parts[index], mode.rule):
                # this part and all that act after it divide relevance as one product
                outer = Chain(*operator.parts[: index + 1])
                with unseen():
                    return share(outer, values.pop(), mask=mask)
            values.append(_apply(operator.parts[index], values, mode, mask))
            mask = follow_mask(operator.parts[index], mask, {})
        return values.pop()
    if isinstance(operator, Sum) and not operator.live:
        first, *others = operator.parts
        total = _apply(first, values[:] if others else values, mode, mask)
        for part in others:
            total = total + _apply(part, values if part is others[-1] else values[:], mode, mask)
        return total
    x = values.pop()
    if mode.divides and has_shares(operator, mode.rule):
        with unseen():
            return share(operator, x, mask=mask)
    if isinstance(operator, Diagonal) and operator.component == "gate" and mode.rule == "half":
        # the mode's rule for products divides relevance equally
        return x * operator.live.get("weight", operator.weight)
    with unseen():
        out = operator.apply(x)
        bias = operator.offset()
        # unseen and recorded as it is: the mode would spread a bias common to all tokens over them
        return out if bias is None else mode.ledger.included(out + bias, bias)
