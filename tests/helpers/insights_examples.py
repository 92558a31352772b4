"""Small models and datasets to look through, and a way to ask a page's server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from captum_ssm.insights import AttributionVisualizer, Batch, GeneralFeature, ImageFeature

CLASSES = ["ant", "bee", "cat", "dog", "eel"]
SIDE = 6


class Untouched(nn.Module):
    """Fails if it is run."""

    def forward(self, *arguments: Any) -> Tensor:
        raise AssertionError("the model was run")


def cnn(channels: int = 3, classes: int = len(CLASSES)) -> nn.Module:
    """Images (B, C, 6, 6) to classes."""
    pixels = 4 * (SIDE - 2) ** 2
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(pixels, classes)
    ).eval()


def table_model(numbers: int = 3, classes: int = len(CLASSES)) -> nn.Module:
    """Numbers (B, F) to classes."""
    return nn.Sequential(nn.Linear(numbers, 7), nn.Tanh(), nn.Linear(7, classes)).eval()


class Always(nn.Module):
    """Finds one class likeliest, whatever the numbers (B, F) are."""

    def __init__(self, best: int, classes: int = len(CLASSES)) -> None:
        super().__init__()
        self.linear = nn.Linear(3, classes)
        self.best = best

    def forward(self, numbers: Tensor) -> Tensor:
        scores = self.linear(numbers)
        bonus = torch.zeros(scores.shape[-1], dtype=scores.dtype)
        bonus[self.best] = 1000
        return scores + bonus


def softmax(output: Tensor) -> Tensor:
    return output.softmax(-1)


def table(models: Any, dataset: Any, **options: Any) -> AttributionVisualizer:
    """A visualizer of three numbers."""
    feature = GeneralFeature("measures", ["height", "width", "depth"])
    return AttributionVisualizer(models, CLASSES, feature, dataset, **options)


def photos(models: Any, dataset: Any, **options: Any) -> AttributionVisualizer:
    """A visualizer of images."""
    feature = ImageFeature("photo", [lambda x: 0 * x], [lambda x: (x - 0.5) / 0.5])
    return AttributionVisualizer(models, CLASSES, feature, dataset, score_func=softmax, **options)


def numbers(*labels: int | None) -> Batch:
    """A batch of three random numbers for each label."""
    known = None if None in labels else torch.tensor(labels, dtype=torch.long)
    return Batch(torch.randn(len(labels), 3), known)


def without_end() -> Iterator[Batch]:
    while True:
        yield numbers(0, 1)


def run_script(name: str, package: str) -> dict[str, Any]:
    """The names of a script, run with this package in place of captum.insights; not served."""
    path = Path(__file__).parents[1] / "insights" / "scripts" / f"{name}.py"
    text = path.read_text(encoding="utf-8").replace("from captum.insights", f"from {package}")
    names: dict[str, Any] = {"__name__": name}
    exec(compile(text.partition("\nvisualizer.serve(")[0], str(path), "exec"), names)
    return names


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        def refuse(word: str) -> None:
            raise AssertionError(f"{word} is no JSON")

        return json.loads(self.body, parse_constant=refuse)


def ask(
    url: str, path: str = "/", request: Any = None, *, token: str | None = None,
    headers: dict[str, str] | None = None, method: str | None = None,
) -> Answer:  # fmt: skip
    """What the server of a page's address answers.

    Args:
        url: the page's address.
        path: what is asked for.
        request: sent as JSON; bytes are sent as they are. Default: None, nothing is sent.
        token: in place of the address's own; "" for none.
        headers: beside, or in place of, the usual ones.
        method: in place of GET, or of POST where something is sent.
    """
    address = urlsplit(url)
    own = address.query.removeprefix("token=")
    query = own if token is None else token
    content = request if request is None or isinstance(request, bytes) else json.dumps(request)
    connection = HTTPConnection(address.hostname, address.port, timeout=30)
    connection.request(
        method or ("GET" if request is None else "POST"),
        f"{path}?token={query}" if query else path,
        content,
        headers or {},
    )
    response = connection.getresponse()
    answer = Answer(response.status, dict(response.headers), response.read())
    connection.close()
    return answer
