"""The names that the package exports."""

from __future__ import annotations

import pytest

import captum_ssm


def test_every_public_name_resolves() -> None:
    assert len(set(captum_ssm.__all__)) == len(captum_ssm.__all__)
    for name in captum_ssm.__all__:
        assert getattr(captum_ssm, name) is not None, name
    assert set(captum_ssm.__all__) <= set(dir(captum_ssm))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = captum_ssm.no_such_name
