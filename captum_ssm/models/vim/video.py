"""VideoMamba: Vision Mamba over the patches of all frames of a clip."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError, InputError
from ..checkpoints import Weights, check_fit, read_checkpoint
from .load import depth_of, shape_of, usual_shape
from .mixer import VimMixer
from .model import VimBlock

_SMALL = 0.02  # standard deviation of embeddings and head before training


class VideoMamba(nn.Module):
    """VideoMamba, with the parameter names of the official checkpoints.

    The cls token is followed by the patches of the first frame, row by row, then by those of the
    second, and so on.  The sum of both directions is not halved.

    Args:
        frames: how many frames a clip has. Default: 8.
        tubelet: how many frames a patch spans. Default: 1.
        img_size: height and width of the frames. Default: 224.
        patch_size: side of the patches. Default: 16.
        depth: number of blocks. Default: 24.
        embed_dim: E. Default: 192.
        channels: colour channels. Default: 3.
        num_classes: classes. Default: 1000.
        norm_epsilon: epsilon of the norms. Default: 1e-5.
        **mixer_options: further arguments of :class:`~captum_ssm.models.vim.VimMixer`.

    Example:
        >>> import torch
        >>> from captum_ssm import LatimFlow
        >>> from captum_ssm.models import VideoMamba
        >>> model = VideoMamba(4, img_size=16, patch_size=8, depth=2, embed_dim=8, num_classes=5)
        >>> clips = torch.rand(2, 3, 4, 16, 16)  # (B, C, T, H, W)
        >>> relevance = LatimFlow(model.eval()).attribute(clips, target=1)
        >>> of_frames, of_places = relevance.sum((1, 3, 4)), relevance.sum((1, 2))
        >>> of_frames.shape, of_places.shape
        (torch.Size([2, 4]), torch.Size([2, 16, 16]))
    """

    def __init__(
        self,
        frames: int = 8,
        tubelet: int = 1,
        img_size: int = 224,
        patch_size: int = 16,
        depth: int = 24,
        embed_dim: int = 192,
        channels: int = 3,
        num_classes: int = 1000,
        norm_epsilon: float = 1e-5,
        **mixer_options: Any,
    ) -> None:
        super().__init__()
        size = tubelet, patch_size, patch_size
        self.patch_embed = nn.Sequential(
            OrderedDict(proj=nn.Conv3d(channels, embed_dim, size, size))
        )

        def small(tokens: int) -> nn.Parameter:
            return nn.Parameter(_SMALL * torch.randn(1, tokens, embed_dim))

        self.cls_token = small(1)
        self.pos_embed = small(1 + (img_size // patch_size) ** 2)
        self.temporal_pos_embedding = small(frames // tubelet)

        def block() -> VimBlock:
            mixer = VimMixer(embed_dim, **{"if_divide_out": False} | mixer_options)
            return VimBlock(nn.RMSNorm(embed_dim, eps=norm_epsilon), mixer)

        self.layers = nn.ModuleList(block() for _ in range(depth))
        self.norm_f = nn.RMSNorm(embed_dim, eps=norm_epsilon)
        self.head = nn.Linear(embed_dim, num_classes)

    def forward(self, clips: Tensor) -> Tensor:
        """Clips to logits.

        Args:
            clips: (B, C, T, H, W).

        Returns:
            (B, classes).

        Raises:
            InputError: when there are no positions for so many frames or patches.
        """
        x: Tensor = self.patch_embed(clips).flatten(3).permute(0, 2, 3, 1)  # (B, t, N, E)
        known = self.temporal_pos_embedding.shape[1], self.pos_embed.shape[1] - 1
        if x.shape[1:3] != known:
            raise InputError(
                f"clips of shape {tuple(clips.shape)} have {x.shape[1]} x {x.shape[2]} patches in "
                f"time and space; the model has positions for {known[0]} x {known[1]}."
            )
        x = x + self.pos_embed[:, None, 1:] + self.temporal_pos_embedding[:, :, None]
        first = (self.cls_token + self.pos_embed[:, :1]).expand(len(x), -1, -1)
        x = torch.cat([first, x.flatten(1, 2)], 1)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm_f(x)[:, 0])
        return out


def load_video_mamba(path: str | Path, **options: Any) -> VideoMamba:
    """Loads a VideoMamba checkpoint, such as the official ones; nothing is downloaded.

    All sizes are inferred from the weights, with square frames.

    Args:
        path: a file of safetensors, or a torch file that holds the weights or a dict with the
            weights as ``"model"``. It is read without running any code in it.
        **options: arguments of :class:`VideoMamba` that override what was inferred.

    Returns:
        The model in evaluation mode on the CPU, in the dtype of the file.

    Raises:
        CheckpointError: when the weights are not those of a VideoMamba; it names the keys.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from captum_ssm.models import VideoMamba, load_video_mamba
        >>> trained = VideoMamba(2, img_size=16, patch_size=8, depth=1, embed_dim=16).eval()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(trained.state_dict(), Path(folder, "video.pth"))
        ...     model = load_video_mamba(Path(folder, "video.pth"))
        >>> clips = torch.rand(1, 3, 2, 16, 16)
        >>> torch.equal(model(clips), trained(clips))
        True
    """
    weights = read_checkpoint(Path(path))
    try:
        with torch.device("meta"):  # the weights come from the file
            model = VideoMamba(**_sizes(weights) | options)
        check_fit(model.state_dict(), weights)
    except CheckpointError as error:
        raise CheckpointError(f"{path} does not fit a VideoMamba: {error}") from None
    model.load_state_dict(weights, strict=True, assign=True)
    return model.eval()


def _sizes(weights: Weights) -> dict[str, Any]:
    embed_dim, channels, tubelet, patch, _ = shape_of(weights, "patch_embed.proj.weight", 5)
    side = round((shape_of(weights, "pos_embed", 3)[1] - 1) ** 0.5)
    return {
        "frames": tubelet * shape_of(weights, "temporal_pos_embedding", 3)[1],
        "tubelet": tubelet,
        "img_size": patch * side,
        "patch_size": patch,
        "depth": depth_of(weights),
        "embed_dim": embed_dim,
        "channels": channels,
        "num_classes": shape_of(weights, "head.weight", 2)[0],
        "d_inner": usual_shape(weights, "in_proj.weight", 2)[0] // 2,
        "d_state": usual_shape(weights, "A_log", 2)[1],
        "d_conv": usual_shape(weights, "conv1d.weight", 3)[2],
        "dt_rank": usual_shape(weights, "dt_proj.weight", 2)[1],
    }
