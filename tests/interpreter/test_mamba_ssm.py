"""mamba_ssm's own Triton kernels: Mamba-2 fused and in parts, single steps, norms.

What it has in CUDA does not run here: the selective scan of Mamba and its fused path, and
causal_conv1d, in whose place stand the references that the packages ship.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import interpreted, own_code
from helpers.every_method import METHODS, named
from helpers.marks import slow_but
from oracles import relative_error
from torch import nn
from zoo import mamba_ssm_cpu
from zoo.mamba import randomise
from zoo.mamba_ssm_cpu import MambaSSM

from captum_ssm import LatimALTI, LatimFlow, trace

#: The fused path takes channels of the convolution by eights only.
MAMBA2: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"ngroups": 2, "d_state": 6},
    "norm first": {"norm_before_gate": True},
    "no norm": {"rmsnorm": False, "D_has_hdim": True},
    "beside an MLP": {"d_ssm": 16},
}


@pytest.mark.parametrize(("fused", "dtype"), [
    (True, torch.float32),
    pytest.param(True, torch.bfloat16, marks=pytest.mark.slow),
    (False, torch.float32),
])  # fmt: skip
@pytest.mark.parametrize("case", slow_but(("plain", "groups"), MAMBA2))
def test_mamba2(mamba_ssm: MambaSSM, case: str, fused: bool, dtype: torch.dtype) -> None:
    """Three chunks, of which the last is not whole."""
    mixer = randomise(mamba_ssm.make_mamba2(12, fused=fused, **MAMBA2[case])).to(dtype)
    called = []
    for module in mixer.children():
        module.register_forward_hook(lambda module, *_: called.append(module))
    interpreted.check(mixer, torch.randn(2, 19, 12).to(dtype))
    if fused:
        assert not {mixer.conv1d, mixer.out_proj} & set(called), "the path is not fused"


def test_odd_heads(mamba_ssm: MambaSSM) -> None:
    mixer = randomise(mamba_ssm.make_mamba2(12, fused=False, headdim=3, d_state=5))
    interpreted.check(mixer, torch.randn(2, 11, 12))


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_single_steps(mamba_ssm: MambaSSM, kind: str) -> None:
    """The operator of all tokens is what the kernel for one token adds up to."""
    make = mamba_ssm.make_mamba if kind == "mamba" else mamba_ssm.make_mamba2
    mixer, hidden = randomise(make(12)), torch.randn(2, 9, 12)
    with torch.no_grad(), trace(mixer) as record:
        mixer(hidden)
        states = mixer.allocate_inference_cache(2, 9)
        steps = [mixer.step(hidden[:, t : t + 1], *states)[0] for t in range(9)]
    assert relative_error(record.layers[0].linear.output(), torch.cat(steps, 1)) <= 1e-5


@named(METHODS, (LatimFlow, LatimALTI))
@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2"])
def test_every_method(
    mamba_ssm: MambaSSM, layer: str, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms may be kernels, alone or with the sum before them."""
    plain, fused = (
        randomise(mamba_ssm.make_lm(8, ssm_cfg={"layer": layer}, fused_add_norm=x))
        for x in (False, True)
    )
    fused.load_state_dict(plain.state_dict())
    ids, asked = torch.randint(16, (2, 7)), {"target": (-1, 3)}
    found = [method(model).attribute(ids, **asked) for model in (plain, fused)]
    mamba_ssm_cpu.install(monkeypatch, causal_conv1d=True)
    wanted = method(plain).attribute(ids, **asked)
    assert all(relative_error(x, wanted) <= 1e-5 for x in found)


@pytest.mark.parametrize("rule", slow_but(("frozen",), ("frozen", "half", "centered", "balanced")))
@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_kernels_are_read_as_operators_are(
    mamba_ssm: MambaSSM, fused: bool, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mamba-2's kernels, forward and backward, at the nodes of every rule."""
    options = {"layer": "Mamba2", "use_mem_eff_path": fused, "ngroups": 2}
    model: nn.Module = randomise(mamba_ssm.make_lm(8, n_layer=1, ssm_cfg=options))
    own_code.even_if_slow(monkeypatch)
    interpreted.check_read(model, torch.randint(16, (1, 9)), rule, monkeypatch)
