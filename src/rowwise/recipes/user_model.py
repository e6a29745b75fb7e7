"""Imports the user's model class, which a recipe names as path.py:Class."""

import importlib.util
import sys
from typing import Any

from torch import nn

from rowwise.errors import SpecError
from rowwise.recipes.user_model_name import split_name


def load_class(name: str) -> type[nn.Module]:
    path, class_name = split_name(name)
    if not path.is_file():
        raise SpecError(f"model: {path}: no such file: want path.py:Class")
    module_name = f"rowwise_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look modules up here
    sys.path.insert(0, str(path.parent))  # so that it can import modules of its folder
    try:
        # From its text, not a cached compilation beside it, which a digest of the text would not cover.
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except (ImportError, SyntaxError) as error:
        raise SpecError(f"model: {path} cannot be imported: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    model_class: Any = getattr(module, class_name, None)
    if not isinstance(model_class, type) or not issubclass(model_class, nn.Module):
        classes = {name: x for name, x in vars(module).items() if isinstance(x, type) and issubclass(x, nn.Module)}
        names = [name for name, x in classes.items() if x is not nn.Module]
        raise SpecError(f"model: {path} has no torch module {class_name!r}; it has {', '.join(names) or 'none'}")
    return model_class
