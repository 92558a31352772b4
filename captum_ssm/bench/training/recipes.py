"""The recipes of all bundled models."""

from __future__ import annotations

from ...errors import OptionError
from .image_recipes import IMAGE_RECIPES
from .language_recipes import ANSWER_RECIPES, FURTHER_RECIPES, LANGUAGE_RECIPES, ROLE_RECIPES
from .recipe import Recipe
from .text_recipes import TEXT_RECIPES

#: By the name of the bundled model.
RECIPES: dict[str, Recipe] = {
    **LANGUAGE_RECIPES,
    **FURTHER_RECIPES,
    **ROLE_RECIPES,
    **ANSWER_RECIPES,
    **IMAGE_RECIPES,
    **TEXT_RECIPES,
}


def recipe_of(name: str) -> Recipe:
    """The recipe of a bundled model.

    Raises:
        OptionError: when there is no such model.
    """
    if name not in RECIPES:
        raise OptionError(f"name={name!r}: no such bundled model. Use one of {tuple(RECIPES)}.")
    return RECIPES[name]
