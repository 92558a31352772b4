"""How each function in the tables of the package is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from captum_ssm.linear import rules
from captum_ssm.linear.rules import RULES
from helpers.function_arguments import ARGUMENTS, Constants

NAMESPACES = {
    "torch": torch, "F": F, "linalg": torch.linalg, "special": torch.special, "Tensor": Tensor,
}  # fmt: skip


#: Changes a tensor in a way that is no function of it, or has arguments of its own.
WITHOUT_IN_PLACE = {
    "squeeze", "unsqueeze", "t", "transpose", "swapaxes", "swapdims", "bernoulli", "__setitem__",
}  # fmt: skip

#: Functions whose first argument is no tensor of the usual shape, or that need a form of their own.
CALLS: dict[str, Callable[[Tensor, Constants], Any]] = {
    "t": lambda x, _: (x[0].t(), torch.t(x[0])),
    "squeeze": lambda x, _: (x[:, :1].squeeze(1), torch.squeeze(x[:1])),
    "cuda": lambda x, _: x.cuda() if torch.cuda.is_available() else x.cpu(),
    "real": lambda x, _: torch.real(x),
    "resolve_conj": lambda x, _: x.resolve_conj(),
    "resolve_neg": lambda x, _: x.resolve_neg(),
    "feature_dropout": lambda x, _: torch.feature_dropout(x, 0.5, False),
    "unfold": lambda x, _: (x.unfold(1, 2, 1), F.unfold(x[:, None], 2)),
    "fold": lambda x, _: F.fold(x, (2, 7), (2, 2)),
    "diagonal": lambda x, _: (x.diagonal(0, 1, 2), torch.diagonal(x, 1, 1, 2)),
    "trace": lambda x, _: (x[0].trace(), torch.trace(x[1])),
    "pixel_shuffle": lambda x, _: F.pixel_shuffle(x.reshape(2, 4, 2, 3), 2),
    "pixel_unshuffle": lambda x, _: F.pixel_unshuffle(x[:, None], 2),
    "avg_pool3d": lambda x, _: F.avg_pool3d(x[None], (2, 2, 3)),
    "adaptive_avg_pool3d": lambda x, _: F.adaptive_avg_pool3d(x[:, None], (1, 2, 3)),
    "rfft": lambda x, _: torch.fft.irfft(torch.fft.rfft(x), n=6),
    "irfft": lambda x, _: torch.fft.irfft(torch.fft.rfft(x), n=6),
    "fft": lambda x, _: torch.fft.ifft(torch.fft.fft(x)).real,
    "ifft": lambda x, _: torch.fft.ifft(torch.fft.fft(x)).real,
    "embedding_bag": lambda x, k: F.embedding_bag(
        k.index[0], k.weight.repeat(1, 1), per_sample_weights=x[0], mode="sum"
    ),
    "block_diag": lambda x, _: torch.block_diag(x[0], x[1]),
    "broadcast_tensors": lambda x, _: torch.broadcast_tensors(x, x[:1]),
    "cat": lambda x, k: (torch.cat([x, k.c], 1), torch.cat(tensors=(k.c, x), dim=2)),
    "concat": lambda x, k: torch.concat([k.c, x, x], 1),
    "concatenate": lambda x, k: torch.concatenate([x, k.c], 1),
    "vstack": lambda x, k: torch.vstack([x, k.c]),
    "hstack": lambda x, k: torch.hstack([x, k.c]),
    "stack": lambda x, k: (torch.stack([x, k.c], 2), torch.stack((k.c, x))),
    "batch_norm": lambda x, k: (
        F.batch_norm(x, k.c[0, :, 0], k.c[0, :, 1].abs(), k.c[0, :, 2], k.c[0, :, 3], eps=1e-2),
        torch.batch_norm(
            x, k.c[0, :, 2], k.c[0, :, 3], k.c[0, :, 0], k.c[0, :, 1].abs(), False, 0.1, 1e-2, True
        ),
    ),
    "where": lambda x, k: (
        torch.where(k.mask, x, k.c),
        torch.where(k.mask, k.c, x),
        torch.where(k.mask, x, 1),
        torch.where(k.mask, 2, x),
        x.where(k.mask, k.c),
    ),
    "pad": lambda x, _: (
        F.pad(x, (1, 2), value=1.5),
        F.pad(x, (0, 0, 2, 1), "constant", 2),
        F.pad(x, (1, 2)),
        F.pad(x, (2, 1), mode="reflect"),
    ),
    "mm": lambda x, k: (x[0].mm(k.square), torch.mm(k.weight, x[0].T)),
    "bmm": lambda x, k: (x.bmm(k.c.mT), torch.bmm(input=k.c, mat2=x.mT)),
    "mv": lambda x, k: (x[0].mv(k.square[0]), torch.mv(k.square, x[0, 0])),
    "dot": lambda x, k: (x[0, 0].dot(k.square[0]), torch.dot(k.square[1], x[1, 1])),
    "vdot": lambda x, k: torch.vdot(k.square[1], x[1, 1]),
    "inner": lambda x, k: (x.inner(k.weight), torch.inner(k.weight, x)),
    "outer": lambda x, k: (x[0, 0].outer(k.square[0]), torch.outer(k.square[1], x[1, 1])),
    "einsum": lambda x, k: (
        torch.einsum("ble,fe->blf", x, k.weight),
        torch.einsum("ble,fe,bl->bf", [x, k.weight, k.c[..., 0]]),
    ),
    "tensordot": lambda x, k: torch.tensordot(x, k.weight, dims=([2], [1])),
    "chain_matmul": lambda x, k: torch.chain_matmul(x[0], k.square, k.weight.T),
    "rrelu": lambda x, _: (F.rrelu(x, 0.1, 0.3, False), F.rrelu(x, training=False)),
    "prelu": lambda x, k: (
        F.prelu(x, k.c[0, :, 0]),
        torch.prelu(x, k.c[0, 0, :1]),
        F.prelu(torch.cat([x, 0 * x], 2), k.c[0, :, 0]),
    ),
    "gumbel_softmax": lambda x, _: F.gumbel_softmax(0 * x, tau=1e9) * 0,
    "bernoulli": lambda x, _: torch.bernoulli((x > 0).to(x)),
    "one_hot": lambda x, _: F.one_hot((x > 0).long()).to(x),
    "argsort": lambda x, _: (x.argsort().double(), torch.argsort(x, 1).double()),
    "matrix_norm": lambda x, _: torch.linalg.matrix_norm(x),
    "det": lambda x, _: (torch.det(square(x)), torch.linalg.det(square(x))),
    "inverse": lambda x, _: torch.inverse(square(x)),
    "inv": lambda x, _: torch.linalg.inv(square(x)),
    "solve_triangular": lambda x, _: torch.linalg.solve_triangular(
        square(x).tril() + 9 * torch.eye(4).to(x), x, upper=False
    ),
    "log_sigmoid": lambda x, _: (F.logsigmoid(x), torch.nn.LogSigmoid()(x)),
    "conv1d": lambda x, k: (
        F.conv1d(x, k.c[:, :, :3], k.c[0, 0, :2], padding=1),
        F.conv1d(x, k.c[:1].view(4, 1, 6)[..., :2], bias=k.c[0, :, 0], groups=4),
    ),
    "conv2d": lambda x, k: F.conv2d(x[:, None], k.c[:, :1, None, :3], k.c[0, 0, :2], stride=2),
    "conv3d": lambda x, k: F.conv3d(
        x[:, None, None], k.c[:, :1, :1, None, None], bias=k.c[0, 0, :2]
    ),
    "conv_transpose1d": lambda x, k: (
        F.conv_transpose1d(x, k.c.transpose(0, 1)[..., :3], k.c[0, 0, :2], stride=2, padding=1),
        torch.conv_transpose1d(x, k.c[:1, :, :2].transpose(0, 1), groups=4),
    ),
    "conv_transpose2d": lambda x, k: F.conv_transpose2d(
        x[:, None], k.c[:1, :2, None, :3], bias=k.c[0, 0, :2], stride=2
    ),
    "conv_transpose3d": lambda x, k: F.conv_transpose3d(
        x[:, None, None], k.c[:1, :2, None, None, :3], k.c[0, 0, :2]
    ),
    "instance_norm": lambda x, k: (
        F.instance_norm(x, eps=1e-2),
        F.instance_norm(x, None, None, k.c[0, :, 0], k.c[0, :, 1], eps=1e-2),
        F.instance_norm(x, k.c[0, :, 0], k.c[0, :, 1].abs() + 0.2, use_input_stats=False),
        torch.instance_norm(
            x, k.c[0, :, 2], k.c[0, :, 3], None, None, True, 0.1, eps=1e-2, cudnn_enabled=True
        ),
    ),
    "max_pool3d": lambda x, _: F.max_pool3d(x.view(2, 1, 2, 2, 6), 2),
    "addmm": lambda x, k: (
        torch.addmm(k.c[0, 0, :5], x[0], k.weight.T),
        torch.addmm(x[0], k.c[1, :, :4], k.c[0], beta=0.5, alpha=2),
        k.c[0, :, :5].addmm(x[0], k.weight.T),
    ),
    "addmv": lambda x, k: torch.addmv(k.c[0, :, 0], x[0], k.square[0], alpha=-1.5),
    "lerp": lambda x, k: (
        torch.lerp(x, k.c, 0.3),
        k.c.lerp(x, weight=k.c[:1]),
        x.clone().lerp_(2 * x, k.c),
    ),
    "addcmul": lambda x, k: (
        torch.addcmul(k.c, x, k.c[:1], value=2),
        x.addcmul(k.c, tensor2=k.c[0]),
        x.clone().addcmul_(k.c, k.c),
    ),
    "glu": lambda x, _: (F.glu(x), torch.nn.GLU(1)(x)),
    "grouped_mm": lambda x, k: grouped(x, k),
    "_grouped_mm": lambda x, k: grouped(x, k),
    "multi_dot": lambda x, k: torch.linalg.multi_dot([x[0], k.square, k.weight.T]),
    "masked_fill": lambda x, k: (
        x.masked_fill(k.mask, 1.5),
        x.masked_fill(k.mask, 0),
        x.masked_fill(mask=k.mask, value=2),
        torch.masked_fill(x, k.mask, torch.tensor(-1.5).to(x)),
        x.clone().masked_fill_(k.mask, 2),
        k.c.masked_fill(k.mask, x[0, 0, 0]),
    ),
    "zero": lambda x, _: x.clone().zero_(),
    "baddbmm": lambda x, k: (
        torch.baddbmm(k.c[..., :4], x, k.c.mT),
        torch.baddbmm(x[..., :4], k.c, k.c.mT, beta=3),
    ),
    "addbmm": lambda x, k: torch.addbmm(k.c[0, :, :4], x, k.c.mT, beta=2, alpha=0.3),
    "__setitem__": lambda x, k: assigned(x, k),
    "max": lambda x, k: (x.max(), torch.max(x, 1), torch.max(x, k.c), x.max(k.c)),
    "min": lambda x, k: (x.min(), torch.min(k.c, x), torch.min(x, other=k.c)),
    "sort": lambda x, _: (x.sort(1), torch.sort(x, descending=True)),
    "median": lambda x, _: (x.median(1), torch.median(x)),
    "norm": lambda x, _: (x.norm(dim=-1), torch.norm(x), torch.linalg.norm(x)),
    "diff": lambda x, k: (x.diff(dim=1), torch.diff(x, dim=1, prepend=k.c, append=k.c[:, :1])),
    "rdiv": lambda x, _: 1.5 / x,
    "true_divide": lambda x, k: (torch.true_divide(x, k.c), torch.true_divide(x, 1 + x.abs())),
    "expit": lambda x, _: torch.special.expit(x),
    "_threshold": lambda x, _: F.threshold(x, 0.1, 0),
    "copy_": lambda x, k: (k.c.clone().copy_(x), x.clone().copy_(k.c), overwritten(x, k)),
    "erfc": lambda x, _: torch.erfc(x),
    "masked_scatter": lambda x, k: (
        torch.masked_scatter(x, k.mask[:, :1], k.c),
        k.c.masked_scatter(k.mask[:, :1], 2 * x),
        x.clone().masked_scatter_(k.mask, 2 * x),
    ),
    "index_put": lambda x, k: (
        torch.index_put(x, (torch.tensor([1, 0]),), k.c),
        k.c.index_put((torch.tensor([1]), torch.tensor([2])), x[0, 0]),
        x.index_put((torch.tensor([1, 1]),), k.c, accumulate=True),
    ),
    "requires_grad_": lambda x, _: x.clone().requires_grad_(),
    "retain_grad": lambda x, _: (x.requires_grad and x.clone().retain_grad(), x)[1],
    "register_hook": lambda x, _: (x.requires_grad and x.clone().register_hook(abs), x)[1],
    "bfloat16": lambda x, _: x.bfloat16(),
    "to": lambda x, k: (x.to(torch.float32), x.to(x.device), x.to(k.c)),
    "cpu": lambda x, _: x.cpu(),
    "float": lambda x, _: x.float(),
    "half": lambda x, _: x.half(),
    "double": lambda x, _: x.double(),
    "__get__": lambda x, _: (x.mT, x[0].T, x.data),
}  # fmt: skip


def square(x: Tensor) -> Tensor:
    """Square matrices (2, 4, 4)."""
    return x[..., :4]


def assigned(x: Tensor, k: Constants) -> tuple[Tensor, ...]:
    """Constants put into a live tensor, live ones into a constant, and one after the other."""
    live, constant, both = x.clone(), k.c.clone(), k.c.clone()
    live[:, 1] = k.c[:, 0]
    live[0, 2, :3] = 1.5
    constant[:, [0, 2]] = x[:, 1:3]
    both[0] = x[1]
    both[k.mask] = 2
    both[1, 1] = x[0, 0]
    return live, constant, both


def grouped(x: Tensor, k: Constants) -> Tensor:
    """Tokens of two groups, each times a matrix of its own."""
    ends = torch.tensor([3, 8], dtype=torch.int32)
    tokens, matrices = x.reshape(8, 6).bfloat16(), k.square.expand(2, 6, 6).bfloat16()
    padded = F.pad(tokens, (0, 2)), F.pad(matrices, (0, 2, 0, 2)).contiguous()
    return torch._grouped_mm(*padded, offs=ends)


def overwritten(x: Tensor, k: Constants) -> Tensor:
    """A view of a live tensor, overwritten with a constant."""
    live = x.clone()
    live[:, 1].copy_(k.c[:, 0])
    live[:, 2].sigmoid_()
    return live


def names() -> list[str]:
    """Every name in the tables."""
    texts = (
        getattr(rules, table)
        for table in ("VIEWS", "MIXING", "SUMS", "JOINS", "PRODUCTS", "BENT", "FROZEN")
    )
    return sorted({*" ".join(texts).split(), *RULES, *rules.ALIASES})


def canonical(name: str) -> str:
    """The function that a name stands for, in place or not."""
    name = rules.plain_name(name)
    return name if name in RULES else rules.plain_name(name.removesuffix("_"))


def calls(name: str) -> list[Callable[[Tensor, Constants], Any]]:
    """All ways to call a function: of torch, of its namespaces, as a method, in place."""
    if name in CALLS:
        return [CALLS[name]]
    arguments = ARGUMENTS.get(name, lambda _: ())
    own = [name] if name in WITHOUT_IN_PLACE else [name, name + "_"]
    found = [getattr(space, n) for n in own for space in NAMESPACES.values() if hasattr(space, n)]
    assert found, f"no way to call {name} is known; add one"
    return [lambda x, k, f=f: f(x.clone(), *arguments(k)) for f in found]
