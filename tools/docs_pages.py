"""A hook of MkDocs that adds the pages made of code: the start page, commands, recipe keys and the Python reference.

The start page is README with its links turned; commands come from the command line's own help, recipe keys from the
types that read recipes and the comments beside their fields, the Python reference from docstrings.
"""

import ast
import inspect
import itertools
import re
import typing
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import msgspec
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
MEANINGS = {  # of keys whose fields have no comment, by key or by struct and key
    "about": "the head of the recipe: what it is and what to expect",
    "all": "changes of every table",
    "among": "the column of ids whose scores count",
    "args": "keyword arguments of the class",
    "backward": "type of the gradients that travel",
    "batch": "samples of a step",
    "beta": "smoothing of the learning rate",
    "beta1": "decay of the mean of g",
    "beta2": "decay of the mean of g * g",
    "borders": "ascending borders of the buckets",
    "bottom": "sizes of the bottom MLP",
    "bound": "half the width of the range; null: 1 / sqrt(rows)",
    "by": "which number of the scores",
    "classes": "the values, each a column of 0 and 1",
    "clip": "largest length of a row's gradient; null: none",
    "column": "the column that is read",
    "columns": "the columns that are read",
    "combine": "how the two rows become one vector",
    "count": "elements that are kept",
    "crosses": "number of cross layers",
    "data": "the rows to train, validate and test on",
    "deep": "sizes of the MLP",
    "dense": "the columns of numbers",
    "device": "where the model is",
    "dim": "columns of the table",
    "each": "changes of single tables, by name",
    "end": "the factor at the end",
    "epochs": "passes over the rows",
    "eps": "small number against division by zero",
    "evaluate": "when validation rows are scored, and early stopping",
    "file": "the file of the map",
    "forward": "type of the vectors that travel",
    "hashes": "rows of an id",
    "high": "upper limit; null: none",
    "host": "codecs inside a host",
    "ids": "the column of ids",
    "init": "initial weights",
    "initial": "sum of squares at the beginning",
    "item_dense": "columns of numbers of the item",
    "key": "the column whose hash decides; null: the place of the row",
    "l1": "L1 penalty",
    "l2": "L2 penalty",
    "list": "all tables, in place of the dataset's",
    "log": "what a run records",
    "low": "lower limit; null: none",
    "lr": "learning rate",
    "machine": "the machine that the numbers were measured on",
    "mapping": "row of each id",
    "memory_gb": "expected peak memory",
    "module": "path.py:Class",
    "momentum": "momentum",
    "n": "neighbours that are joined",
    "name": "the name",
    "network": "codecs between hosts",
    "optimizer": "the optimizer of the rows",
    "pooling": "how a bag's rows become one vector",
    "power": "the exponent",
    "rank": "rank of the cross matrices; null: full",
    "row_type": "storage of the rows",
    "rows": "rows of the table",
    "salt": "another salt is another hash",
    "save": "when checkpoints are written",
    "schedule": "factor on the learning rate; null: none",
    "scores": "the column of scores",
    "seed": "seed of all random numbers",
    "shape": "form of the decay",
    "shift": "added before",
    "shuffle": "rows in random order",
    "sizes": "sizes of each tower's MLP",
    "sparse": "the columns of ids",
    "std": "standard deviation",
    "structure": "cross layers before the MLP, or beside it",
    "tables": "changes of the dataset's tables, or all tables",
    "temperature": "divisor of the logits",
    "test": "rows to test on; null: a share of the others",
    "time_s": "expected seconds",
    "to": "the column that is made",
    "top": "sizes of the top MLP",
    "train": "batch, epochs, dense optimizer and precision",
    "unknown": "what an id outside the table or mapping becomes",
    "user_dense": "columns of numbers of the user",
    "user_features": "features of the user; all others are the item's",
    "value": "the value",
    "warmup_steps": "steps in which the factor rises from 0 to 1",
    "weight_decay": "weight decay",
    "what": "one line: what the recipe is",
    "Evaluation.batch": "samples that are scored together",
    "Sampling.column": "the column that decides which rows may go; null: all",
    "Sampling.value": "the value of rows that may go",
    "Wire.host": "wire types inside a host",
    "Wire.network": "wire types between hosts",
}
PACKAGES = ("rowwise", "rowwise.ingest", "rowwise.train", "rowwise.planner", "rowwise.recipes")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    pages = {
        "index.md": start(),
        "reference/commands.md": commands(),
        "reference/recipe.md": recipe_keys(),
        "reference/python.md": python(),
    }
    for place, content in pages.items():
        files.append(File.generated(config, place, content=content))
    return files


