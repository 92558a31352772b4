"""Read activations during a run, or begin a new linear network at an activation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import LayerError
from ..operators.kernels.arithmetic import unseen
from ..tracing import Mixer, find_mixers
from ..tracing.hooks import hooked
from .mode import Linearizing

#: Suffix of a mixer's name that names the channels of the mixer's heads.
HEADS = ".heads"


@dataclass(frozen=True, eq=False)
class Site:
    """An activation of a model: the input or output of a module, or a mixer's heads.

    Attributes:
        name: the module's name, with the suffix ``.heads`` for a mixer's heads.
        module: the module.
        at: ``"output"`` or ``"input"`` of the module, or ``"heads"``: the operator's output for
            each channel of each head, (B, L, H, P), before heads are mixed.
    """

    name: str
    module: nn.Module
    at: Literal["output", "input", "heads"]


def find_site(
    model: nn.Module,
    layer: str | nn.Module,
    layers: Sequence[str | nn.Module] | None = None,
    *,
    at_input: bool = False,
) -> Site:
    """Find the activation that ``layer`` names.

    Args:
        model: the model.
        layer: a module of the model, a module's qualified name, or a mixer's name + ``.heads``.
        layers: names or modules of the mixers to use. Default: None, all of them.
        at_input: whether the activation is the module's input. Default: False, the output.

    Returns:
        The :class:`Site`.

    Raises:
        LayerError: if ``layer`` is not a module of the model, or is inside a mixer.

    Example:
        >>> from captum_ssm.linear.sites import find_site
        >>> from captum_ssm.models import load_bundled
        >>> model, _ = load_bundled()
        >>> find_site(model, "backbone.layers.0").at
        'output'
    """
    mixers = find_mixers(model, layers)
    modules = dict(model.named_modules(remove_duplicate=False))
    if isinstance(layer, str) and layer.endswith(HEADS):
        is_mixer = any(layer.removesuffix(HEADS) in mixer.names for mixer in mixers)
        if is_mixer or layer not in modules:  # else a module named "heads"
            return _heads_site(layer, mixers, at_input)
    name = layer if isinstance(layer, str) else _name_of(layer, modules)
    module = modules.get(name) if isinstance(name, str) else None
    if module is None:
        description = repr(layer) if isinstance(layer, str) else f"of type {type(layer).__name__}"
        raise LayerError(
            f"layer is {description}, but not a module of the model. Pass a module of the model, a "
            f"name from model.named_modules(), such as {mixers[0].name!r}, or a mixer's heads, "
            f"{mixers[0].name + HEADS!r}."
        )
    for mixer in mixers:
        if module is not mixer.module and any(module is part for part in mixer.module.modules()):
            raise LayerError(
                f"layer {name!r} is inside the mixer {mixer.name!r}, which is replaced by its "
                f"operator as a whole. Pass {mixer.name!r}, or {mixer.name + HEADS!r} for the "
                "mixer's heads before they are mixed."
            )
    return Site(name or "", module, "input" if at_input else "output")


def _name_of(module: Any, modules: dict[str, nn.Module]) -> str | None:
    return next((name for name, candidate in modules.items() if candidate is module), None)


def _heads_site(name: str, mixers: Sequence[Mixer], at_input: bool) -> Site:
    """Return the :class:`Site` of a mixer's heads, for the mixer's name with ``.heads``."""
    mixer_name = name.removesuffix(HEADS)
    mixer = next((mixer for mixer in mixers if mixer_name in mixer.names), None)
    if mixer is None or at_input:
        raise LayerError(
            f"layer {name!r} names the output of the heads of the mixer {mixer_name!r}"
            + (
                ", which has no input: leave attribute_to_layer_input and "
                "attribute_to_neuron_input False, or pass the mixer."
                if mixer is not None
                else ", which the model does not have. Pass one of these mixers with '.heads': "
                f"{', '.join(mixer.name for mixer in mixers)}."
            )
        )
    return Site(name, mixer.module, "heads")


@dataclass(frozen=True, eq=False)
class SiteActivation:
    """The value of an activation in a run.

    Attributes:
        value: the activation's tensors that depend on the input, concatenated along the last
            dimension.
        sizes: the sizes of these tensors in the last dimension.
        leaf: the leaf from which the network continues, if the network is cut here; else None.
    """

    value: Tensor
    sizes: tuple[int, ...]
    leaf: Tensor | None

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors that ``value`` concatenates."""
        return torch.split(self.value, list(self.sizes), -1)


