"""User code that a recipe runs, from model files and transform functions, found without running any of it."""

from pathlib import Path

from rowwise.ingest.transform.user_function import UserFunction as OwnTransform
from rowwise.recipes.recipe import Recipe, UserModel
from rowwise.recipes.user_model_name import split_name


def find_foreign_code(recipe: Recipe, source: Path) -> tuple[str, ...]:
    """Descriptions of code outside the folder of the recipe's file; code inside came with the recipe."""
    folder = source.resolve().parent
    away = [path for path in _code_files(recipe) if not path.resolve().is_relative_to(folder)]
    within = [one.function for one in recipe.transforms if isinstance(one, OwnTransform) and one.source]
    return (
        *(f"{path}, which is not beside {source}" for path in dict.fromkeys(away)),
        *(f"the text of {name} that is written into {source}" for name in within),
    )


def _code_files(recipe: Recipe) -> list[Path]:
    model = UserModel(module=recipe.model) if isinstance(recipe.model, str) else recipe.model
    models = [split_name(model.module)[0]] if isinstance(model, UserModel) else []
    own = [OwnTransform(function=one) if isinstance(one, str) else one for one in recipe.transforms]
    return models + [Path(one.file) for one in own if isinstance(one, OwnTransform) and not one.source]
