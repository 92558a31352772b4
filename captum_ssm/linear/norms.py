"""Freeze the statistics of norms, for gradient methods on any network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import InputError, OptionError
from ..mixers.base import first_tensor
from ..tracing.hooks import hooked
from ..tracing.repair.fused import unfused
from .mode import Linearizing
from .rules import RULES, Args, Kwargs, plain_name

#: Norm functions of torch. Each is computed by its rule in :mod:`.rules`, and its root is detached.
_NORMS = ("layer_norm", "group_norm", "instance_norm", "rms_norm", "normalize")
#: Functions that compute a norm's statistic if their result is one scalar for each token.
_ROOTS = ("sqrt", "norm", "vector_norm", "std")


@contextmanager
def frozen_norms(
    model: nn.Module | None = None, keep: Any = None, *, interleaved: bool = False
) -> Iterator[None]:
    """Treat the statistics of norms as constants in gradients, in any network.

    A norm divides its input by a root of the input's own mean square.  Gradients through that root
    cancel most of a token's contribution, which makes gradient methods less faithful.  Inside the
    ``with`` LayerNorm, RMSNorm, GroupNorm, InstanceNorm and norms in a model's own code keep their
    values, but their roots have no gradient. Any Captum method may run inside the ``with``.

    With ``keep`` every run uses the roots of one run, so that points on the path of
    :class:`captum.attr.IntegratedGradients` have the norms of the explained input.

    Args:
        model: the module whose norms are kept. Default: None, none are.
        keep: the explained input: a tensor, or a tuple or mapping of the model's arguments. A batch
            that is larger by a whole factor repeats the roots. Default: None, each run's own roots.
        interleaved: whether larger batches repeat each example by itself (Captum's NoiseTunnel and
            GradientShap), not the whole batch (IntegratedGradients). Default: False.

    Raises:
        OptionError: when only one of ``model`` and ``keep`` is given.
        InputError: when a run computes different norms than the run on ``keep``, or when no norm
            was computed, as in a compiled model.

    References:
        Ali et al. 2022, "XAI for Transformers: Better Explanations through Conservative
        Propagation", which detaches the statistics of LayerNorm.

    Example:
        >>> import torch
        >>> from captum.attr import InputXGradient
        >>> from captum_ssm import frozen_norms
        >>> net = torch.nn.Sequential(torch.nn.RMSNorm(4), torch.nn.Linear(4, 1, bias=False))
        >>> x = torch.randn(2, 4, requires_grad=True)
        >>> with frozen_norms():
        ...     relevance = InputXGradient(net).attribute(x)
        >>> torch.allclose(relevance.sum(-1, keepdim=True), net(x), atol=1e-6)
        True
    """
    if (model is None) != (keep is None):
        name = "keep" if model is None else "model"
        raise OptionError(f"frozen_norms got only {name}. Pass both model and keep, or neither.")
    norms = _Norms(len(first_tensor(keep)) if interleaved and keep is not None else None)
    with ExitStack() as stack:
        stack.enter_context(unfused())
        stack.enter_context(norms)
        if model is not None:
            stack.enter_context(hooked(model.register_forward_pre_hook, norms.begin))
            stack.enter_context(hooked(model.register_forward_hook, norms.end))
            with torch.no_grad():
                if isinstance(keep, Mapping):
                    model(**keep)
                else:
                    model(*keep if isinstance(keep, tuple) else (keep,))
            norms.kept, norms.met = norms.met, []
        yield
    if not norms.any_met:
        raise InputError(
            "frozen_norms found no norm in its with block. Run the model there, in the same thread "
            "and uncompiled, or leave frozen_norms out if the model has no norms."
        )


class _Norms(TorchFunctionMode):
    """Detaches the roots by which norms divide.

    With the argument ``keep`` of :func:`frozen_norms`, every run uses the roots of the run on it.
    The rules of norms, which need a mode with a ledger, get this object in place of both.
    """

    def __init__(self, batch: int | None) -> None:
        super().__init__()
        #: Number of examples in ``keep`` if later batches repeat each example in place; else None.
        self.batch = batch
        #: Function name and root of each norm: in the run on ``keep``, and so far in this run.
        self.kept: list[tuple[str, Tensor]] | None = None
        self.met: list[tuple[str, Tensor]] = []
        self.any_met = False

    def begin(self, *_: Any) -> None:
        self.met = []

    def end(self, *_: Any) -> None:
        """Raise if the run that ends had fewer norms than the run on ``keep``."""
        if self.kept is not None and len(self.met) != len(self.kept):
            raise self._different_norms(f"{len(self.met)} norms in place of {len(self.kept)}")

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, plain_name(func.__name__)
        if name in _NORMS:
            with self:  # so that torch functions in the rule come here with the root
                return RULES[name](cast(Linearizing, self), func, args, kwargs)
        out = func(*args, **kwargs)
        return self._freeze_root(name, out) if _is_root(name, args, kwargs, out) else out

    @property
    def ledger(self) -> _Norms:
        """This object in place of a ledger, for the rules of norms."""
        return self

    def included(self, out: Tensor, constant: Tensor) -> Tensor:
        """Return the output of a norm unchanged; this mode records no biases."""
        return out

    def _freeze_root(self, name: str, root: Tensor) -> Tensor:
        """Return a norm's detached divisor or factor: the kept one, or else ``root``."""
        self.any_met, index = True, len(self.met)
        self.met.append((name, root.detach()))
        if self.kept is None:
            return root.detach()
        if index >= len(self.kept):
            raise self._different_norms(f"more than {len(self.kept)} norms")
        kept_name, kept_root = self.kept[index]
        repeats, remainder = divmod(len(root), len(kept_root))
        # groups of rows that are repeated in place: each example, or 1 for the whole batch
        examples = 1 if repeats == 1 or self.batch is None else self.batch
        remainder = remainder or len(kept_root) % examples
        if name != kept_name or remainder or root.shape[1:] != kept_root.shape[1:]:
            raise self._different_norms(
                f"a {name} of shape {tuple(root.shape)} in place of a {kept_name} of shape "
                f"{tuple(kept_root.shape)}"
            )
        # rows may be tokens of examples
        roots = torch.unflatten(kept_root, 0, (examples, -1))
        roots = roots.repeat(1, repeats, *(1,) * (kept_root.dim() - 1))
        return roots.flatten(0, 1).to(root)

    def _different_norms(self, difference: str) -> InputError:
        return InputError(
            f"frozen_norms keeps the norms of one run, but another run computed {difference}. Pass "
            "the explained input as keep, with the same tokens, and run the same model."
        )


def _is_root(name: str, args: Args, kwargs: Kwargs, out: Any) -> bool:
    """Return True if a function computes the root that a norm divides by, or its inverse."""
    if not isinstance(out, Tensor) or not out.is_floating_point():
        return False
    if out.dim() < 2:  # one number, or one for each channel
        return False
    exponent = kwargs.get("exponent", args[1] if len(args) > 1 else None) if name == "pow" else None
    if name == "rsqrt" or exponent == -0.5:  # computed by hardly anything but norms
        return True
    # one number in place of a token's features: (..., 1), or (B, 1, H, W) of an image
    is_per_token = out.shape[-1] == 1 or (out.dim() == 4 and out.shape[1] == 1)
    return is_per_token and (name in _ROOTS or exponent == 0.5)
