"""YAML from anybody as plain data: no tags, few levels, and no more values than a text of that size can have.

Known limits: tags, also those of plain types.
"""

import math
from typing import Any

import yaml

MOST_BYTES = 1 << 20  # the parser takes 8 seconds for so much
MOST_NODES = 200_000  # where what an alias stands for counts each time
MOST_DIGITS = 40  # of a whole number
DEEPEST = 50  # levels of lists and mappings


class NotPlainError(yaml.YAMLError):
    """YAML that is more than plain data within bounds."""


class PlainLoader(yaml.BaseLoader):
    """Every scalar is its text, as in PyYAML's simplest loader; no tags, no NUL, no half characters, and bounds."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._begun, self._depth = 0, 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}  # of what is composed: nodes, and levels

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """One node, as PyYAML makes it, if it is within bounds."""
        event = self.peek_event()
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise _refused(event, f"the tag {tag!r}: want plain values without tags")
        if self._depth >= DEEPEST:
            raise _refused(event, f"more than {DEEPEST} levels in one another: want fewer")
        self._begun += 1
        if self._begun > MOST_NODES:
            raise _refused(event, f"more than {MOST_NODES:,} values: want fewer")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and not isinstance(event, yaml.AliasEvent):
            self._sizes[node] = self._measured(node, event)
        elif node is not None and node not in self._sizes:
            raise _refused(event, "an alias of what it is a part of: want values that end")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        made = super().construct_mapping(node, deep)
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if key in seen:
                raise _refused(key_node, f"{key!r} is given twice: want each key once")
            seen.add(key)
        return made

    def _measured(self, node: yaml.Node, event: yaml.Event) -> tuple[int, int]:
        if isinstance(node, yaml.ScalarNode):
            _check_scalar(node)
            return 1, 0
        parts = [one for pair in node.value for one in pair] if isinstance(node, yaml.MappingNode) else node.value
        sizes = [self._sizes[part] for part in parts]
        nodes, levels = 1 + sum(n for n, _ in sizes), 1 + max((d for _, d in sizes), default=0)
        if nodes > MOST_NODES or levels > DEEPEST:
            raise _refused(event, f"more than {MOST_NODES:,} values or {DEEPEST} levels, with what aliases stand for")
        return nodes, levels


def _check_scalar(node: yaml.ScalarNode) -> None:
    text, kind = node.value, node.tag.rpartition(":")[2]
    if any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in text):
        raise _refused(node, "a text with NUL or half of a character: want letters")
    if kind == "int" and len(text) > MOST_DIGITS:
        raise _refused(node, f"a number of {len(text)} digits: want at most {MOST_DIGITS}")
    if kind == "float" and text.lower().strip("-+.") not in ("inf", "nan"):
        number, digits = float(text), text.lower().partition("e")[0]
        if math.isinf(number) or (number == 0 and digits.strip("-+.0")):
            raise _refused(node, f"{text[:MOST_DIGITS]}: want a number that 64 bits can hold")


def _refused(event: Any, what: str) -> NotPlainError:
    return NotPlainError(f"line {event.start_mark.line + 1}: {what}")


def load_yaml(text: str, loader: type[yaml.BaseLoader] = PlainLoader) -> Any:
    """A text as plain data; all that is wrong with it is a YAMLError."""
    if len(text) > MOST_BYTES:
        raise NotPlainError(f"more than {MOST_BYTES >> 20} MB: want a text of at most so much")
    try:
        return yaml.load(text, loader)
    except ValueError as error:  # a number of thousands of digits, a character that there is not
        raise NotPlainError(str(error)) from None
    except RecursionError:
        raise NotPlainError("values in one another without an end in sight") from None
