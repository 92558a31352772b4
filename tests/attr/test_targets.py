"""Targets in all of Captum's forms, held to Captum's own selection."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from captum._utils.common import _select_targets
from helpers.every_method import METHODS, named
from torch import Tensor
from zoo.mamba import transformers_model
from zoo.small import CLASSES, VOCABULARY, classifier, mamba_lm, token_ids

from captum_ssm import LatimFlow, MambaAttribution
from captum_ssm.attr.call.targets import SumTarget
from captum_ssm.errors import TargetError

pytestmark = pytest.mark.slow

BATCH = 4
#: name: (target, the class it means for each example)
CLASS_TARGETS = {
    "int": (3, [3] * 4), "negative int": (-2, [3] * 4), "np.int64": (np.int64(3), [3] * 4),
    "0-d tensor": (torch.tensor(2), [2] * 4), "0-d array": (np.array(2), [2] * 4),
    "tensor of one": (torch.tensor([2]), [2] * 4),
    "1-d tensor": (torch.tensor([0, 4, 2, 1]), [0, 4, 2, 1]),
    "1-d array": (np.array([0, 4, 2, 1]), [0, 4, 2, 1]), "list": ([0, 4, 2, 1], [0, 4, 2, 1]),
    "list with negatives": ([0, -1, 2, -4], [0, 4, 2, 1]),
    "list of 0-d tensors": ([torch.tensor(k) for k in (0, 4, 2, 1)], [0, 4, 2, 1]),
    "tuple": ((3,), [3] * 4), "list of tuples": ([(0,), (4,), (2,), (1,)], [0, 4, 2, 1]),
}  # fmt: skip
#: name: (target, position and token it means for each example)
TOKEN_TARGETS = {
    "pair": ((3, 7), [(3, 7)] * 4),
    "negative tuple": ((-1, -2), [(5, 17)] * 4),
    "tuple of np.int64": ((np.int64(3), np.int64(7)), [(3, 7)] * 4),
    "tuple of tensors": ((torch.tensor(3), torch.tensor(7)), [(3, 7)] * 4),
    "list of pairs": ([(3, 7), (5, 0), (0, 1), (-1, 18)], [(3, 7), (5, 0), (0, 1), (5, 18)]),
    "2-d tensor": (
        torch.tensor([[3, 7], [5, 0], [0, 1], [-1, 18]]),
        [(3, 7), (5, 0), (0, 1), (5, 18)],
    ),
}


def captum_accepts(output, target):
    """Captum's own choice of one number per example, or None if it refuses."""
    try:
        chosen = _select_targets(output, target)
    except (AssertionError, IndexError, TypeError, ValueError, RuntimeError, AttributeError):
        return None
    return chosen if chosen.shape == output.shape[:1] else None


def test_captum_itself_accepts_most_of_them() -> None:
    """Else the comparison with it would compare nothing."""
    for table, output in (
        (CLASS_TARGETS, torch.randn(BATCH, CLASSES)),
        (TOKEN_TARGETS, torch.randn(BATCH, 6, VOCABULARY)),
    ):
        accepted = {n for n, (t, _) in table.items() if captum_accepts(output, t) is not None}
        assert accepted & {"tuple", "pair"} and len(accepted) > 2


@pytest.mark.parametrize("name", [*CLASS_TARGETS, *TOKEN_TARGETS])
def test_the_chosen_number_is_explained(name: str) -> None:
    of_classes = name in CLASS_TARGETS
    target, meant = (CLASS_TARGETS if of_classes else TOKEN_TARGETS)[name]
    model, ids = classifier() if of_classes else mamba_lm(), token_ids(BATCH, 6)
    index = (range(BATCH), meant) if of_classes else (range(BATCH), *zip(*meant, strict=True))

    def output(tokens: Tensor) -> Tensor:
        return getattr(out := model(tokens), "logits", out)

    found = MambaAttribution(model).attribute(ids, target=target)
    query = "last" if of_classes else torch.tensor(index[1])
    explicit = MambaAttribution(lambda x: output(x)[index][:, None], model=model)
    assert torch.equal(found, explicit.attribute(ids, query=query))
    captums = captum_accepts(output(ids), target)
    assert captums is None or torch.equal(captums, output(ids)[index])


