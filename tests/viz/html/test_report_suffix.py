"""A report is a page, and is not written under the name of anything else."""

from __future__ import annotations

from pathlib import Path

import pytest
from zoo.small import mamba_lm, token_ids

from captum_ssm import LatimFlow, report
from captum_ssm.errors import OptionError


@pytest.mark.parametrize("suffix", [".json", ".png", ".csv", ".pdf", ""])
def test_other_files_are_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / f"report{suffix}"
    with pytest.raises(OptionError, match=r"ends in \.html"):
        report(mamba_lm(), token_ids(1, 5), [LatimFlow], path=path)
    assert not path.parent.exists()
