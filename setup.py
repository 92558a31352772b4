"""README.md becomes the description of the distribution, with links that work away from here."""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent


def description() -> str:
    """Return README.md with absolute links, to the address in setup.cfg."""
    settings = ConfigParser()
    settings.read(HERE / "setup.cfg")
    address = settings["metadata"]["url"]
    text = (HERE / "README.md").read_text(encoding="utf-8")
    pictures = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{address}/raw/main/", text)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\1{address}/blob/main/", pictures)


setup(long_description=description())
