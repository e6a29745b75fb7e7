"""The reference of commands, from the commands themselves."""

import re
import types
import typing
from pathlib import Path
from typing import Any

import typer

from rowwise.cli.main import make_app

VALUES = {int: "N", float: "X", Path: "PATH", str: "TEXT"}


def panels() -> dict[str, dict[str, Any]]:
    """Every command by its full name, in the panels of `rowwise --help`."""
    found: dict[str, dict[str, Any]] = {}
    for word, command in typer.main.get_command(make_app()).commands.items():
        inside = getattr(command, "commands", {})
        named = {f"rowwise {word} {name}": one for name, one in inside.items()} or {f"rowwise {word}": command}
        found.setdefault(command.rich_help_panel, {}).update(named)
    return found


def all_commands() -> dict[str, Any]:
    return {name: command for commands in panels().values() for name, command in commands.items()}


def value_of(hint: Any) -> str:
    """What an option takes, by its type; nothing for a flag."""
    if isinstance(hint, types.UnionType):
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
    if typing.get_origin(hint) is list:
        hint = typing.get_args(hint)[0]
    return VALUES.get(hint, "")


def escaped(text: str) -> str:
    """In a cell of a table: `<run>` is not markup, and a bar ends no cell."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


def reference() -> str:
    """Markdown."""
    parts = []
    for panel, commands in panels().items():
        parts += [f"## {panel}\n", *(section(name, command) for name, command in commands.items())]
    return "\n".join(parts)


def section(name: str, command: Any) -> str:
    """What a command does, its examples and its options."""
    said = command.help or ""
    examples = re.findall(r"^Example: (.*)$", said, re.M)
    prose = re.sub(r"^Example: .*\n?", "", said, flags=re.M).strip()
    hints = typing.get_type_hints(command.callback)
    places = [p.name.upper() + ("..." if p.nargs != 1 else "") for p in command.params if p.opts[0][0] != "-"]
    parts = [f"### {name}\n", f"    {name} {' '.join([*places, '[OPTIONS]'])}\n", prose.replace("<", "&lt;") + "\n"]
    if examples:
        parts += ["Examples:\n", "\n".join(f"    {example}" for example in examples) + "\n"]
    rows = []
    for one in command.params:
        if one.name == "help":
            continue
        value = getattr(one, "metavar", None) or value_of(hints.get(one.name))
        option = one.opts[0][0] == "-"
        flag = ", ".join([*one.opts, *one.secondary_opts]) + (f" {value}" if value else "")
        meaning = (getattr(one, "help", None) or "") + (" May be given several times." if one.multiple else "")
        rows.append(f"| `{flag if option else one.name.upper()}` | {escaped(meaning)} |")
    if rows:
        parts.append("\n".join(["| argument or option | meaning |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)
