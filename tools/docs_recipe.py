"""The reference of recipes, from the types that read them and the comments beside their fields."""

import ast
import enum
import functools
import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from field_comments import comments_of

from rowwise.recipes.recipe import Recipe

NAMES = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "`true` or `false`",
    type(None): "`null`",
    Any: "any value",
}
MEANINGS = {  # of keys without a comment: "field" of any class, or "Class.field"
    "About.machine": "the processor that the numbers were measured on",
    "About.memory_gb": "peak memory of the run",
    "About.time_s": "wall time of the run",
    "About.what": "model and data in a few words",
    "AutoIntConfig.deep": "widths of the layers beside the attention; empty: none",
    "Bucketize.borders": "rising numbers; K borders make K + 1 buckets",
    "Codecs.backward": "type of the gradients on the wire",
    "Codecs.forward": "type of the vectors on the wire",
    "ComputeScore.among": "a column of ids: only the scores of these count",
    "ComputeScore.by": "which number is made of the scores",
    "Constant.value": "the value of every weight",
    "Data.test": "`parquet:PATH` or `csv:PATH`; `null`: that of the dataset, or a share of the training rows",
    "DcnConfig.crosses": "number of cross layers",
    "DcnConfig.rank": "rank of the low-rank cross matrices; `null`: full matrices",
    "DcnConfig.structure": "deep layers after the cross layers, or beside them",
    "DhenConfig.top": "widths of the layers over the last vectors",
    "DienConfig.top": "widths of the layers over all vectors",
    "DinConfig.top": "widths of the layers over all vectors",
    "DlrmConfig.bottom": "widths of the layers over dense numbers",
    "DlrmConfig.top": "widths of the layers over the interaction",
    "DoubleHashIds.hashes": "rows that are added up for an id, 2 to 8",
    "DoubleHashIds.rows": "rows of the table",
    "Evaluation.batch": "rows of a batch of evaluation",
    "Fill.value": "stands for what is missing",
    "FirstX.count": "elements that are kept",
    "Ftrl.beta": "in the units of a gradient; see above",
    "Ftrl.l1": "L1 penalty; makes weights exactly 0",
    "Ftrl.l2": "L2 penalty",
    "HashIds.rows": "rows of the table",
    "MapId.mapping": "the number of each id",
    "MapId.unknown": "what becomes of other ids: left out, an error, or this number",
    "MaskNetConfig.top": "widths of the layers over the blocks",
    "MmoeConfig.experts": "number of experts",
    "NGram.n": "ids that make one",
    "Onehot.borders": "of the buckets, instead of classes",
    "Onehot.classes": "the values that have a number each",
    "QuotientRemainderIds.combine": "how the two rows become one vector",
    "QuotientRemainderIds.rows": "rows of both parts together, at most",
    "Recipe.seed": "of initial weights, of the order of rows, and of all that is drawn at random",
    "Sampling.column": "only rows that hold `value` in this column are drawn; `null`: all rows",
    "Sampling.key": "rows with the same value in this column stay or go together",
    "Sampling.value": "of `column`",
    "Schedule.end": "the factor at the end of the decay",
    "Schedule.shape": "of the decay",
    "Schedule.warmup_steps": "steps in which the rate rises from 0",
    "StoredIds.file": "the path of the map",
    "Training.batch": "rows of the global batch, on all ranks together",
    "Training.device": "of dense parameters and tables; GPUs were never run",
    "Training.epochs": "passes over the training rows",
    "Training.shuffle": "rows in a seeded random order; false: in the order of the files",
    "TwoTowerConfig.item_dense": "columns of numbers of the item's tower",
    "TwoTowerConfig.user_dense": "columns of numbers of the user's tower",
    "TwoTowerConfig.user_features": "features of the user's tower",
    "UserModel.args": "further arguments of the class, by name",
    "UserModel.module": "`path.py:Class`",
    "WukongConfig.top": "widths of the layers over the last vectors",
    "XDeepFmConfig.deep": "widths of the layers beside the products",
    "beta1": "decay of the mean of gradients",
    "beta2": "decay of the mean of squared gradients",
    "bound": "weights are drawn from -bound to bound; `null`: 1 / sqrt(rows)",
    "clip": "longest gradient of a row (L2 norm); longer ones are shortened; `null`: none",
    "column": "the column of the data",
    "columns": "the two columns",
    "deep": "widths of the deep layers",
    "dim": "columns: the length of a row",
    "eps": "added to the denominator",
    "expert_sizes": "widths of the layers of an expert",
    "high": "the largest number that stays; `null`: any",
    "ids": "the column of ids",
    "init": "how weights are drawn",
    "initial": "of the sum of squares",
    "low": "the smallest number that stays; `null`: any",
    "lr": "learning rate",
    "momentum": "share of the last update in the next one",
    "name": "of the table, in plans, checkpoints and messages",
    "optimizer": "of the rows",
    "pooling": "how the rows of a bag become one vector",
    "power": "the lambda of the transform",
    "row_type": "how a row is stored",
    "rows": "of the table",
    "salt": "another salt makes another hash",
    "scores": "the column of their scores",
    "seed": "of the random numbers or hashes",
    "shift": "added to the number before",
    "std": "standard deviation",
    "to": "what the result is called",
    "unknown": "what happens to an id outside the table: an error, or its last row stands for it",
    "weight_decay": "L2 penalty",
}


