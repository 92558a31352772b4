"""Convert relevance per token (B, L) to the shape of the user's input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import InputError
from ...mixers.parts.token_map import TokenMap
from ...operators.kernels.truths import holds
from ...tracing.find import registered_mixers
from ...tracing.hooks import hooked


class PatchGrid:
    """Finds the grid of patches that a model splits an image into.

    The grid is the output size of the last 2-D convolution that runs before the first mixer.

    Attributes:
        grid: height and width of the grid; None before a run inside :meth:`watch`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        mixers = registered_mixers(model)
        self.mixers = [m.module for m in mixers]
        # for ImageProbe; a model may call a block's submodules directly, so mixers are listed, too
        self.blocks = list(dict.fromkeys(x for m in mixers for x in (*m.blocks, m.module)))
        self.grid: tuple[int, int] | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record the output size of convolutions that run before a mixer inside the ``with``."""
        mixer_ran = False

        def record_size(module: nn.Module, args: Any, output: Any) -> None:
            """Forward hook of a convolution: the last size before a mixer stays in ``grid``."""
            if not mixer_ran and isinstance(output, Tensor) and output.dim() == 4:
                self.grid = (output.shape[-2], output.shape[-1])

        def note_mixer(module: nn.Module, args: Any) -> None:
            nonlocal mixer_ran
            mixer_ran = True

        convolutions = [m for m in self.model.modules() if isinstance(m, nn.Conv2d)]
        with ExitStack() as stack:
            for convolution in convolutions:
                stack.enter_context(hooked(convolution.register_forward_hook, record_size))
            for mixer in self.mixers:
                stack.enter_context(hooked(mixer.register_forward_pre_hook, note_mixer))
            yield

    def sums(self, pixels: Tensor) -> Tensor:
        """Return the sum (B, h, w) of the pixel values (B, C, H, W) in each patch."""
        if self.grid is None:
            raise InputError(
                "per_token=True with images needs a 2-D convolution that makes patches before the "
                "model's first mixer, but there is none. Pass per_token=False."
            )
        return patch_sums(pixels, self.grid)


def patch_sums(pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the sum (B, h, w) of the values (B, C, H, W) in each patch of a ``grid`` (h, w)."""
    out = pixels.sum(1)
    for dim, cells in zip((1, 2), grid, strict=True):
        size = out.shape[dim]
        cell = torch.arange(size, device=out.device) * cells // size  # of each row or column
        shape = [*out.shape[:dim], cells, *out.shape[dim + 1 :]]
        out = out.new_zeros(shape).index_add(dim, cell, out)
    return out


class ImageProbe(PatchGrid):
    """Finds the patch grid, and the tokens that are patches, by comparing runs on two images.

    The images differ, and only patch tokens change: a class token or registers stay equal.
    """

    def patches(
        self, run: Callable[[Tensor], Any], images: Tensor, tokens: int
    ) -> tuple[Tensor, tuple[int, int]]:
        """Return indices of the patch tokens, row by row, and the grid (h, w).

        Args:
            run: function that runs the model on one image of the same shape.
            images: the explained images (B, C, H, W).
            tokens: the number of tokens per image in the model.
        """
        if self.grid is None:
            raise InputError(
                f"inputs of shape {tuple(images.shape)} are treated as images, but the model has "
                "no 2-D convolution that makes patches before its first mixer. Pass per_token=True "
                "for one number per token, or embeddings (B, L, E)."
            )
        height, width = self.grid
        index = torch.arange(tokens, device=images.device)
        if height * width < tokens:
            # two runs, because examples of a batch may be mixed.  Flip, sign and ramp change every
            # patch, even in a plain image
            changed = images[:1].flip(1, 2, 3) * -0.7 + torch.linspace(
                -1, 1, images[0].numel(), dtype=images.dtype, device=images.device
            ).view_as(images[:1])
            first, second = self._block_input(run, images[:1]), self._block_input(run, changed)
            is_patch = (first != second).flatten(2).any(-1)[0]
            count = is_patch.sum()
            if holds(count == height * width):  # on a GPU checked later, so the size is set here
                index = is_patch.int().argsort(descending=True, stable=True)[: height * width]
            else:
                index = index[: int(count)]  # refused below
        if len(index) != height * width:
            raise InputError(
                f"The model's patch grid is {height} x {width}, but {len(index)} of its {tokens} "
                "tokens depend on the image, so relevance cannot be assigned to pixels. Pass "
                "per_token=True for one number per token."
            )
        return index, self.grid

    def _block_input(self, run: Callable[[Tensor], Any], image: Tensor) -> Tensor:
        """Run the model up to the first block, and return the tokens entering this block."""

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            values = (*args, *kwargs.values())
            raise _Reached(next(v for v in values if isinstance(v, Tensor)))

        with ExitStack() as stack:
            for block in self.blocks:
                register = block.register_forward_pre_hook
                stack.enter_context(hooked(register, stop, with_kwargs=True))
            try:
                with torch.no_grad():
                    run(image)
            except _Reached as reached:
                return reached.stream
        raise InputError(
            "No block of the model ran, so the order of its patches is unknown. Pass "
            "per_token=True for one number per token."
        )


