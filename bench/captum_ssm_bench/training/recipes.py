"""The recipes of all bundled models, and of the dictionaries of their features."""

from __future__ import annotations

from captum_ssm._names import meant
from captum_ssm.errors import OptionError

from .dictionary_recipes import DICTIONARY_RECIPES
from .dna_recipes import DNA_RECIPES
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
    **DNA_RECIPES,
}


def every_recipe() -> dict[str, Recipe]:
    """The recipes of models and dictionaries, by name."""
    return {**RECIPES, **DICTIONARY_RECIPES}


def recipe_of(name: str) -> Recipe:
    """The recipe of a bundled model or dictionary.

    Raises:
        OptionError: when there is no such recipe.
    """
    known = every_recipe()
    if name not in known:
        raise OptionError(
            f"name={name!r}: no such bundled model.{meant(name, known)} Use one of {tuple(known)}."
        )
    return known[name]