@dataclass(eq=False)
class Sites:
    """The activations that are read or cut in a run.

    Attributes:
        mode: the torch function mode that applies the rules to the run.
        cut: for each site, whether a new network begins at the site.
        met: the activation at each site, in the order of the run. Default: empty.
    """

    mode: Linearizing
    cut: dict[Site, bool]
    met: dict[Site, SiteActivation] = field(default_factory=dict)

    def modules_around(self, model: nn.Module) -> set[nn.Module]:
        """Return modules that contain a site inside; a module's own output is outside of it."""
        targets = {site.module for site in self.cut}
        # the input is inside: tensors that enter a block are read before the input is cut
        own = {site.module for site in self.cut if site.at != "output"}
        return own | {m for m in model.modules() if not targets.isdisjoint({*m.modules()} - {m})}

    def watch(self, stack: ExitStack) -> None:
        """Register hooks at all sites except heads until ``stack`` closes."""
        for site in self.cut:
            module = site.module
            if site.at == "output":
                record = self._output_hook(site)
                stack.enter_context(hooked(module.register_forward_hook, record))
            elif site.at == "input":
                record, register = self._input_hook(site), module.register_forward_pre_hook
                stack.enter_context(hooked(register, record, with_kwargs=True))

    def record_heads(self, module: nn.Module, value: Tensor) -> Tensor:
        """Record a mixer's heads (B, L, H, P) if they are a site; return the heads to use."""
        for site in self.cut:
            if site.at == "heads" and site.module is module:
                value = self._record(site, value)
        return value

    def activation_at(self, site: Site) -> SiteActivation:
        """Return the activation at a site; raise an error if the site's module did not run."""
        if site not in self.met:
            raise LayerError(
                f"layer {site.name!r} was not called in this run of the model, or another module "
                "uses it without calling it. Pass a layer that forward_func calls."
            )
        return self.met[site]

    def _output_hook(self, site: Site) -> Callable[..., Any]:
        return lambda module, args, output: self._record(site, output)

    def _input_hook(self, site: Site) -> Callable[..., Any]:
        return lambda module, args, kwargs: self._record(site, (args, kwargs))

    def _record(self, site: Site, value: Any) -> Any:
        """Record an activation, and return the value that the model uses: a copy or a new leaf."""
        if not torch._C._is_torch_function_enabled():  # a rerun by torch's checkpoint
            return value
        with unseen(), torch.enable_grad():
            tensors = list(_live_tensors(value))
            self._check(site, tensors)
            sizes = tuple(x.shape[-1] for x in tensors)
            # a copy even of one tensor: the model may change the activation in place later
            joined = torch.cat(tensors, -1)
            if not self.cut[site]:  # the model uses copies, for the same reason
                self.met[site] = SiteActivation(joined, sizes, None)
                copies = [x.clone() for x in tensors]
            else:
                leaf = self.mode.leaf(joined)
                self.met[site] = SiteActivation(joined, sizes, leaf)
                pieces = zip(torch.split(leaf, list(sizes), -1), tensors, strict=True)
                copies = [piece.to(x.dtype, copy=True) for piece, x in pieces]
            for x, replacement in zip(tensors, copies, strict=True):
                if self.mode.is_bent(x):  # an activation's output stays one
                    self.mode.mark_bent(replacement)
        return _replace_live(value, iter(copies))

    def _check(self, site: Site, tensors: Sequence[Tensor]) -> None:
        """Raise if the module ran before, has no tensor with a graph, or has unsuitable shapes."""
        if site in self.met:
            raise LayerError(
                f"layer {site.name!r} runs several times in one call of the model, so that it has "
                "several activations. Pass a layer that runs once, such as a block around it."
            )
        if not tensors:
            does = "takes" if site.at == "input" else "returns"
            raise LayerError(
                f"Nothing that layer {site.name!r} {does} depends on the inputs, or it runs "
                "under no_grad. Pass a layer between the embeddings and the output."
            )
        shapes, root = [tuple(x.shape) for x in tensors], self.mode.root
        if any(shape[:-1] != shapes[0][:-1] for shape in shapes) or len(shapes[0]) < 2:
            raise LayerError(
                f"layer {site.name!r} has tensors of shapes {shapes}, which are not one "
                "activation. Pass a layer with one tensor of two or more dimensions."
            )
        if root is not None and len(root) != len(tensors[0]):
            raise LayerError(
                f"layer {site.name!r} has an activation of shape {shapes[0]}, in which the "
                f"{len(root)} examples do not come first. Pass a layer whose first dimension is "
                "the examples, such as a block around it."
            )


def _live_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a nested value that depend on the input."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _live_tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _live_tensors(item)


def _replace_live(value: Any, new: Iterator[Tensor]) -> Any:
    """Replace the tensors that :func:`_live_tensors` yields by the tensors of ``new``, in order."""
    if isinstance(value, Tensor):
        return next(new) if value.requires_grad else value
    if isinstance(value, dict):
        replaced = copy.copy(value)
        for key, item in value.items():
            replaced[key] = _replace_live(item, new)
        return replaced
    if isinstance(value, tuple | list):
        items = [_replace_live(item, new) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
