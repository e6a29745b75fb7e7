"""Loads untrusted YAML as plain data: no tags, limited depth, limited number of values.

Aliases let a few lines stand for billions of values, and PyYAML has no limits.
"""

import math
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import BaseConstructor
from yaml.resolver import BaseResolver

MAX_BYTES = 1 << 20
MAX_NODES = 200_000  # values of an alias count each time it is used
MAX_DIGITS = 40  # of a whole number
MAX_DEPTH = 50  # levels of lists and mappings


class NotPlainError(yaml.YAMLError):
    """YAML with tags, or beyond a limit."""


class PlainLoader(Composer, yaml.cyaml.CParser, BaseConstructor, BaseResolver):
    """PyYAML's loader of scalars as strings, without tags, NUL and surrogates, and with limits.

    libyaml parses; nodes are composed here, where they are counted.
    """

    def __init__(self, stream: str) -> None:
        yaml.cyaml.CParser.__init__(self, stream)
        Composer.__init__(self)
        BaseConstructor.__init__(self)
        BaseResolver.__init__(self)
        self._nodes, self._depth = 0, 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}  # values and levels of each composed node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """PyYAML's method; rejects tags, deep nesting, too many values, and cycles of aliases."""
        event = self.peek_event()
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise _yaml_error(event, f"the tag {tag!r}: expected plain values without tags")
        if self._depth >= MAX_DEPTH:
            raise _yaml_error(event, f"more than {MAX_DEPTH} nested levels: expected fewer")
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise _yaml_error(event, f"more than {MAX_NODES:,} values: expected fewer")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and not isinstance(event, yaml.AliasEvent):
            self._sizes[node] = self._measure(node, event)
        elif node is not None and node not in self._sizes:
            raise _yaml_error(event, "an alias of a value that contains it: expected values without cycles")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if key in seen:
                raise _yaml_error(key_node, f"{key!r} is given twice: expected each key once")
            seen.add(key)
        return mapping

    def _measure(self, node: yaml.Node, event: yaml.Event | None) -> tuple[int, int]:
        if isinstance(node, yaml.ScalarNode):
            _check_scalar(node)
            return 1, 0
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        sizes = [self._sizes[part] for part in parts]
        nodes, levels = 1 + sum(n for n, _ in sizes), 1 + max((d for _, d in sizes), default=0)
        if nodes > MAX_NODES or levels > MAX_DEPTH:
            raise _yaml_error(event, f"more than {MAX_NODES:,} values or {MAX_DEPTH} levels, counting aliases")
        return nodes, levels


def _check_scalar(node: yaml.ScalarNode) -> None:
    text, kind = node.value, node.tag.rpartition(":")[2]
    if any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in text):
        raise _yaml_error(node, "a text with NUL or a surrogate: expected characters")
    if kind == "int" and len(text) > MAX_DIGITS:
        raise _yaml_error(node, f"a number of {len(text)} digits: expected at most {MAX_DIGITS}")
    if kind == "float" and text.lower().strip("-+.") not in ("inf", "nan"):
        number, digits = float(text), text.lower().partition("e")[0]
        if math.isinf(number) or (number == 0 and digits.strip("-+.0")):
            raise _yaml_error(node, f"{text[:MAX_DIGITS]}: expected a number that 64 bits can hold")


def _yaml_error(event: Any, problem: str) -> NotPlainError:
    return NotPlainError(f"line {event.start_mark.line + 1}: {problem}")


def load_yaml(text: str, loader: type[PlainLoader] = PlainLoader) -> Any:
    """Load a text as plain data; raises a YAMLError for any fault."""
    if len(text) > MAX_BYTES:
        raise NotPlainError(f"more than {MAX_BYTES >> 20} MB: expected a shorter text")
    try:
        return loader(text).get_single_data()
    except ValueError as error:  # a number of thousands of digits, an invalid character
        raise NotPlainError(str(error)) from None
    except RecursionError:
        raise NotPlainError("values are nested too deeply") from None
