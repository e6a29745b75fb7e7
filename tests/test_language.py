"""Names and docstrings: a class name means one thing, and a docstring says something."""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src/rowwise"
FEWEST_WORDS = 4
SHORT_ON_PURPOSE: frozenset[str] = frozenset()  # docstrings that say all in fewer words


@functools.cache
def definitions():
    """Of each class, function and module its place, its name, whether it is a class, and its docstring."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        waiting = [ast.parse(path.read_text())]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Module):
                place = f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 1)}"
                found.append(
                    (place, getattr(node, "name", ""), isinstance(node, ast.ClassDef), ast.get_docstring(node))
                )
            waiting += [one for one in getattr(node, "body", ()) if isinstance(one, ast.stmt)]
            waiting += [one for one in getattr(node, "orelse", ()) if isinstance(one, ast.stmt)]
    return found


def test_no_two_classes_have_one_name():
    places = defaultdict(list)
    for place, name, is_class, _ in definitions():
        if is_class:
            places[name].append(place)
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_a_docstring_says_something():
    short = {}
    for place, _, _, said in definitions():
        if said is not None and len(said.split()) < FEWEST_WORDS and said not in SHORT_ON_PURPOSE:
            short[place] = said
    assert not short


def test_the_layer_table_names_every_module_of_a_package():
    table = (SOURCE.parents[1] / "docs/ARCHITECTURE.md").read_text()
    missing = {}
    for package in sorted(path for path in SOURCE.iterdir() if (path / "__init__.py").exists()):
        row = re.search(rf"^\| `{package.name}`.*$", table, re.MULTILINE)
        named = set(re.findall(r"`(\w+)`", row.group())) if row else set()
        modules = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
        if modules - named:
            missing[package.name] = sorted(modules - named)
    assert not missing