@functools.cache
def comments_in(path: Path) -> dict[tuple[str, str], str]:
    """By class and field."""
    source = path.read_text()
    said = comments_of(source)
    found = {}
    for kind in ast.walk(ast.parse(source)):
        if isinstance(kind, ast.ClassDef):
            for field in kind.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.lineno in said:
                    found[kind.name, field.target.id] = said[field.lineno]
    return found


def comment_of(kind: type, field: str) -> str:
    """Beside the field, in the class or in one that it is made of."""
    for one in kind.__mro__:
        if issubclass(one, msgspec.Struct) and one.__module__.startswith("rowwise"):
            said = comments_in(Path(inspect.getfile(one))).get((one.__name__, field))
            if said:
                return said
    return ""


def structs_in(hint: Any) -> Iterator[type]:
    """Those that a type is made of, in their order."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for part in typing.get_args(hint):
        yield from structs_in(part)


def hints_of(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def keys_of(kind: type) -> list[msgspec.structs.FieldInfo]:
    return list(msgspec.structs.fields(kind))


@functools.cache
def sections() -> dict[type, list[str]]:
    """Every struct that a recipe can hold, with the keys that hold it. Kinds of one key follow one another."""
    found: dict[type, list[str]] = {}

    def visit(kind: type, path: str) -> None:
        hints = hints_of(kind)
        for field in keys_of(kind):
            hint = hints[field.name]
            deeper = f"{path}.{field.encode_name}".lstrip(".")
            deeper += {dict: ".NAME", tuple: "[]"}.get(typing.get_origin(hint), "")
            inner = list(structs_in(hint))
            new = [one for one in inner if one not in found]
            for one in inner:
                found.setdefault(one, []).append(deeper)
            for one in new:
                visit(one, deeper)

    found[Recipe] = [""]
    visit(Recipe, "")
    return found


def tag_of(kind: type) -> str | None:
    config = kind.__struct_config__
    return str(config.tag) if config.tag_field else None


def anchor_of(kind: type) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind.__name__).lower()


def shown(hint: Any) -> str:
    """A type in words."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint in NAMES:
        return NAMES[hint]
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(shown(part) for part in parts))
    if origin is tuple:
        return f"list of {shown(parts[0])}" if parts[-1] is Ellipsis else " and ".join(map(shown, parts))
    if origin is dict:
        return f"names, each with {shown(parts[1])}"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " or ".join(f"`{one.value}`" for one in hint)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return f"[{tag_of(hint) or 'section'}](#{anchor_of(hint)})"
    return f"`{getattr(hint, '__name__', hint)}`"


def default_of(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, msgspec.Struct):
        tag = tag_of(type(value))
        return f"`{tag}`" if tag else "its defaults"
    return f"`{msgspec.json.encode(value).decode()}`"


def first_sentence(kind: type) -> str:
    return re.split(r"(?<=\.)\s", inspect.cleandoc(kind.__doc__ or "").replace("\n", " "))[0]


def meaning_of(kind: type, field: msgspec.structs.FieldInfo, hint: Any) -> str:
    """The comment; else what is said here; else what the section is."""
    inner = list(structs_in(hint))
    section = first_sentence(inner[0]) if len(inner) == 1 else ""
    said = comment_of(kind, field.name)
    if said.startswith("None:"):
        said = f"{section} {said}"
    said = said or section or MEANINGS.get(f"{kind.__name__}.{field.name}", MEANINGS.get(field.name, ""))
    return re.sub(r"\bNone:", "`null`:", said).strip()


def undocumented() -> list[str]:
    """Keys without a meaning."""
    return [
        f"{kind.__name__}.{field.name}"
        for kind in sections()
        for field in keys_of(kind)
        if not meaning_of(kind, field, hints_of(kind)[field.name])
    ]


def superfluous() -> list[str]:
    """Meanings here of what has a comment, or is not there."""
    bare = [(kind.__name__, f.name) for kind in sections() for f in keys_of(kind) if not comment_of(kind, f.name)]
    known = {f"{kind}.{field}" for kind, field in bare} | {field for _, field in bare}
    return sorted(MEANINGS.keys() - known)


def table_of(kind: type) -> str:
    rows = []
    for field in keys_of(kind):
        hint = hints_of(kind)[field.name]
        cells = (f"`{field.encode_name}`", shown(hint), default_of(field), meaning_of(kind, field, hint))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if not rows:
        return "No keys but `kind`.\n"
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def reference() -> str:
    """Markdown: a heading for each key that holds keys; below it, one for each of its kinds."""
    parts: list[str] = []
    last = None
    for kind, (path, *others) in sections().items():
        level, tag, anchor = "##" if "." not in path else "###", tag_of(kind), f"{{#{anchor_of(kind)}}}"
        if tag and path != last:
            parts.append(f"{level} {path}\n\n`kind` says which of these it is; the other keys depend on it.\n")
        heading = f"{level}# kind: {tag} {anchor}" if tag else f"{level} {path or 'Top level'} {anchor}"
        parts += [f"{heading}\n", f"{inspect.cleandoc(kind.__doc__ or '')}\n"]
        others = [f"`{other}`" for other in dict.fromkeys(others) if other != path]
        if others:
            parts.append(f"Also: {', '.join(others)}.\n")
        parts.append(table_of(kind))
        last = path
    return "\n".join(parts)
