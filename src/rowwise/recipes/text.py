"""Reads and writes recipes as YAML: strictly, with errors that name the nearest key, and with `--set` changes.

Unlike YAML 1.1: duplicate keys are errors, `no` is a string, `1e-3` a number, and `10:20` a string, not a number in
base 60. Known limit: writing a recipe drops its comments.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import yaml
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from rowwise.base.errors import SpecError, did_you_mean
from rowwise.base.plainyaml import MAX_BYTES, NotPlainError, PlainLoader, load_yaml
from rowwise.base.textfile import parse_whole, read_text
from rowwise.recipes.recipe import Recipe

RECIPE = "recipe.yaml"  # in the folder of a run
RESOLVED = "# Every key of a recipe with the value of this run; the recipe reference says what each means."
SECTION = re.compile(r" - at `\$\.(?P<name>\w+)`$")
UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>[^`]*)`(?: - at `(?P<at>[^`]*)`)?")
SCALARS = {  # plain scalars of YAML 1.2: pattern and first characters of each type
    "bool": (r"true|false", "tf"),
    "int": (r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (r"[-+]?(?:[0-9]*\.[0-9]+|[0-9]+\.?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", "-+.0123456789"),
    "null": (r"~|null|", ["~", "n", ""]),
}


class _Loader(PlainLoader, SafeConstructor, Resolver):
    """A loader with the plain scalars of YAML 1.2."""

    # PyYAML reads this attribute of the class.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {  # noqa: RUF012
        first: [
            (f"tag:yaml.org,2002:{kind}", re.compile(f"^(?:{pattern})$"))
            for kind, (pattern, firsts) in SCALARS.items()
            if first in firsts
        ]
        for first in {letter for _, firsts in SCALARS.values() for letter in firsts}
    }


class _Line(dict[str, Any]):
    """A mapping in flow style, on one line."""


class _Dumper(yaml.CSafeDumper):
    """Sections in block style, their contents in flow style."""

    # A string is quoted if this reader or a YAML 1.1 reader would take it for another type.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {  # noqa: RUF012
        first: [
            *_Loader.yaml_implicit_resolvers.get(first, []),
            *yaml.SafeDumper.yaml_implicit_resolvers.get(first, []),
        ]
        for first in {*_Loader.yaml_implicit_resolvers, *yaml.SafeDumper.yaml_implicit_resolvers}
    }

    def ignore_aliases(self, data: Any) -> bool:
        """Repeated values are written out, without aliases."""
        return True

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        """Lists of scalars on one line, lists of mappings in block style."""
        plain = not any(isinstance(item, dict) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=plain)


def _represent_line(dumper: _Dumper, line: _Line) -> yaml.MappingNode:
    return dumper.represent_mapping("tag:yaml.org,2002:map", line, flow_style=True)


_Dumper.add_representer(_Line, _represent_line)


def parse(text: str, source: str) -> dict[str, Any]:
    """The sections of a recipe as plain data, whose keys are not checked."""
    try:
        sections = load_yaml(text, _Loader)
    except NotPlainError as error:
        raise SpecError(f"{source}: {error}") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{source}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(sections, dict):
        raise SpecError(source, "a recipe with a section `data:` that names a dataset")
    return sections


def decode(sections: Mapping[str, Any], source: str) -> Recipe:
    """The recipe; errors name the key, and for an unknown one the nearest known key."""
    # A section with all keys commented out has its defaults.
    not_empty = {key: value for key, value in sections.items() if value is not None}
    try:
        return msgspec.convert(not_empty, Recipe)
    except msgspec.ValidationError as error:
        fault = error.__cause__
        if isinstance(fault, SpecError) and fault.problem.startswith(_section_of(str(error))):
            raise SpecError(f"{source}: {fault.problem}", fault.expected, hint=fault.hint) from None
        raise SpecError(f"{source}: {_explain_error(error, sections)}") from None


def _section_of(message: str) -> str:
    """The first key of the place that an error of msgspec names."""
    match = SECTION.search(message)
    return f"{match['name']}." if match else ""


def read(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """A recipe file with changes such as "train.epochs=2"; without `name` it is named after the file."""
    try:
        text = read_text(path, MAX_BYTES)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read as a recipe: {error.strerror}") from None
    sections = parse(text, str(path))
    apply_changes(sections, changes)
    if sections.get("name") in (None, ""):
        sections["name"] = path.stem
    return decode(sections, str(path))


def write(recipe: Recipe, *, defaults: bool = False, shown: Sequence[str] = ()) -> str:
    """The recipe as YAML.

    Args:
        recipe: the recipe to write.
        defaults: write every key, also those with default values and null, so that values stay when defaults change.
        shown: keys such as "train.batch" that are written even if they have their default values.
    """
    plain, full = _to_plain(recipe, defaults), _to_plain(recipe, True)
    for section in dict.fromkeys(key.partition(".")[0] for key in shown):
        changed = plain.get(section, {})
        plain[section] = {
            k: changed.get(k, v) for k, v in full[section].items() if k in changed or f"{section}.{k}" in shown
        }
    head = f"{RESOLVED}\n" if defaults else ""
    return head + yaml.dump(
        plain, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True, default_flow_style=False
    )


def apply_changes(sections: dict[str, Any], changes: Sequence[str]) -> None:
    """Apply --set changes; raises if two set the same key."""
    by_path: dict[str, str] = {}
    for change in changes:
        path = change.partition("=")[0]
        if path in by_path:
            raise SpecError(f"--set {change}: --set {by_path[path]} is also given", "one of them")
        by_path[path] = change
        apply_change(sections, change)


def dropped_keys(path: Path, changes: Sequence[str]) -> list[str]:
    """A line for each change of a `kind` that drops keys of the recipe file."""
    sections = parse(read_text(path, MAX_BYTES), str(path))
    lines: list[str] = []
    for change in changes:
        keys = change.partition("=")[0].removesuffix(".kind").split(".")
        before = _mapping_at(sections, keys)
        apply_change(sections, change)
        after = _mapping_at(sections, keys)
        # A change that sets the whole section is meant to replace it, and needs no line.
        old_keys = [key for key, value in before.items() if value is not None]
        dropped = [key for key in old_keys if key not in after and after.keys() == {"kind"}]
        if dropped:
            kind = before.get("kind", "former kind")
            lines.append(f"--set {change} drops {', '.join(dropped)} of the recipe's {kind}")
    return lines


def _mapping_at(sections: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """A copy of the mapping at a path; empty for other values."""
    section: Any = sections
    for key in keys:
        section = _child(section, key)
    return dict(section) if isinstance(section, dict) else {}


def apply_change(sections: dict[str, Any], change: str) -> None:
    """Apply one change, such as "train.optimizer.lr=1e-3": the value is YAML, and a number indexes a list."""
    path, equals, value = change.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise SpecError(f"--set {change}", "section.key=value, such as --set train.epochs=2")
    node: Any = sections
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(node, list):
            index: Any = parse_whole(key)
            if index is None or index >= len(node):
                raise SpecError(f"--set {change}: {'.'.join(keys[:depth])} is a list of {len(node)}", "an index")
        elif isinstance(node, dict):
            index = key
        else:
            raise SpecError(f"--set {change}: {'.'.join(keys[:depth])} is {node!r}, which has no keys")
        if last:
            new = _parse_value(change, value)
            kinds = [struct.__struct_config__.tag for struct in _structs_at(Recipe, keys, None)]
            if isinstance(new, str) and new in kinds:
                new = {"kind": new}  # model=deepfm is short for model.kind=deepfm
            if isinstance(node, dict) and index == "kind" and node.get(index) != new:
                node.clear()  # its other keys belong to the old kind
            node[index] = new
            return
        # A missing or empty section begins with its defaults.
        if isinstance(node, dict) and node.get(index) is None:
            node[index] = _default_section(keys[: depth + 1])
        node = node[index]


def _default_section(keys: Sequence[str]) -> dict[str, Any]:
    """The content of a missing section: its default kind, if it has kinds."""
    kind: Any = Recipe
    value: Any = None
    for key in keys:
        value = None
        if get_origin(kind) in (dict, tuple):
            kind = get_args(kind)[1 if get_origin(kind) is dict else 0]
            continue
        fields = [f for s in _structs(kind, None) for f in msgspec.structs.fields(s) if f.encode_name == key]
        if not fields:  # decoding reports the unknown key
            return {}
        kind, value = fields[0].type, None if fields[0].required else _default(fields[0])
    config = value.__struct_config__ if isinstance(value, msgspec.Struct) else None
    return {config.tag_field: config.tag} if config and config.tag_field else {}


def _parse_value(change: str, text: str) -> Any:
    try:
        return load_yaml(text, _Loader)
    except NotPlainError as error:
        raise SpecError(f"--set {change}: {error}") from None
    except yaml.YAMLError:
        raise SpecError(f"--set {change}: {text!r} is not a YAML value", "quotes, as in \"name: 'a: b'\"") from None


def _to_plain(value: Any, defaults: bool, depth: int = 0) -> Any:
    """The value as plain data for YAML; structs become mappings, without default values unless `defaults`."""
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        fields = {config.tag_field: config.tag} if config.tag_field else {}
        for field in msgspec.structs.fields(value):
            field_value = getattr(value, field.name)
            if defaults or field_value != _default(field):
                fields[field.name] = _to_plain(field_value, defaults, depth + 1)
        return fields if depth < 2 else _Line(fields)
    if isinstance(value, Mapping):
        return {key: _to_plain(v, defaults, depth + 1) for key, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_to_plain(v, defaults, depth + 1) for v in value]
    return msgspec.to_builtins(value)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    factory = field.default_factory
    return field.default if factory is msgspec.NODEFAULT else factory()


def _explain_error(error: msgspec.ValidationError, sections: Mapping[str, Any]) -> str:
    unknown = UNKNOWN.match(str(error))
    if unknown is None:
        hint = _kinds_hint(str(error), sections) or _values_hint(str(error), sections)
        return str(error).replace("`$.", "`").replace(" in `$`", " of the recipe") + hint
    keys = _keys(unknown["at"])
    known = sorted(_fields_at(Recipe, keys, sections))
    guess = did_you_mean(unknown["field"], known)
    ending = f"; {guess}" if guess else "."
    section = f" in {'.'.join(keys).replace('.[', '[')}" if keys else ""
    return f"no key {unknown['field']!r}{section}{ending} There are {', '.join(known)}"


def _keys(at: str | None) -> list[str]:
    """The keys of a path in msgspec's errors."""
    return re.findall(r"\[(?:\.\.\.|[0-9]+)\]|[^.\[\]$]+", at or "")


