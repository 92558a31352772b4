"""Transformer-Attribution written again in float64: every matrix formed, networks of LRP by hand.

``chefer`` is the authors' formula for transformers, and ``channel_betas`` the sums over channels
for any mixer, from the matrices of its operator.  :mod:`oracles.wrapped` has whole networks of
other mixers.
"""

from __future__ import annotations

import copy
import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from captum_ssm import trace
from captum_ssm.linear import linearized
from oracles import PRESETS


def betas_to_row(betas, query, normalize=False):
    """Row ``query`` (a position for each example) of the product of the betas (B, L, L)."""
    rows = []
    for b, q in enumerate(query):
        row = torch.zeros(betas[0].shape[-1]).double()
        row[q] = 1
        for beta in reversed(betas):
            matrix = beta[b].double()
            if normalize:
                matrix = matrix / matrix.sum(-1, keepdim=True)
            row = row @ matrix
        rows.append(row)
    return torch.stack(rows)


def with_identity(matrix):
    return torch.eye(matrix.shape[-1]).double() + matrix


# --- transformers: Chefer's formula from attention written out -----------------------------------


class Straight(nn.Module):
    """An activation as its ratio, which is no function of the input."""

    def __init__(self, activation):
        super().__init__()
        self.activation = activation

    def forward(self, x):
        return x * (self.activation(x) / x).detach()


class ScaledOnly(nn.Module):
    """A LayerNorm whose denominator is no function of the input."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        size = (centred.square().mean(-1, keepdim=True) + self.norm.eps).sqrt().detach()
        return centred / size * self.norm.weight + self.norm.bias


def conservative(model):
    """A float64 copy of a transformer under LRP's rules, attention aside."""
    model = copy.deepcopy(model)
    for outer in list(model.modules()):
        for name, inner in list(outer.named_children()):
            if isinstance(inner, nn.LayerNorm):
                setattr(outer, name, ScaledOnly(inner))
            elif isinstance(inner, nn.Tanh) or "activations" in type(inner).__module__:
                setattr(outer, name, Straight(inner))
    return model


@contextmanager
def written_out(model, cut):
    """Attention in plain matrices, which are yielded; ``cut`` off what they were made from."""
    probabilities = []

    def attend(module, query, key, value, mask, scaling=None, **_):
        scores = query @ key.transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
        if mask is not None:
            scores = scores + mask
        matrix = scores.exp() / scores.exp().sum(-1, keepdim=True)
        matrix = matrix.detach().requires_grad_() if cut else matrix
        probabilities.append(matrix)
        return (matrix @ value).transpose(1, 2), matrix

    code = sys.modules[type(model).__module__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code, "eager_attention_forward", attend)
        yield probabilities


def number_of(model, inputs, target):
    logits = model(**inputs).logits
    place = (target,) if isinstance(target, int) else target
    return logits[(slice(None), *place)].sum()


def chefer(model, inputs, target, form):
    """One matrix per layer, (B, L, L)."""
    reference = copy.deepcopy(model).double()
    reference.set_attn_implementation("eager")
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    with written_out(reference, cut=False) as attention:
        gradients = torch.autograd.grad(number_of(reference, inputs, target), attention)
    relevance = attention
    if form == "lrp":
        linear = conservative(reference)
        with written_out(linear, cut=True) as attention:
            number = number_of(linear, inputs, target)
        pulled = torch.autograd.grad(number, attention)
        relevance = [a * g for a, g in zip(attention, pulled, strict=True)]
    return [
        with_identity((g * r).clamp(min=0).mean(1).detach())
        for g, r in zip(gradients, relevance, strict=True)
    ]


# --- every kind of mixer: a dense formula per channel --------------------------------------------


def pulled_back(linear, gradient):
    """(B, L, E) through the output projection by its columns, found from unit vectors."""
    at_rest = linear.project(torch.zeros_like(linear.values))
    out = torch.zeros_like(linear.values)
    for head in range(linear.values.shape[2]):
        for p in range(linear.values.shape[3]):
            unit = torch.zeros_like(linear.values)
            unit[:, :, head, p] = 1
            out[:, :, head, p] = ((linear.project(unit) - at_rest) * gradient).sum(-1)
    return out


def channel_betas(model, inputs, select, form):
    """Sums over the channels of a head, written out, from matrices of every channel."""
    with trace(model, graph="all") as record:
        number = select(model(inputs))
    real = torch.autograd.grad(number.sum(), [layer.output for layer in record.layers])
    with linearized(model, inputs, rule="half") as network:
        start = network.mode.begun(inputs)
        number = select(model(start))
        lower = torch.autograd.grad(number.sum(), [s.output for s in network.steps])
    betas = []
    for layer, g, g_lower in zip(record.layers, real, lower, strict=True):
        with torch.no_grad():
            linear = layer.linear.restrict(PRESETS["unified"])
            v, upper = linear.values.double(), pulled_back(layer.linear, g).double()
            coefficient = pulled_back(layer.linear, g_lower).double()
            alpha = linear.operator.per_channel().dense(None).double()
            alpha = alpha.unflatten(1, v.shape[2:])  # (B, H, P, L, L)
            if form == "gradient":
                weighted = torch.einsum("bihp,bhpij,bjhp->bhij", upper, alpha, v)
            else:
                relevance = torch.einsum("bihp,bhpij,bjhp->bhij", coefficient, alpha, v)
                weighted = torch.einsum("bihp,bjhp->bhij", upper, v) * relevance
            betas.append(with_identity(weighted.clamp(min=0).mean(1)))
    return betas
