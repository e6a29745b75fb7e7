"""User code that a recipe runs, from model files and transform functions, found without running any of it."""

from pathlib import Path

from rowwise.ingest.transform.user_function import UserFunction
from rowwise.recipes.recipe import Recipe
from rowwise.recipes.user_model_name import file_of


def find_foreign_code(recipe: Recipe, source: Path) -> tuple[str, ...]:
    """Descriptions of code that is not beside the recipe's file: files in other folders, and text in the recipe."""
    folder = source.resolve().parent
    files = [path for path in _code_files(recipe) if not path.resolve().is_relative_to(folder)]
    functions = [t.function for t in recipe.transforms if isinstance(t, UserFunction) and t.source]
    return (
        *(f"{path}, which is not beside {source}" for path in dict.fromkeys(files)),
        *(f"the text of {name} that is written into {source}" for name in functions),
    )


def _code_files(recipe: Recipe) -> list[Path]:
    file = file_of(recipe.model)
    transforms = [UserFunction(function=t) if isinstance(t, str) else t for t in recipe.transforms]
    return [
        *([] if file is None else [file]),
        *(Path(t.file) for t in transforms if isinstance(t, UserFunction) and not t.source),
    ]