def _kinds_hint(message: str, sections: Mapping[str, Any]) -> str:
    """The possible kinds of a section, for an error about a missing or wrong kind."""
    match = re.search(r"(?:missing required field `kind`|Invalid value '[^']*') - at `(?P<at>[^`]*)`", message)
    keys = _keys(match["at"]) if match else []
    keys = keys[:-1] if keys[-1:] == ["kind"] else keys
    kinds = sorted(str(s.__struct_config__.tag) for s in _structs_at(Recipe, keys, sections) if s.__struct_config__.tag)
    return f"; expected kind: {' or '.join(kinds)}" if keys and kinds else ""


def _values_hint(message: str, sections: Mapping[str, Any]) -> str:
    """The possible values of a key, for an error about an invalid one."""
    match = re.fullmatch(r"Invalid enum value .* - at `(?P<at>[^`]*)`", message, re.S)
    *section, key = _keys(match["at"]) if match else [""]
    kinds = [
        field.type
        for struct in _structs_at(Recipe, section, sections)
        for field in msgspec.structs.fields(struct)
        if field.encode_name == key
    ]
    values = [str(value) for kind in kinds for value in _values_of(kind)]
    return f"; expected {' or '.join(values)}" if values else ""


def _values_of(kind: Any) -> Iterator[Any]:
    """The values that a type lists: of literals and of enumerations."""
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    elif isinstance(kind, type) and issubclass(kind, Enum):
        yield from (member.value for member in kind)
    for inner in () if get_origin(kind) is Literal else get_args(kind):
        yield from _values_of(inner)


