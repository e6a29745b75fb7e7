"""Definitions of src/rowwise that nothing reaches: no command, no public name, no benchmark, no document.

A definition is reached if code that is reached names it. Functions, classes and constants of a module are followed
through imports; methods are known by their names alone, so one that has a namesake can be missed.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTSIDE = ("benchmarks", "tools", "examples")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

Mention = tuple[str, str]  # (module, global name), or ("", name) of an attribute


@dataclass
class Definition:
    """A global name of a module, or a member of a class."""

    home: str  # its module
    name: str
    mentions: set[Mention]
    owner: "Definition | None" = None  # the class of a member
    always: bool = False  # reached as soon as its class is

    def __str__(self) -> str:
        return f"{self.home}.{self.name}"


class Module:
    """What one file defines, and what it mentions outside of any definition."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.tree = ast.parse(text)
        self.imports: dict[str, Mention] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                self.imports |= {a.asname or a.name: (node.module, a.name) for a in node.names}
            elif isinstance(node, ast.Import):
                self.imports |= {a.asname: (a.name, "") for a in node.names if a.asname}
        self.globals: dict[str, list[Definition]] = {}
        self.members: list[Definition] = []
        self.roots: set[Mention] = set()
        for node in _statements(self.tree.body):
            self._define(node)

    def _define(self, node: ast.stmt) -> None:
        names = list(_names(node))
        if not names or "__all__" in names or (isinstance(node, FUNCTIONS) and node.decorator_list):
            self.roots |= self.mentions_of(node)
        if isinstance(node, ast.ClassDef):
            self._class(node)
        else:
            for name in names:
                self._add(name, node, self.mentions_of(node))

    def _add(self, name: str, node: ast.stmt, mentions: set[Mention]) -> Definition:
        made = Definition(self.name, name, mentions - {(self.name, name)})
        self.globals.setdefault(name, []).append(made)
        return made

    def _class(self, node: ast.ClassDef) -> None:
        head = [*node.bases, *node.decorator_list, *(k.value for k in node.keywords)]
        own = self._add(node.name, node, set().union(*(self.mentions_of(e) for e in head)) if head else set())
        foreign = any(ast.unparse(base).split(".")[0] not in PLAIN | self._ours() for base in node.bases)
        for child in node.body:
            names = list(_names(child))
            if not names or isinstance(child, ast.AnnAssign):  # fields are written to files, too, by whole values
                own.mentions |= self.mentions_of(child)
                continue
            for name in names:
                mentions = self.mentions_of(child) - {("", name)}
                always = foreign or name.startswith("__")
                self.members.append(Definition(self.name, f"{node.name}.{name}", mentions, own, always))

    def _ours(self) -> set[str]:
        mine = {name for name, (module, _) in self.imports.items() if module.startswith("rowwise")}
        return mine | {n.name for n in self.tree.body if isinstance(n, ast.ClassDef)}

    def mentions_of(self, node: ast.AST) -> set[Mention]:
        """The names in a piece of code."""
        found: set[Mention] = set()
        for n in ast.walk(node):
            if isinstance(n, ast.Name):
                found.add(self.imports.get(n.id, (self.name, n.id)))
            elif isinstance(n, ast.Attribute):
                found.add(("", n.attr))
                if isinstance(n.value, ast.Name) and n.value.id in self.imports:
                    module, name = self.imports[n.value.id]
                    found.add((f"{module}.{name}".rstrip("."), n.attr))
            elif isinstance(n, ast.MatchClass):
                found |= {("", name) for name in n.kwd_attrs}
            elif isinstance(n, ast.Constant) and isinstance(n.value, str) and " " not in n.value.replace(", ", ","):
                for word in re.findall(r"[A-Za-z_]\w*", n.value):  # a type, or what `getattr` is given
                    found |= {("", word), self.imports.get(word, (self.name, word))}
        return found


PLAIN = {"Value", "Protocol", "Exception", "Generic", "Struct"}


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Of a module, with those in `if`."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            yield node


def _names(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Assign():
            for target in node.targets:
                yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))


def modules_under(folder: Path, top: Path) -> list[Module]:
    found = []
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(top).with_suffix("").parts).removesuffix(".__init__")
        found.append(Module(name, path.read_text()))
    return found


def code_of_documents() -> Iterator[Module]:
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.S):
            with suppress(SyntaxError):  # a line out of a longer text
                yield Module(path.name, block)


class Walk:
    """From what is used outside of any definition to all definitions that this leads to."""

    def __init__(self, source: dict[str, Module]) -> None:
        self.source = source
        self.seen: set[Mention] = set()
        self.reached: set[int] = set()
        self.members = [member for module in source.values() for member in module.members]
        self.named: dict[str, list[Definition]] = defaultdict(list)
        self.inside: dict[int, list[Definition]] = defaultdict(list)
        for member in self.members:
            self.named[member.name.split(".")[1]].append(member)
            self.inside[id(member.owner)].append(member)

    def go(self, mentions: Iterable[Mention]) -> None:
        waiting = list(mentions)
        while waiting:
            mention = waiting.pop()
            if mention not in self.seen:
                self.seen.add(mention)
                waiting += self._follow(*mention)

    def left(self) -> list[Definition]:
        every = [one for module in self.source.values() for group in module.globals.values() for one in group]
        found = [one for one in every + self.members if id(one) not in self.reached]
        return [one for one in found if not one.name.startswith("__") and not one.name.endswith("__")]

    def keep(self, name: str) -> None:
        """Go on from a definition, as if it were used."""
        home, _, last = name.rpartition(".")
        self.go([(home, last), ("", last)])

    def _follow(self, home: str, name: str) -> Iterator[Mention]:
        if not home:
            for member in self.named[name]:
                if id(member.owner) in self.reached:
                    yield from self._reach(member)
        elif home in self.source:
            module = self.source[home]
            for one in module.globals.get(name, ()):
                yield from self._reach(one)
            if name in module.imports and name not in module.globals:
                yield module.imports[name]

    def _reach(self, one: Definition) -> Iterator[Mention]:
        if id(one) in self.reached:
            return
        self.reached.add(id(one))
        yield from one.mentions
        for member in self.inside[id(one)]:
            if member.always or ("", member.name.split(".")[1]) in self.seen:
                yield from self._reach(member)


def walked() -> Walk:
    """From commands, public names, benchmarks and documents."""
    source = {module.name: module for module in modules_under(ROOT / "src", ROOT / "src")}
    walk = Walk(source)
    walk.go(("rowwise", name) for name in source["rowwise"].imports)
    for module in source.values():
        walk.go(module.roots)
    for module in [*code_of_documents(), *(one for folder in OUTSIDE for one in modules_under(ROOT / folder, ROOT))]:
        walk.go(module.imports.values())
        walk.go(mention for node in module.tree.body for mention in module.mentions_of(node))
    return walk
