"""Captum's infidelity and sensitivity, on token ids and embeddings."""

from __future__ import annotations

import pytest
import torch
from captum.attr import Attribution, FeatureAblation
from torch import Tensor, nn
from zoo.small import VOCABULARY, WIDTH, token_ids

from captum_ssm.metrics import token_infidelity, token_sensitivity


class Bag(nn.Module):
    """A logit that is a sum over tokens, so that the relevance of each is known."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, 3).double())

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        values = self.table[ids] if not ids.is_floating_point() else ids[..., :3]
        return (values if mask is None else values * mask[..., None]).sum(1)


class Known(Attribution):
    """The exact relevance of each token or number of a Bag, against the fill 0."""

    def __init__(self, model: nn.Module, scale: float = 1.0) -> None:
        super().__init__(model)
        self.scale = scale

    def attribute(self, inputs, target=None, additional_forward_args=None):
        if inputs.is_floating_point():
            return self.scale * inputs * (torch.arange(inputs.shape[-1]) == target)
        table = self.forward_func.table.detach()
        return self.scale * (table[inputs, target] - table[0, target])


@pytest.mark.parametrize("share", [0.01, 1.0])
def test_exact_relevance_has_no_infidelity(share):
    model, ids = Bag(), token_ids(3, 9)
    for inputs, fill in ((ids, 0), (torch.randn(3, 9, 5).double(), 0.0)):
        asked = {"target": 1, "fill": fill, "share": share}
        exact = token_infidelity(Known(model), inputs, **asked)
        assert exact.shape == (3,) and float(exact.max()) < 1e-20
        scaled = Known(model, 3.0)
        assert float(token_infidelity(scaled, inputs, **asked).max()) > 1e-3
        normal = token_infidelity(scaled, inputs, normalize=True, **asked)
        assert float(normal.abs().max()) < 1e-12


def test_padding_is_never_touched():
    seen = []

    def run(ids: Tensor, mask: Tensor) -> Tensor:
        seen.append((ids, mask))
        return model(ids, mask)

    model, ids = Bag(), torch.randint(1, VOCABULARY, (2, 8))
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, 6:] = 0
    token_infidelity(
        Known(model), ids, 0, mask, fill=0, attributions=torch.randn(2, 8), mask=mask, share=1.0
    )
    method = FeatureAblation(run)
    token_infidelity(method, ids, 0, mask, fill=0, mask=mask, attributions=torch.randn(2, 8))
    shown, masks = seen[0]
    assert shown.shape == (20, 8) and torch.equal(masks, mask.repeat_interleave(10, 0))
    assert torch.equal(shown[masks == 0], ids.repeat_interleave(10, 0)[masks == 0])
    gone = (shown == 0).sum(1)
    assert gone.tolist() == [1] * 10 + [2] * 10  # a quarter of 5 and of 6 tokens, rounded


def test_sensitivity_of_what_does_not_change():
    class Constant(Attribution):
        def attribute(self, inputs, target=None, additional_forward_args=None):
            return torch.ones(tensor.shape) if isinstance(inputs, Tensor) else (torch.ones(2, 5),)

    class Own(Attribution):
        """Relevance that is the embedding itself."""

        def attribute(self, inputs, target=None, additional_forward_args=None):
            return inputs

    tensor = torch.zeros(20, 5)
    ids = token_ids(2, 5)
    found = token_sensitivity(Constant(Bag()), ids, 1, replacements=torch.arange(3))
    assert found.tolist() == [0, 0]
    embeddings = torch.randn(2, 5, WIDTH)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    size = embeddings.flatten(1).norm(dim=1)
    found = token_sensitivity(Own(Bag()), embeddings, 1, radius=0.5, mask=mask)
    most = 0.5 * (mask.sum(1) * WIDTH).sqrt() / size
    assert bool((found <= most).all()) and bool((found > 0.3 * most).all())


def test_ids_are_replaced_by_those_allowed():
    seen = []

    class Watching(Attribution):
        def attribute(self, inputs, target=None, additional_forward_args=None):
            rows = inputs if isinstance(inputs, Tensor) else inputs[0]
            seen.append(rows)
            return torch.ones(rows.shape) if isinstance(inputs, Tensor) else (rows.double(),)

    ids, mask = token_ids(2, 10), torch.ones(2, 10)
    mask[0, :5] = 0
    replacements = torch.tensor([100, 200])
    common = {"replacements": replacements, "mask": mask, "share": 0.4, "samples": 6}
    token_sensitivity(Watching(Bag()), ids, 1, **common)
    whole, changed = seen
    replaced = changed >= 100
    assert torch.equal(whole, ids) and set(changed[replaced].tolist()) == {100, 200}
    assert replaced.sum(1).tolist() == [2] * 6 + [4] * 6
    assert not replaced[:6, :5].any()
    assert torch.equal(changed[~replaced], ids.repeat_interleave(6, 0)[~replaced])