def _fields_at(kind: Any, keys: Sequence[str], data: Any) -> set[str]:
    """The keys of all possible structs at this path."""
    return {name for struct in _structs_at(kind, keys, data) for name in struct.__struct_encode_fields__}


def _structs_at(kind: Any, keys: Sequence[str], data: Any) -> Iterator[type[msgspec.Struct]]:
    """The possible structs at this path below the type `kind`; `data` narrows tagged unions."""
    if not keys:
        yield from _structs(kind, data)
        return
    inner = _child(data, keys[0])
    for struct in _structs(kind, data):
        for field in msgspec.structs.fields(struct):
            if field.encode_name == keys[0]:
                yield from _structs_at(field.type, keys[1:], inner)
    container = get_origin(kind)
    if container in (dict, tuple):
        yield from _structs_at(get_args(kind)[1 if container is dict else 0], keys[1:], inner)


def _child(data: Any, key: str) -> Any:
    if isinstance(data, Mapping):
        return data.get(key)
    index = parse_whole(key.strip("[]"))
    return data[index] if isinstance(data, list) and index is not None and index < len(data) else None


def _structs(kind: Any, data: Any) -> Iterator[type[msgspec.Struct]]:
    """The structs of a type; from a tagged union only the one that the data's kind names."""
    options = get_args(kind) if get_origin(kind) in (UnionType, Union) else (kind,)
    structs = [o for o in options if isinstance(o, type) and issubclass(o, msgspec.Struct)]
    tag = data.get("kind") if isinstance(data, Mapping) else None
    tagged = [s for s in structs if tag is not None and s.__struct_config__.tag == tag]
    yield from tagged or structs
