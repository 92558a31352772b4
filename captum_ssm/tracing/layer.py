"""One recorded call of a mixer, and the linear operator of this call."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import InputError, ReconstructionError
from ..mixers.base import Call, LinearMixer
from ..mixers.parts.token_map import TokenMap
from ..operators import Chain, Operator, Permute
from ..operators.kernels.arithmetic import full_precision
from ..operators.kernels.truths import are_noted, holds
from .find import Mixer
from .projection import Projection, projection_of, scaled_output
from .verification import Errors, relative_error, require_same, tolerance_for
from .way import AffineStep, Way


class Layer:
    """One recorded mixer call.

    The operator is built directly after the mixer returns, and kept if there is memory. Otherwise
    it is built again when it is read, and checked against the mixer's output.
    :func:`~captum_ssm.trace` creates the layers.

    Args:
        linearized: a function that builds a layer's linear mixer; called if none is stored.
        mixer, call, stream: the attributes with these names.

    Attributes:
        mixer: the :class:`~captum_ssm.tracing.Mixer` that was called.
        name: the mixer's qualified name in the model.
        architecture: the name of the mixer's family, such as ``"Mamba"``.
        joins: how the mixer's output is added to the residual stream; see
            :class:`~captum_ssm.mixers.Architecture`.
        block: the module that directly contains the mixer, or None.
        call: the recorded call.
        tolerance: the largest accepted error of the operator, unless the user passes another.
        stream: the tensor that enters the mixer's block, a term of the residual stream;
            kept with ``graph="all"`` only, else None.
        stage: the number of the layer's stage, a group of layers that read the same residual
            stream; None before replays have determined it.
        order: each mixer token's index in the first layer (L,); None if all are the same.
        has_stream: whether a residual connection bypasses the mixer. Assumed True unless replays
            show otherwise.
        is_reached: whether autograd has recorded the computation of the mixer's input.
        checked: the errors measured when the operator was built; None if it was not checked.

    Example:
        >>> import torch
        >>> from captum_ssm import trace
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> with trace(model) as record:
        ...     _ = model(torch.tensor([tokenizer.encode("anna owns the lamp")]))
        >>> layer = record.layers[0]
        >>> layer.architecture, tuple(layer.operator.dense().shape)
        ('Mamba', (1, 4, 4))
        >>> layer.reconstruction_error() < 1e-5
        True
    """

    def __init__(
        self,
        linearized: Callable[[Layer], LinearMixer],
        mixer: Mixer,
        call: Call,
        stream: Tensor | None,
    ) -> None:
        self._linearized = linearized
        self._linear: LinearMixer | None = None
        self.checked: Errors | None = None
        self.stage: int | None = None
        self.order: Tensor | None = None
        self._is_ordered = False
        self._way: Way | None = None
        self._joined: Tensor | None = None
        self._has_joined = False
        self.has_stream = True
        self.is_reached = True
        self.mixer = mixer
        self.name = mixer.name
        self.architecture = mixer.architecture.family
        self.joins = mixer.architecture.joins
        self.block = call.block
        self.call = call
        self._left = call.output_tensor
        self._factor: Tensor | None = None
        self.stream = stream
        self.tolerance = tolerance_for(self.output, mixer.module)
        self._versions = self._versions_of(self.call.hidden_states, self.output)
        # weak references: weights may be loaded for the time of the call only
        weights = [x for x in mixer.module.parameters() if not x.is_inference()]
        self._weights = [(weakref.ref(x), x._version) for x in weights]

    @staticmethod
    def _versions_of(*tensors: Tensor) -> list[int]:
        """Return torch's counters of in-place changes, which inference tensors do not have."""
        return [t._version for t in tensors if not t.is_inference()]

    def check_unchanged(self) -> None:
        """Raise if a recorded tensor, or a weight, was overwritten after the mixer ran.

        Raises:
            InputError: when a tensor was overwritten, so that the recorded call is not valid.
        """
        weights = ((find(), version) for find, version in self._weights)
        if any(x is not None and x._version != version for x, version in weights):
            raise InputError(
                f"Layer {self.name!r}: weights of the mixer were changed in place after the call, "
                "so the recorded call is not valid. Read it before the change, or run again."
            )
        if self._versions != self._versions_of(self.call.hidden_states, self.output):
            raise InputError(
                f"Layer {self.name!r}: the model changed the mixer's input or output in place "
                "after the call, so the record is not valid. Use out-of-place operations there."
            )

    @property
    def output(self) -> Tensor:
        """The mixer's output (B, L, E) after other forward hooks; (B W, T, E) for W windows.

        :meth:`in_order` rearranges it to the operator's tokens.
        """
        return self._left

    def hook_factor(self, after_hooks: Tensor) -> Tensor | None:
        """Return the factor between the mixer's output and ``after_hooks``, after other hooks.

        :func:`hook_factor` defines the factor. It is empty, (0,), if a hook overwrote the output.
        """
        if self._versions != self._versions_of(self.call.hidden_states, self.call.output_tensor):
            return after_hooks.new_empty(0)
        return hook_factor(self.call.output_tensor, after_hooks)

    def leave(self, left: Tensor, factor: Tensor | None) -> None:
        """Set the output after hooks (B, L, E), and the hooks' factor from :meth:`hook_factor`."""
        self._left = left
        self._factor = factor
        self._versions = self._versions_of(self.call.hidden_states, left)

    @property
    def is_hooked(self) -> bool:
        """Return True if other forward hooks changed the mixer's output."""
        return self._factor is not None

    @property
    def factor(self) -> Tensor | None:
        """The factor by which other forward hooks multiply the mixer's output; None if unchanged.

        The shape is (B, L, 1) or (B, L, E), in the layout of :attr:`output`.

        Raises:
            InputError: when a hook does more than scale tokens or drop features.
        """
        if self._factor is not None and not len(self._factor):  # empty: any other change
            raise InputError(
                f"Layer {self.name!r}: a forward hook changes the mixer's output in place, or does "
                "more than multiply it by a factor per token or per feature. Use LatimFlow, which "
                "explains the hook as well, remove the hook, or let it return the output times a "
                "factor of shape (B, L, 1) or (B, L, E)."
            )
        return self._factor

    @property
    def written(self) -> LinearMixer:
        """The linear mixer, with the output multiplied by the hooks' :attr:`factor`."""
        factor = self.factor
        return self.linear if factor is None else scaled_output(self.linear, self.in_order(factor))

    @functools.cached_property
    def map(self) -> TokenMap | None:
        """The 2-D grid of the tokens if the mixer reads images or windows of images; else None.

        None also if no module containing the mixer received a grid, in which case the mixer is not
        linearized, to save memory.
        """
        received_map = any(len(size) >= 4 for size in self.call.around.values())
        return self.linear.map if received_map else None

    @property
    def tokens(self) -> int:
        """The number L of tokens that the operator mixes."""
        return self.output.shape[1] if self.map is None else math.prod(self.map.size)

    def in_order(self, x: Tensor) -> Tensor:
        """Rearrange ``x`` from the layout of :attr:`output` to the operator's tokens, (B, L, E)."""
        if self.map is not None:
            return self.map.in_order(x)
        return x if self.order is None else x.index_select(1, self.order.argsort().to(x.device))

    def arrange(self, stage: int | None, order: Tensor | None) -> None:
        """Set :attr:`stage` and :attr:`order`; later operators use this token order."""
        self.stage, self.order = stage, order

    @property
    def linear(self) -> LinearMixer:
        """The linear form of the mixer call.

        Raises:
            NonFiniteError: when a coefficient is NaN or infinite.
        """
        if self._linear is None:
            return _reordered(self._linearized(self), self.order)
        self.check_unchanged()
        if self.order is not None and not self._is_ordered:
            self._linear, self._is_ordered = _reordered(self._linear, self.order), True
        return self._linear

    @property
    def is_kept(self) -> bool:
        """Return True if :attr:`linear` is stored, and not built again when it is read."""
        return self._linear is not None

    def keep(self, linear: LinearMixer) -> None:
        """Store the linear mixer that was built during the run, for :attr:`linear`."""
        self._linear = linear

    @property
    def operator(self) -> Operator:
        """The frozen linear map over tokens."""
        return self.linear.operator

    @property
    def values(self) -> Tensor:
        """The values that the operator mixes, after the input projection, (B, L, H, P)."""
        return self.linear.values

    @property
    def bias(self) -> Tensor:
        """The constant term before the output projection, (B, L, H, P)."""
        return self.linear.bias

    def reconstruction_error(self) -> float:
        """Return max|a - b| / max|b| for the operator's output a and the module's output b.

        The error is about 1e-7 for a model in float32.
        """
        with torch.no_grad(), full_precision(self.output.device):
            returned = self.call.output_tensor.detach()
            return relative_error(self.linear.output(), self.in_order(returned))

    def join(self, stream: Tensor | None, way: Way | None) -> None:
        """Record how the mixer's output joins the residual stream.

        Args:
            stream: the residual stream (B, L, E) in the operator's token order; None without one.
            way: the steps from the output to the stream; None if they were not found.
        """
        self._joined, self._way, self._has_joined = stream, way, True

    @property
    def way(self) -> Way:
        """The steps from the mixer's output to its summand in the residual stream.

        A ``branch_scale`` that the adapter declares replaces a factor found by replays, which may
        be relative to a scaled stream. Without replays the way has no steps.

        Raises:
            InputError: when replays did not find one sum that adds the output to the stream, after
                factors and projections of single tokens.
        """
        declared, seen = self.linear.branch_scale, self._seen_scale
        if declared != 1 and (self._way is None or seen is not None):  # but keep norms and matrices
            return [AffineStep(declared)]
        if self._way is None:
            if self._has_joined:
                raise InputError(
                    f"Layer {self.name!r}: the contributions of tokens cannot be followed into the "
                    "residual stream. The mixer's output may pass only factors, norms and "
                    "projections of single tokens, and one sum. Use LatimFlow, or LatimALTI with "
                    "residual=False for the mixers' own maps."
                )
            return ()
        return self._way

    @property
    def _seen_scale(self) -> float | None:
        """The product of the steps to the residual stream if all steps are scalars; else None."""
        factors = [step.factor for step in self._way or () if step == AffineStep(step.factor)]
        if self._way is None or len(factors) < len(self._way):  # a step has a matrix or a bias
            return None
        numbers = [factor for factor in factors if isinstance(factor, int | float)]
        return math.prod(numbers) if len(numbers) == len(factors) else None

    @property
    def residual_in_order(self) -> Tensor | None:
        """The residual stream that the output is added to, in operator token order, or None.

        If replays saw another scale than the adapter declares, the stream is scaled to match.
        """
        declared, seen = self.linear.branch_scale, self._seen_scale
        if self._joined is None or declared == 1 or not seen:
            return self._joined
        return self._joined * (declared / seen)

    def verify(self, tolerance: float | None = None) -> None:
        """Raise unless the operator reproduces the module's output.

        Args:
            tolerance: largest accepted error. Default: None, by the module's dtype: 1e-5 in float32
                and float64, on a GPU 5e-3 in float32, 0.1 in bfloat16, 0.05 in float16. Beyond 1024
                tokens it grows in proportion, up to 1e-3. Checks during the run compare sums over
                tokens with random signs, with a quarter of this tolerance.

        Raises:
            ReconstructionError: naming the layer and the error.
        """
        limit = self.tolerance if tolerance is None else tolerance
        # a user's tolerance is for the whole output, not for sums with random signs
        checked = self.checked if tolerance is None else None
        error = self.reconstruction_error() if checked is None else checked.strict
        try:
            require_same(self.name, self.mixer.architecture, error, limit)
        except ReconstructionError:
            projection_of(self.linear)  # raises if it differs between examples
            raise

    def __repr__(self) -> str:
        return f"Layer({self.name!r}, {self.architecture!r})"


