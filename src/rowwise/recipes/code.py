"""Finds the user code that a recipe runs, models and transform functions, without running it or importing torch."""

import ast
from collections.abc import Iterator
from pathlib import Path

from rowwise.base.errors import SpecError
from rowwise.ingest.transform.user_function import UserFunction
from rowwise.recipes.model_configs import Model, UserModel
from rowwise.recipes.recipe import Recipe


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


def file_of(model: Model | str) -> Path | None:
    """The file of a user class; None for built-in models."""
    name = module_of(model)
    return None if name is None else split_name(name)[0]


def module_of(model: Model | str) -> str | None:
    """path.py:Class of a user class; None for built-in models."""
    if isinstance(model, str):
        return model
    return model.module if isinstance(model, UserModel) else None


def split_name(name: str) -> tuple[Path, str]:
    """Split path.py:Class, a recipe's name for a user model."""
    path, colon, class_name = name.rpartition(":")
    if not colon or not path.endswith(".py") or not class_name.isidentifier():
        raise SpecError(f"model: {name!r}", "path.py:Class, or a mapping with kind: dlrm, deepfm, dcn, wide_deep, ...")
    return Path(path), class_name


def modules_of_model(path: Path) -> dict[str, Path]:
    """The files of a model by module name: its own and local modules that it imports, transitively; none is run."""
    modules = {path.stem: path}
    queue = [path.stem]
    for name in queue:
        for imported in _imports(name, modules[name]):
            parts = imported.split(".")
            for count in range(1, 1 + len(parts)):
                part, base = ".".join(parts[:count]), path.parent.joinpath(*parts[:count])
                files = (base / "__init__.py", base.with_name(f"{base.name}.py"))
                file = next((file for file in files if file.is_file()), None)
                if file is not None and part not in modules:
                    modules[part] = file
                    queue.append(part)
    return modules


def _imports(name: str, file: Path) -> Iterator[str]:
    """Names that a module imports, relative to the folder of its model; `from x import y` gives x.y."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_bytes(), str(file))):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                parents = package[: len(package) + 1 - level] if level else []
                prefix = ".".join([*parents, *([module] if module else [])])
                yield from (f"{prefix}.{alias.name}".lstrip(".") for alias in names)
            case _:
                pass
