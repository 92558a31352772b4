"""Random configurations of mamba_ssm's mixers, on their slow and their fused paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from fuzz.fuzzing import fuzz
from fuzz.mixer_checks import Inputs, Made, check_any, inputs
from hypothesis import given
from hypothesis import strategies as st
from zoo import mamba_ssm_cpu
from zoo.mamba import randomise
from zoo.mamba2_simple_cpu import Simple
from zoo.mamba3_cpu import Mamba3

#: Added to mean squares, so that norms of few features do not blow rounding errors up.
EPS = 0.05
BOOL, FEW = st.booleans(), st.integers(1, 4)
LIMITS = st.sampled_from([(0.0, float("inf")), (0.2, 1.5), (0.0, 0.8)])

_MAMBA = {
    "d_model": st.integers(1, 9),
    "d_state": FEW,
    "d_conv": st.integers(1, 5),
    "expand": st.integers(1, 3),
    "dt_rank": FEW,
    "conv_bias": BOOL,
    "bias": BOOL,
    "fused": BOOL,
}
_MAMBA2 = {
    "groups": st.integers(1, 3),
    "each": st.integers(1, 3),  # heads of a group
    "headdim": st.sampled_from([2, 4, 6]),
    "d_state": FEW,
    "d_conv": st.integers(1, 5),
    "chunk_size": st.sampled_from([1, 4, 8, 32]),
    "bias": BOOL,
    "conv_bias": BOOL,
    "dt_limit": LIMITS,
    "fused": BOOL,
}
_MAMBA3 = {
    "groups": st.integers(1, 2),
    "each": st.integers(1, 2),
    "headdim": st.sampled_from([2, 4, 8]),
    "d_state": st.sampled_from([4, 8, 14]),
    "rope_fraction": st.sampled_from([0.5, 1.0]),
    "is_outproj_norm": BOOL,
    "A_floor": st.sampled_from([1e-4, 0.6]),
}


class Package:
    """mamba_ssm's mixers on the CPU."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.package = mamba_ssm_cpu.install(patch, causal_conv1d=True)
        self.simple = Simple(self.package, patch)
        self.mamba3 = Mamba3(self.package, patch)

    def mamba(self, options: dict[str, Any]) -> Made:
        module = randomise(self.package.make_mamba(**options))
        return Made(module, options["d_model"])

    def mamba2(self, options: dict[str, Any]) -> Made:
        norm_first = options["norm_before_gate"] and not options["fused"]
        more = {"rmsnorm": options["rmsnorm"], "norm_before_gate": norm_first}
        # channels that pass no scan, which the fused path's reference does not know
        beside = 0 if options["fused"] else options["beside"]
        shape = self._shape(options)
        scanned = 2 * shape["d_model"]
        shape["d_model"] += beside
        made = self.package.make_mamba2(**shape, **more, d_ssm=scanned, fused=options["fused"])
        return self._made(made, shape["d_model"])

    def mamba2_simple(self, options: dict[str, Any]) -> Made:
        shape = self._shape(options)
        more = {"learnable_init_states": options["learnable_init_states"]}
        width = shape.pop("d_model")
        return self._made(self.simple.make(width, fused=options["fused"], **shape, **more), width)

    def mamba3_siso(self, options: dict[str, Any]) -> Made:
        options = dict(options)
        groups, each = options.pop("groups"), options.pop("each")
        heads = 2 * groups * each
        width = heads * options["headdim"] // 2
        return Made(self.mamba3.make(width, ngroups=groups, **options), width)

    @staticmethod
    def _shape(options: dict[str, Any]) -> dict[str, Any]:
        kept = ("headdim", "d_state", "d_conv", "chunk_size", "bias", "conv_bias", "dt_limit")
        heads = options["groups"] * options["each"]
        width = heads * options["headdim"] // 2
        return {
            **{name: options[name] for name in kept},
            "d_model": width,
            "ngroups": options["groups"],
        }

    @staticmethod
    def _made(module: Any, width: int) -> Made:
        randomise(module)
        if hasattr(module, "norm"):
            module.norm.eps = EPS
        return Made(module, width)


SUBJECTS: dict[str, tuple[dict[str, Any], Callable[[Package, dict[str, Any]], Made]]] = {
    "Mamba": (_MAMBA, Package.mamba),
    "Mamba2": (
        {
            **_MAMBA2,
            "rmsnorm": BOOL,
            "norm_before_gate": BOOL,
            "beside": st.integers(0, 3),
        },
        Package.mamba2,
    ),
    "Mamba2Simple": ({**_MAMBA2, "learnable_init_states": BOOL}, Package.mamba2_simple),
    "Mamba3": (_MAMBA3, Package.mamba3_siso),
}


@pytest.fixture(scope="module")
def package() -> Iterator[Package]:
    """mamba_ssm, as if causal_conv1d were installed, for all cases."""
    with pytest.MonkeyPatch.context() as patch:
        yield Package(patch)


@pytest.mark.parametrize("name", SUBJECTS)
@fuzz(quick=2, long=50)
@given(data=st.data(), drawn=inputs())
def test_mixers(package: Package, name: str, data: st.DataObject, drawn: Inputs) -> None:
    options, make = SUBJECTS[name]
    check_any(options, partial(make, package), data, drawn)