def hook_factor(before_hooks: Tensor, after_hooks: Tensor) -> Tensor | None:
    """Find the factor by which hooks changed a mixer's output.

    Args:
        before_hooks: the output (B, L, E) of the mixer.
        after_hooks: the output after all hooks.

    Returns:
        A factor (B, L, 1), or (B, L, E) of ones and zeros. None if hooks changed nothing, and an
        empty tensor (0,) for any other change, which is refused when the factor is read.
    """
    before, after = before_hooks.detach(), after_hooks.detach()
    if same_memory(before, after) or _is_copy(before, after):
        return None
    if not bool(before.isfinite().all()):  # the operator will be refused, by a clearer error
        return None
    if after.shape == before.shape:
        size = before.abs().amax(-1, keepdim=True)
        largest = before.abs().argmax(-1, keepdim=True)
        # a factor per token, read at its largest entry, or a mask of entries that hooks kept
        factor = after.gather(-1, largest) / before.gather(-1, largest).where(size > 0, 1)
        mask, rounding = (after == before).to(after), 1e-6 * float(size.max())
        for candidate in (factor, mask):
            if torch.allclose(candidate * before, after, rtol=1e-5, atol=rounding):
                return candidate
    return before.new_empty(0)


def _is_copy(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors are equal; on a GPU the comparison may be deferred."""
    if x.shape != y.shape:
        return False
    return holds((x == y).all()) if are_noted(x) else torch.equal(x, y)


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors have the same memory, shape and strides."""
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()


def _reordered(linear: LinearMixer, order: Tensor | None) -> LinearMixer:
    """Reorder a linear mixer's tokens, moving token i to position ``order[i]``."""
    if order is None:
        return linear
    shape, project = linear.operator.shape, linear.project
    to_mixer = Permute(order, shape, device=linear.values.device)  # from new order to the mixer's
    positions = to_mixer.inverse
    rest = project.rest if isinstance(project, Projection) else None
    if rest is not None and rest.dim() == 3 and rest.shape[1] > 1:  # it differs between tokens
        assert isinstance(project, Projection)
        project = replace(project, rest=rest.index_select(1, positions))
    return replace(
        linear,
        values=linear.values.index_select(1, positions),
        operator=Chain(to_mixer.inverted(), linear.operator, to_mixer),
        project=project,
        mask=None if linear.mask is None else linear.mask.index_select(1, positions),
    )
