"""Activations inside a run: where they are found, read and cut."""

from __future__ import annotations

import collections
from typing import Any

import oracles
import pytest
import torch
from torch import Tensor, nn
from zoo.architectures import hook_count
from zoo.small import WIDTH, mamba_lm, token_ids

from captum_ssm.errors import LayerError
from captum_ssm.linear import find_site, linearised

BLOCK = "backbone.layers.1"


def close(found: Tensor, wanted: Tensor) -> bool:
    return oracles.relative_error(found, wanted) <= 1e-5


def test_heads_are_the_mixers_whatever_its_parts_are_called() -> None:
    model = mamba_lm()
    model.backbone.layers[1].mixer.heads = nn.Identity()
    model.heads = nn.Identity()
    assert find_site(model, f"{BLOCK}.mixer.heads").at == "heads"
    assert find_site(model, "heads").module is model.heads
    with pytest.raises(LayerError, match="part of the mixer"):
        find_site(model, model.backbone.layers[1].mixer.heads)


Pair = collections.namedtuple("Pair", ["one", "other"])


class Parts(nn.Module):
    """Returns two halves in some container, beside what does not depend on the input."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, more: Any = None) -> Any:
        halves, beside = (x / 2, x[..., :4] / 2), torch.ones(3)
        return {
            "tuple": lambda: (beside, *halves),
            "list": lambda: [halves[0], None, [halves[1], "text"]],
            "dict": lambda: {"one": halves[0], "n": 3, "beside": beside, "other": halves[1]},
            "named": lambda: Pair(*halves),
        }[self.how]()


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.model, self.parts, self.how = mamba_lm(), Parts(how), how

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.backbone.embeddings(ids)
        made = self.parts(x)
        one, other = {
            "tuple": lambda: made[1:],
            "list": lambda: (made[0], made[2][0]),
            "dict": lambda: (made["one"], made["other"]),
            "named": lambda: (made.one, made.other),
        }[self.how]()
        x = torch.cat([one[..., :-4] * 2, one[..., -4:] + other], -1)
        for block in self.model.backbone.layers:
            x = block(x)
        out: Tensor = self.model.lm_head(x)
        return out


@pytest.mark.parametrize(
    ("how", "cut"), [("tuple", True), ("list", False), ("dict", True), ("named", False)]
)
def test_what_is_met_goes_on_in_its_container(how: str, cut: bool) -> None:
    model, ids = Net(how).eval(), token_ids()
    wanted, hooks = model(ids), hook_count(model)
    site = find_site(model, "parts")
    options: dict[str, Any] = {"cuts": [site]} if cut else {"reads": [site]}
    with linearised(model, ids, **options) as network:
        found = model(ids)
    assert close(found.detach(), wanted) and hook_count(model) == hooks
    met = network.met(site)
    assert met.sizes == (WIDTH, 4) and (met.leaf is not None) is cut
    embedded = model.model.backbone.embeddings(ids)
    for tensor, own in zip(met.tensors, (embedded / 2, embedded[..., :4] / 2), strict=True):
        assert close(tensor.detach(), own)
    (gradient,) = torch.autograd.grad(found[:, -1].sum(), network.root, allow_unused=True)
    assert (gradient is None) is cut


def test_a_network_that_begins_inside_knows_what_passes() -> None:
    model, ids = mamba_lm(), token_ids(1, 5)
    site = find_site(model, f"{BLOCK}.mixer")
    with linearised(model, ids, begins=site, constants=False) as network:
        logit = model(ids).logits[0, -1, 3]
    (passing,) = network.passing
    assert network.root is network.met(site).leaf and passing.shape == network.root.shape
    inside, past = torch.autograd.grad(logit, [network.root, passing])
    total = (inside * network.root).sum() + (past * passing).sum()
    with linearised(model, ids, constants=False) as whole:
        again = model(ids).logits[0, -1, 3]
    (gradient,) = torch.autograd.grad(again, whole.root)
    assert close(total.detach(), (gradient * whole.root).sum().detach())
    assert not whole.passing
