"""Imports the user's model class, which a recipe names as path.py:Class.

The file may import its neighbours: modules and packages of its folder. All are read before the first one runs. They are
modules of a package that is named by the digest of their texts: modules of two models may have the same names, and do
not import each other. Cached bytecode beside a file is not used, as the digest does not cover it.
"""

import builtins
import hashlib
import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, final

from torch import nn

from rowwise.base.errors import SpecError
from rowwise.recipes.code import modules_of_model, split_name


class _Source(NamedTuple):
    file: Path
    text: bytes


PREFIX = "rowwise_own_"  # of package names
_SOURCES: dict[str, _Source] = {}  # by module name


def load_class(name: str) -> type[nn.Module]:
    path, class_name = split_name(name)
    if not path.is_file():
        raise SpecError(f"model: {path}: no such file", "path.py:Class")
    try:
        module = importlib.import_module(f"{_add_package(path)}.{path.stem}")
    except (ImportError, SyntaxError) as error:
        raise SpecError(f"model: {path} cannot be imported: {error}") from error
    model_class: Any = getattr(module, class_name, None)
    if not isinstance(model_class, type) or not issubclass(model_class, nn.Module):
        classes = {name: x for name, x in vars(module).items() if isinstance(x, type) and issubclass(x, nn.Module)}
        names = [name for name, x in classes.items() if x is not nn.Module]
        raise SpecError(f"model: {path} has no torch module {class_name!r}; it has {', '.join(names) or 'none'}")
    return model_class


def _add_package(path: Path) -> str:
    """Read the files of a model as the modules of a package."""
    sources = {name: _Source(file, file.read_bytes()) for name, file in modules_of_model(path).items()}
    total = hashlib.sha256()
    for name, (file, text) in sorted(sources.items()):
        total.update(f"{name} {file.absolute()} {len(text)} ".encode() + text)
    package = PREFIX + total.hexdigest()[:32]
    _SOURCES.update({f"{package}.{name}": source for name, source in sources.items()})
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    return package


@final
class _Finder(MetaPathFinder):
    """Finds the modules of models, and their namespace packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        source = _SOURCES.get(fullname)
        if source is not None:
            folders = [] if source.file.name == "__init__.py" else None
            return spec_from_file_location(
                fullname, source.file, loader=_TextLoader(fullname, source), submodule_search_locations=folders
            )
        if fullname.startswith(PREFIX) and any(name.startswith(f"{fullname}.") for name in _SOURCES):
            return ModuleSpec(fullname, None, is_package=True)
        return None


_FINDER = _Finder()


@final
class _TextLoader(SourceLoader):
    """Runs the text of a module, whose imports look in its model's folder first."""

    def __init__(self, name: str, source: _Source) -> None:
        self._package, self._source = name.partition(".")[0], source

    def get_filename(self, fullname: str) -> str:
        return str(self._source.file)

    def get_data(self, path: str) -> bytes:  # without `path_stats` a loader ignores cached bytecode
        return self._source.text

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": self._import}
        super().exec_module(module)

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = f"{self._package}.{name.partition('.')[0]}"
        if level or _FINDER.find_spec(top, None) is None:
            return builtins.__import__(name, globals, locals, fromlist, level)
        module = builtins.__import__(f"{self._package}.{name}", globals, locals, fromlist or (), 0)
        return module if fromlist else sys.modules[top]