class _Reached(BaseException):
    """Raised to stop a run at the first block; ``stream`` is the block's input.

    It is a BaseException, because ``except Exception`` in the model would catch an Exception.
    """

    def __init__(self, stream: Tensor) -> None:
        super().__init__()
        self.stream = stream


def to_input_tokens(relevance: Tensor, given: Tensor, tokens: int) -> Tensor:
    """Move relevance from the tokens of the first layer to the tokens of the input.

    Args:
        relevance: relevance of the first layer's tokens, or of their features, (B, L', ...).
        given: index in the input of each of these tokens (B, L'); -1 for a token that the model or
            forward_func inserted, whose relevance is dropped.
        tokens: the number of input tokens, L.

    Returns:
        Relevance (B, L, ...).
    """
    given = given.to(relevance.device).view(*given.shape, *(1,) * (relevance.dim() - 2))
    given = given.expand(relevance.shape)
    relevance_of_known = torch.where(given >= 0, relevance, torch.zeros_like(relevance))
    out = relevance.new_zeros(len(relevance), tokens, *relevance.shape[2:])
    return out.scatter_add(1, given.clamp_min(0), relevance_of_known)  # token 0 may get a 0


def spread_over_features(relevance: Tensor, inputs: Tensor, per_token: bool) -> Tensor:
    """Divide relevance (B, L) among features (B, L, F), unless inputs are ids or ``per_token``."""
    if inputs.dim() == 2 or per_token:
        return relevance
    if inputs.dim() != 3 or inputs.shape[1] != relevance.shape[1]:
        raise InputError(
            f"inputs of shape {tuple(inputs.shape)} became {relevance.shape[1]} tokens in the "
            "model, so relevance cannot have the shape of inputs. Pass per_token=True."
        )
    features = inputs.shape[-1]
    return (relevance / features).unsqueeze(-1).expand(-1, -1, features)


def spread_over_image(grid: Tensor, images: Tensor) -> Tensor:
    """Interpolate a grid (B, h, w) bilinearly to (B, C, H, W), with equal values in channels."""
    size = images.shape[-2:]
    pixels = F.interpolate(grid.unsqueeze(1), size=size, mode="bilinear", align_corners=False)
    return pixels.expand(-1, images.shape[1], -1, -1)


class TokenLayout:
    """Converts relevance per token to the shape of ``inputs``; ``probe`` is None without images."""

    def __init__(self, inputs: Tensor, per_token: bool, probe: ImageProbe | None) -> None:
        self._inputs = inputs
        self._per_token = per_token
        self._probe = probe

    def to_input(
        self,
        relevances: Sequence[Tensor],
        mask: Tensor | None,
        given: Tensor | None,
        token_map: TokenMap | None,
        run: Callable[[Tensor], Any],
    ) -> list[Tensor]:
        """Convert relevance of the first layer's tokens, for each target, to the input's shape.

        With ``per_token`` they are (B, L); for images (B, h, w), or (B, L') without a patch grid.

        Args:
            relevances: relevance of the first layer's tokens (B, L'), one tensor per target.
            mask: True for unpadded tokens (B, L'), or None.
            given: index in the input of each token (B, L'), or -1; None for 0 .. L' - 1.
            token_map: the 2-D map of tokens, if the first mixer acts on windows of a map, or None.
            run: function that runs the model on one image of the same shape.
        """
        inputs, per_token, probe = self._inputs, self._per_token, self._probe
        if mask is not None:
            relevances = [x * mask.to(x) for x in relevances]
        if given is not None:
            relevances = [to_input_tokens(x, given, inputs.shape[1]) for x in relevances]
        if probe is None:
            return [spread_over_features(x, inputs, per_token) for x in relevances]
        if token_map is not None:  # all tokens are patches, row by row
            grids = [x.view(-1, *token_map.size) for x in relevances]
        else:
            try:
                index, grid = probe.patches(run, inputs, relevances[0].shape[1])
            except InputError:
                if per_token:
                    return list(relevances)
                raise
            grids = [x[:, index.to(x.device)].view(-1, *grid) for x in relevances]
        return grids if per_token else [spread_over_image(grid, inputs) for grid in grids]
