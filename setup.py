"""The distribution's links: README.md becomes its description, with links that work elsewhere."""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent


def description(address: str) -> str:
    """Return README.md with absolute links."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    pictures = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{address}/raw/main/", text)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\1{address}/blob/main/", pictures)


settings = ConfigParser()
settings.read(HERE / "setup.cfg")
url = settings["metadata"]["url"]
pages = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
setup(
    long_description=description(url),
    project_urls={name: f"{url}/blob/main/{path}" for name, path in pages.items()},
)
