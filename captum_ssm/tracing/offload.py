"""Load weights that accelerate's hooks load only during a module's own forward call.

A model spread by ``device_map``, ``cpu_offload`` or ``disk_offload`` has weights on the meta device
between calls. Adapters read weights by name and need them loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..errors import WeightsError
from ..mixers.base import Call, LinearMixer
from .adapter import check_operator, linear_form
from .find import Mixer
from .projection import Projection, projection_of, refused_by_example
from .split import is_split, whole

#: Attributes that accelerate sets on a module: its hook, the wrapped forward, and the wrapper.
_ATTRIBUTES = ("_hf_hook", "_old_forward", "forward")


def linearize(mixer: Mixer, call: Call, *, running: bool = False) -> LinearMixer:
    """Call the mixer's adapter with all weights loaded. The returned projection loads them again.

    Args:
        mixer: the mixer.
        call: the mixer's recorded call.
        running: whether the modules with the mixer are running, so that their weights are
            loaded. Default: False.
    """
    hooked = _hooked(mixer, running)
    with _loaded(hooked, mixer.module, call) as moved:
        _refuse_missing(mixer)
        linear = linear_form(mixer, moved)
    return _loading(hooked, mixer, call, linear)


def _hooked(mixer: Mixer, running: bool = False) -> list[nn.Module]:
    """Return modules inside or containing a mixer whose weights are offloaded or split."""
    around = () if running else reversed(mixer.around)
    return [m for m in (*around, *mixer.module.modules()) if _is_hooked(m) or is_split(m)]


def _loading(
    hooked: Sequence[nn.Module], mixer: Mixer, call: Call, linear: LinearMixer
) -> LinearMixer:
    """Return the linear mixer; the output projection loads offloaded weights at each call."""
    if not hooked:
        return linear

    def project(y: Tensor) -> Tensor:
        with _loaded(hooked, mixer.module, call):
            return linear.project(y)

    return replace(linear, project=project)


def lasting_form(mixer: Mixer, call: Call, linear: LinearMixer) -> LinearMixer:
    """Return the linear mixer with its output projection stored as an affine map.

    A stored map would keep offloaded weights in memory, so these are loaded at each call instead.
    """
    hooked = _hooked(mixer)
    if any(map(_is_hooked, hooked)):
        return _loading(hooked, mixer, call, linear)
    refuse = refused_by_example(mixer, linear)
    if refuse is not None:
        return replace(linear, project=refuse)
    shape = tuple(linear.operator.shape)
    projection = replace(projection_of(linear), check=partial(check_operator, mixer, shape))
    return replace(linear, project=projection)


def tensors_of(linear: LinearMixer) -> Iterator[Tensor]:
    """Yield a linear mixer's values, coefficients and stored projection."""
    yield linear.values
    for leaf in linear.operator.leaves():
        yield from leaf.tensors().values()
    if isinstance(linear.project, Projection):
        yield linear.project.stored
        if linear.project.rest is not None:
            yield linear.project.rest


def _refuse_missing(mixer: Mixer) -> None:
    """Raise if a weight is on the meta device, where torch silently computes garbage."""
    named = (*mixer.module.named_parameters(), *mixer.module.named_buffers())
    missing = next((name for name, tensor in named if tensor.is_meta), None)
    if missing is not None:
        raise WeightsError(
            f"Layer {mixer.name!r}: {missing!r} is on the meta device and no hook of accelerate "
            "loads it. Load the weights, or offload the model with accelerate."
        )


def _is_hooked(module: nn.Module) -> bool:
    return all(name in vars(module) for name in _ATTRIBUTES)


@contextmanager
def _loaded(hooked: Sequence[nn.Module], mixer: nn.Module, call: Call) -> Iterator[Call]:
    """Load the weights of modules, and yield the call with arguments on the mixer's device.

    The modules' hooks are off inside the ``with``, since they would unload weights after each call.
    """
    with whole(hooked), ExitStack() as stack:
        for module in filter(_is_hooked, hooked):  # none of them twice
            if module is mixer:
                args, kwargs = _load(module, stack, *call.args, **call.kwargs)
                call = replace(call, args=args, kwargs=kwargs)
            else:
                _load(module, stack)
        yield call


def _load(module: nn.Module, stack: ExitStack, *args: Any, **kwargs: Any) -> Any:
    """Load one module's weights until ``stack`` closes; return the arguments on its device."""
    attributes = vars(module)
    hooked = {name: attributes.pop(name) for name in _ATTRIBUTES}
    stack.callback(attributes.update, hooked)
    attributes["forward"] = hooked["_old_forward"]
    hook = hooked["_hf_hook"]
    moved = hook.pre_forward(module, *args, **kwargs)
    stack.callback(hook.post_forward, module, None)
    return moved
