"""Reports of long texts in a real browser: how they fold, and how fast they are."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from browser.made import METHODS
from helpers.browser import Page
from zoo.small import mamba_lm, token_ids

from captum_ssm import LatimFlow, report


def token(index: int) -> str:
    return f'.token[data-index="{index}"]'


def test_long_texts_fold(page: Page, tmp_path: Path) -> None:
    ids = token_ids(1, 950)
    names = [f"word{i}" for i in range(950)]
    path = report(mamba_lm(), ids, [LatimFlow], tokens=names, path=tmp_path / "long.html")
    page.goto(path)
    assert page.count("#text details") == 5
    assert page.evaluate("document.querySelectorAll('#text details')[4].open")
    page.click("#fold")
    assert page.count("#text details[open]") == 0
    page.click("#text details:nth-of-type(3) summary")
    assert page.count("#text details[open]") == 1
    page.click(token(450))
    page.keys("End")
    assert page.count("#text details[open]") == 2
    assert page.evaluate("document.activeElement.dataset.index") == "949"
    page.click("#unfold")
    assert page.count("#text details[open]") == 5
    assert "strongest of 950" in page.text("#note") or "rounded" in page.text("#note")
    assert page.errors == []


@pytest.mark.slow
def test_two_thousand_tokens_and_24_layers(page: Page, tmp_path: Path) -> None:
    model, ids = mamba_lm(num_hidden_layers=24), token_ids(1, 2000)
    path = report(model, ids, METHODS, path=tmp_path / "long.html")
    assert path.stat().st_size < 13e6
    began = time.monotonic()
    page.goto(path)
    opened = time.monotonic() - began
    page.click("#unfold")
    took = page.evaluate(
        """(async () => {
          const times = [], tokens = document.querySelectorAll('.token');
          for (let n = 0; n < 40; n++) {
            const token = tokens[Math.floor(Math.random() * tokens.length)];
            const began = performance.now();
            token.dispatchEvent(
              new PointerEvent('pointerover', {bubbles: true, pointerType: 'mouse'}));
            await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
            times.push(performance.now() - began);
          }
          return times;
        })()"""
    )
    assert opened < 5 and np.median(took) < 100  # s and ms, on a busy machine
    assert page.errors == []
