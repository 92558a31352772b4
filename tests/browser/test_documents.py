"""Frames in the documentation have the colors of its theme."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.browser import Page
from helpers.documents import ROOT
from matplotlib.image import imread

from captum_ssm.attr import Comparison

STATIC = ROOT / "docs" / "_static"


@pytest.mark.parametrize(("chosen", "system"), [("dark", "light"), ("light", "dark")])
def test_a_frame_follows_the_theme_that_is_chosen(
    page: Page, tmp_path: Path, chosen: str, system: str
) -> None:
    frame = Comparison({"one": torch.tensor([[0.5, -1.0]])})._repr_html_()
    path = tmp_path / "page.html"
    path.write_text(
        f'<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="{STATIC.as_uri()}'
        f'/pages.css"><body data-theme="{chosen}">{frame}</body>',
        encoding="utf-8",
    )
    page.prefer(system)
    page.goto(path)
    page.drawn()
    box = page.box("iframe")
    x, y = (int(box["left"] + box["right"]) // 2, int(box["top"] + box["bottom"]) // 2)
    shade = imread(page.screenshot(tmp_path / "shot.png"))[y, x, :3].mean()
    assert (shade < 0.2) if chosen == "dark" else (shade > 0.9)
