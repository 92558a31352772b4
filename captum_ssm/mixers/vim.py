"""Mamba in both directions: Vision Mamba, its published fork of mamba_ssm, and Caduceus.

    x, z = in_proj(h)                  y = SiLU(z) (alpha_f + D + ...) x, output = out_proj(y)

f(x) = (scan + D) SiLU(conv(x) + b), with frozen ratios as in mamba.py, and P reverses the tokens:

none       alpha = SiLU(z) f
v1         alpha = SiLU(z) (scan + P scan_b P + 2 D) SiLU conv, where scan_b differs in A only
v2         alpha = SiLU(z) (f + P f_b P) / 2, where f_b has separate weights
Caduceus   alpha = SiLU(z) (f + P f_b P)

Caduceus processes strand b as its reverse complement R b (tokens and channels reversed).  For two
strands a and b the output is [m(a), R m(R b)], a mixer with twice the heads.  f of a and f_b of b
run from the first token to the last; f_b of a and f of b run from the last to the first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedMixerError
from ..operators import Chain, Diagonal, Operator, SelectiveScan, ShortConv, Sum
from ..operators.reorder import flip
from .base import Call, LinearMixer
from .mamba import selection
from .parts.common import mixer_input, projection, run
from .path import Path

#: Relative error above which an output is not the sum of two directions; rounding is far smaller.
_ANOTHER_FUNCTION = 0.25


def vim_mixer(module: Any, call: Call) -> LinearMixer:
    """Linearize VimMixer in captum_ssm.models.vim, with scans in one or both directions."""
    return _linearize(module, run(module.in_proj, mixer_input(module, call)), called=True)


def published_fork(module: Any, call: Call) -> LinearMixer:
    """Linearize Mamba in the fork of mamba_ssm that Vision Mamba publishes."""
    call.refuse_cache("inference_params", position=1)
    projected = projection(module.in_proj, called=False)(mixer_input(module, call))
    mixer = _linearize(module, projected, called=not module.use_fast_path)
    if module.bimamba_type != "none" and not module.use_fast_path:
        _check_both_directions(module, mixer, call.output_tensor)
    return mixer


def _check_both_directions(module: Any, mixer: LinearMixer, output: Tensor) -> None:
    """Refuse a module that did not compute both directions, like some copies of the fork."""
    with torch.no_grad():
        rebuilt = mixer.output()
        difference = (rebuilt - output.to(rebuilt)).abs().max()
    if bool(difference > _ANOTHER_FUNCTION * output.to(rebuilt).abs().max()):
        raise UnsupportedMixerError(
            f"{type(module).__name__} with bimamba_type={module.bimamba_type!r} did not compute "
            "the sum of both directions: with use_fast_path=False the published fork omits the "
            "backward direction, so the model's predictions are wrong. Pass use_fast_path=True, or "
            "load the weights with captum_ssm.models.load_vim, which runs on any device."
        )


def _linearize(module: Any, projected: Tensor, called: bool) -> LinearMixer:
    """Return the mixer, given x and z (B, L, 2 D); if not ``called``, it uses raw weights."""
    x, z = projected.chunk(2, -1)
    path, ahead = Path(x), partial(apply_direction, module=module, called=called)
    # the attribute's name differs between published copies
    halved = getattr(module, "if_divide_out", getattr(module, "if_devide_out", False))
    if module.bimamba_type == "v2":
        path.both_ways(ahead, partial(ahead, suffix="_b"), 0.5 if halved else 1.0)
    elif module.bimamba_type == "v1":
        path.conv(module.conv1d).act(live=True)
        dt, b, c = selection(path, module, called=called, called_dt=False)
        scan = SelectiveScan(dt, -torch.exp(module.A_log.to(dt)), b, c)
        # the backward scan has the same parameters, except A, at reversed tokens
        rates_back = -torch.exp(module.A_b_log.to(dt))
        scan_back = SelectiveScan(dt.flip(1), rates_back, b.flip(1), c.flip(1))
        reversal = flip(path.shape, x.device, "scan")
        path.scan(scan, Chain(reversal, scan_back, reversal), skip=2 * module.D)
    else:
        ahead(path)
    # gamma scales the channels of the output
    gamma, out_proj = getattr(module, "gamma", None), projection(module.out_proj, called)
    return path.gate(z).to(lambda y: out_proj(y) if gamma is None else out_proj(y) * gamma.to(y))


def apply_direction(path: Path, module: Any, suffix: str = "", called: bool = True) -> Path:
    """Apply one direction of a Mamba, without the gate.

    Args:
        path: the values as a :class:`.Path`, with tokens in the order of this direction.
        module: a Mamba, or the module of one direction.
        suffix: suffix of the parameters' names, such as ``"_b"``. Default: ``""``.
        called: whether the module calls its projections except dt_proj, whose raw weight it always
            uses. Default: True.
    """
    path.conv(getattr(module, f"conv1d{suffix}")).act(live=True)
    dt, b, c = selection(path, module, f"{{}}{suffix}", called=called, called_dt=False)
    a_log = module.A_b_log if suffix else module.A_log
    scan = SelectiveScan(dt, -torch.exp(a_log.to(dt)), b, c)
    return path.scan(scan, skip=getattr(module, f"D{suffix}"))


def bi_mamba(module: Any, call: Call) -> LinearMixer:
    """Linearize BiMamba in captum_ssm.models.dna: the sum of both directions, times a gate."""
    x, z = run(module.mamba_fwd.in_proj, mixer_input(module, call)).chunk(2, -1)
    ahead, back = (partial(apply_direction, module=m) for m in (module.mamba_fwd, module.mamba_rev))
    return Path(x).both_ways(ahead, back).gate(z).to(partial(_project_sum, module))


def both_strands(module: Any, call: Call) -> LinearMixer:
    """Linearize StrandsMixer in captum_ssm.models.dna: BiMamba on both strands of DNA."""
    mixer = module.submodule
    strand, other_strand = mixer_input(module, call).chunk(2, -1)
    a, z_a = run(mixer.mamba_fwd.in_proj, strand).chunk(2, -1)
    b, z_b = run(mixer.mamba_fwd.in_proj, other_strand.flip(1, 2)).chunk(2, -1)  # x and z of R b
    fwd, rev = mixer.mamba_fwd, mixer.mamba_rev
    ahead = _join_paths(apply_direction(Path(a), fwd), apply_direction(Path(b.flip(1)), rev))
    back = _join_paths(apply_direction(Path(a.flip(1)), rev), apply_direction(Path(b), fwd))
    # the first heads are strand a, the others R b with tokens in the order of a; ``ahead`` and
    # ``back`` have their steps already, so their functions ignore the values
    path = Path(torch.cat([a, b.flip(1)], -1)).both_ways(lambda _: ahead, lambda _: back)

    def project(y: Tensor) -> Tensor:
        out, other_out = y.chunk(2, -1)
        return torch.cat([_project_sum(mixer, out), _project_sum(mixer, other_out).flip(-1)], -1)

    return path.scale(torch.cat([F.silu(z_a), F.silu(z_b).flip(1)], -1), "gate").to(project)


def _project_sum(module: Any, y: Tensor) -> Tensor:
    """Project the sum of both directions; both outputs contain the bias, so it is added twice."""
    out_proj = module.mamba_fwd.out_proj
    out = run(out_proj, y)
    return out if out_proj.bias is None else out + out_proj.bias.to(out)


def _join_paths(first: Path, second: Path) -> Path:
    """Join two paths with the same order of tokens to one path with all their heads."""
    path = Path(torch.cat([first.values, second.values], 2))
    pairs = zip(first.parts[::-1], second.parts[::-1], strict=True)
    return path.then(*(_join_steps(path, *pair) for pair in pairs))


def _join_steps(path: Path, one: Any, other: Any) -> Operator:
    """Join the same step of two paths, on separate heads, to one operator on all heads."""
    if isinstance(one, Sum):
        return Sum(*(_join_steps(path, *pair) for pair in zip(one.parts, other.parts, strict=True)))
    if isinstance(one, Diagonal):
        return Diagonal(torch.cat([one.weight, other.weight], 2), path.shape, one.component)
    if isinstance(one, ShortConv):
        bias = None if one.bias is None else torch.cat([one.bias, other.bias], 2)
        return ShortConv(torch.cat([one.weight, other.weight]), path.shape, bias)
    # both are scans; live coefficients replace detached ones, to keep their graphs
    tensors, other_tensors = ({**scan.tensors(), **scan.live} for scan in (one, other))
    b, c = (torch.stack([tensors[name], other_tensors[name]], 2) for name in "BC")  # (B, L, 2, N)
    dt = torch.cat([tensors["dt"], other_tensors["dt"]], 2)
    return SelectiveScan(dt, torch.cat([one.a, other.a]), b, c)