def start() -> str:
    """README, as a page inside docs/."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"\[([^\]]+)\]\((CONTRIBUTING\.md|LICENSE)\)", r"\1", text)


def commands() -> str:
    """Every command with its arguments and options."""
    from rowwise.cli.main import make_app

    lines = ["# Commands", "", "`rowwise COMMAND --help` says the same in the terminal.", ""]
    for name, command in leaves(typer.main.get_command(make_app()), "rowwise"):
        lines += [f"## {name}", "", *described(command.help or ""), ""]
        lines += ["| argument or option | default | meaning |", "|---|---|---|"]
        lines += [row(one) for one in command.params if one.name != "help"]
        lines.append("")
    return "\n".join(lines)


def leaves(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """The commands below a group, in order."""
    below_it = getattr(command, "commands", None)
    if below_it is None:
        yield name, command
        return
    for each, below in below_it.items():
        yield from leaves(below, f"{name} {each}")


def described(text: str) -> Iterator[str]:
    """The description, with examples as code."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        line = " ".join(paragraph.split())
        if line.startswith("Example: "):
            yield from ("```", line.removeprefix("Example: "), "```", "")
        else:
            yield from (cell(line), "")


def row(parameter: click.Parameter) -> str:
    """A line of the table of a command."""
    is_option = parameter.param_type_name == "option"
    names = ", ".join(f"`{one}`" for one in (parameter.opts if is_option else [str(parameter.name).upper()]))
    default = parameter.default() if callable(parameter.default) else parameter.default
    shown = "required" if parameter.required else "" if default in (None, False, [], ()) else f"`{default}`"
    return f"| {names} | {shown} | {cell(getattr(parameter, 'help', None) or '')} |"


def cell(text: str) -> str:
    """Text that is no markup."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def recipe_keys() -> str:
    """Every key of a recipe: type, default, meaning."""
    from rowwise.recipes.recipe import Recipe

    lines = [
        "# Recipe keys",
        "",
        "A recipe is YAML. A key that is not here is refused with the name that was meant.",
        "",
    ]
    for kind in structs(Recipe):
        config = kind.__struct_config__
        title = kind.__name__ + (f" (`{config.tag_field}: {config.tag}`)" if config.tag_field else "")
        lines += [f"## {title}", "", cell(inspect.getdoc(kind) or ""), ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        meanings = {name: one for base in reversed(kind.__mro__) for name, one in notes(base).items()}
        for field in msgspec.structs.fields(kind):
            annotation, default, meaning = meanings.get(field.name, ("", "", ""))
            meaning = meaning or MEANINGS.get(f"{kind.__name__}.{field.name}") or MEANINGS[field.name]
            shown = f"`{default}`" if default else "required"
            kinds = annotation.replace("|", "or")
            lines.append(f"| `{field.encode_name}` | `{kinds}` | {shown} | {cell(meaning)} |")
        lines.append("")
    return "\n".join(lines)


def structs(kind: type, seen: set[type] | None = None) -> Iterator[Any]:
    """The struct and those that its fields hold, each once."""
    seen = set() if seen is None else seen
    if kind in seen:
        return
    seen.add(kind)
    yield kind
    for hint in typing.get_type_hints(kind).values():
        for inner in parts(hint):
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                yield from structs(inner, seen)


def parts(hint: Any) -> Iterator[Any]:
    """The types that a type is made of."""
    yield hint
    for inner in typing.get_args(hint):
        yield from parts(inner)


def notes(kind: type) -> dict[str, tuple[str, str, str]]:
    """By field: its type, its default and the comment beside or above it."""
    try:
        source = inspect.cleandoc("\n" + inspect.getsource(kind))
    except (OSError, TypeError):
        return {}
    if not issubclass(kind, msgspec.Struct) or kind is msgspec.Struct:
        return {}
    lines, found = source.splitlines(), {}
    tree = ast.parse(source).body[0]
    for node in getattr(tree, "body", []):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = lines[node.lineno - 2].strip()
            comments = [lines[node.end_lineno - 1][node.end_col_offset :].strip()]
            comments += itertools.takewhile(lambda line: line.startswith("#"), map(str.strip, lines[node.end_lineno :]))
            if not comments[0]:
                comments = [above] if above.startswith("#") else []
            meaning = " ".join(one.removeprefix("#").strip() for one in comments)
            found[node.target.id] = (
                ast.unparse(node.annotation),
                "" if node.value is None else ast.unparse(node.value),
                meaning,
            )
    return found


def python() -> str:
    """The public names of the packages, from their docstrings."""
    lines = ["# Python", ""]
    for package in PACKAGES:
        module = import_module(package)
        lines += [f"## {package}", ""]
        for home, names in module._HOMES.items():
            lines += [f"::: {package}.{home}.{name}\n" for name in names]
    return "\n".join(lines)
