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
from .split import gathered_weights, is_split

#: Attributes that accelerate sets on a module: its hook, the wrapped forward, and the wrapper.
_ATTRIBUTES = ("_hf_hook", "_old_forward", "forward")


def linearize(mixer: Mixer, call: Call, *, running: bool = False) -> LinearMixer:
    """Call the mixer's adapter with all weights loaded. The returned projection loads them again.

    ``running`` is True while the modules that contain the mixer run with loaded weights.
    """
    modules = _modules_to_load(mixer, running)
    with _loaded(modules, mixer.module, call) as call_on_device:
        _refuse_missing(mixer)
        linear = linear_form(mixer, call_on_device)
    return _with_loading(modules, mixer, call, linear)


def _modules_to_load(mixer: Mixer, running: bool = False) -> list[nn.Module]:
    """Return modules inside or containing a mixer whose weights are offloaded or split."""
    around = () if running else reversed(mixer.around)  # these are loaded while they run
    return [m for m in (*around, *mixer.module.modules()) if _is_offloaded(m) or is_split(m)]


def _with_loading(
    modules: Sequence[nn.Module], mixer: Mixer, call: Call, linear: LinearMixer
) -> LinearMixer:
    """Return the linear mixer; the output projection loads offloaded weights at each call."""
    if not modules:
        return linear

    def project(y: Tensor) -> Tensor:
        with _loaded(modules, mixer.module, call):  # weights only: the call is not used
            return linear.project(y)

    return replace(linear, project=project)


def lasting_form(mixer: Mixer, call: Call, linear: LinearMixer) -> LinearMixer:
    """Return the linear mixer with its output projection stored as an affine map.

    A stored map would keep offloaded weights in memory, so these are loaded at each call instead.
    """
    modules = _modules_to_load(mixer)
    if any(map(_is_offloaded, modules)):
        return _with_loading(modules, mixer, call, linear)
    refuse = refused_by_example(mixer, linear)
    if refuse is not None:  # examples have different projections: raises when it is used
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


def _is_offloaded(module: nn.Module) -> bool:
    """Return True if a hook of accelerate loads the module's weights for each call."""
    return all(name in vars(module) for name in _ATTRIBUTES)


@contextmanager
def _loaded(modules: Sequence[nn.Module], mixer: nn.Module, call: Call) -> Iterator[Call]:
    """Load the weights of modules, and yield the call with arguments on the mixer's device.

    The modules' hooks are off inside the ``with``, since they would unload weights after each call.
    """
    with gathered_weights(modules), ExitStack() as stack:
        for module in filter(_is_offloaded, modules):  # each once: _load removes the hook
            if module is mixer:
                args, kwargs = _load(module, stack, *call.args, **call.kwargs)
                call = replace(call, args=args, kwargs=kwargs)
            else:
                _load(module, stack)
        yield call


def _load(module: nn.Module, stack: ExitStack, *args: Any, **kwargs: Any) -> Any:
    """Load one module's weights until ``stack`` closes; return the arguments on its device."""
    attributes = vars(module)
    attributes_of_hook = {name: attributes.pop(name) for name in _ATTRIBUTES}
    stack.callback(attributes.update, attributes_of_hook)  # at last, after the unloading
    attributes["forward"] = attributes_of_hook["_old_forward"]
    hook = attributes_of_hook["_hf_hook"]
    arguments = hook.pre_forward(module, *args, **kwargs)
    stack.callback(hook.post_forward, module, None)
    return arguments