INT = r"Pass an int, for example target=0, or one int per example as a list or a 1-D tensor of 2\."
BAD = {
    "too large": (5, r"target=5 is out of range.*\(2, 5\): class 5 is not in \[-5, 5\).*0 to 4"),
    "one of the list": ([0, 9], r"target=\[0, 9\] is out of range.*class 9 is not in"),
    "float": (1.0, rf"target=1.0 contains 1.0 of type float, which is not an integer. {INT}"),
    "nan": (torch.tensor(torch.nan), r"contains nan of type float"),
    "bool": (True, rf"target=True contains True of type bool, which is not an integer. {INT}"),
    "list of another length": ([0, 1, 2], rf"3 entries for a batch of 2 examples. {INT}"),
    "long list": ([7] * 300, r"target=\[7, 7, .{60,80}\.\.\. has 300 entries for a batch of 2"),
    "pair": ((0, 1), rf"has 2 indices.*\(2, 5\), \(batch, classes\), needs 1. {INT}"),
    "tensor of pairs": (torch.tensor([[0, 1], [0, 2]]), r"shape \(2, 2\).* has 2 indices"),
    "none": (None, rf"target=None.*5,\) numbers per example. {INT}"),
}


@named(METHODS)
def test_an_int_on_logits_of_every_position(method):
    model, ids = mamba_lm(), token_ids(2, 6)
    message = r"\(2, 6, 19\).*would select a position, not a token.*\(position, token\).*\(-1, "
    for target in (3, -1, np.int64(3), torch.tensor(3), [3, 4], (3,)):
        with pytest.raises(ValueError, match=message):
            method(model).attribute(ids, target=target)


PAIR = r"Pass a tuple \(position, token\), for example target=\(-1, 0\), or one such tuple per "
PAIR += r"example as a list or a tensor of shape \(2, 2\)\."
BAD_PAIRS = {
    "triple": ((1, 2, 3), rf"has 3 indices per example.*vocabulary\), needs 2. {PAIR}"),
    "one of the list": ([(1, 2), (1, 2, 3)], r"has 3 indices"),
    "a list": ([-1, 3], r"to use \(-1, 3\) for all examples, pass a tup"),
    "tensor of triples": (torch.ones(2, 3).long(), rf"\(2, 3\).*3 indices.*needs 2\. {PAIR}"),
    "word": ((-1, "lamp"), r"contains 'lamp' of type str"),
    "none": (None, rf"target=None.*6, 19\) numbers per example. {PAIR}"),
    "position": ((6, 0), r"\(2, 6, 19\): position 6 is not in.* from 0 to 5, or from -6 to -1"),
    "token": ((0, 19), "token 19 is not in.* from 0 to 18, or from -19 to -1"),
}
REFUSED = {
    **{f"class, {name}": (classifier, *row) for name, row in BAD.items()},
    **{f"pair, {name}": (mamba_lm, *row) for name, row in BAD_PAIRS.items()},
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_targets(name: str) -> None:
    make, target, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        MambaAttribution(make()).attribute(token_ids(2, 6), target=target)


@pytest.mark.parametrize(
    ("target", "token"),
    [(3, 3), ([5, 4], 5), (99, 0), (torch.tensor(18), 18), (VOCABULARY, 0), (-1, 0)],
)
def test_what_is_suggested_for_an_int_is_accepted(target, token):
    model, ids = mamba_lm(), token_ids(2, 6)
    with pytest.raises(ValueError, match=rf"for example target=\(-1, {token}\)"):
        MambaAttribution(model).attribute(ids, target=target)
    assert MambaAttribution(model).attribute(ids, target=(-1, token)).any()


def test_a_target_of_one_number_per_example():
    model, ids = classifier(), token_ids(2, 6)
    single = MambaAttribution(lambda x: model(x)[:, 2], model=model)
    with pytest.raises(ValueError, match=r"shape \(2,\), \(batch\), needs none. Pass target=None"):
        single.attribute(ids, target=1)
    assert single.attribute(ids).any()


def test_a_target_of_more_dimensions():
    model, ids = classifier(), token_ids(2, 6)
    cubes = MambaAttribution(lambda x: model(x)[:, :, None, None].expand(2, 5, 3, 4), model=model)
    message = r"\(2, 5, 3, 4\), \(batch and 3 more\), needs 3. Pass a tuple \(3 indices\), "
    message += r"for example target=\(-1, -1, 0\)"
    with pytest.raises(ValueError, match=message):
        cubes.attribute(ids, target=(1, 2))
    with pytest.raises(ValueError, match=r"index 5 is not in \[-5, 5\)"):
        cubes.attribute(ids, target=(5, 0, 0))
    assert cubes.attribute(ids, target=(-1, -1, 0)).any()


def test_a_sum_with_a_padded_token_is_refused() -> None:
    ids, mask = token_ids(2, 6), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    target = SumTarget([2, 5], torch.tensor([1, 2]))
    with pytest.raises(TargetError, match=r"position 5 is a padded token of example 1"):
        LatimFlow(transformers_model()).attribute(ids, target, attention_mask=mask)
