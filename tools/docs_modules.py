"""What modules are for, by package: docs_modules.py [PACKAGE ...]; the first sentence of each docstring."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "rowwise"


def purpose(path: Path) -> str:
    """The first paragraph of a module's docstring, up to the end of its first sentence."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    sentence, dot, _ = paragraph.partition(". ")
    return sentence + dot.strip()


def packages() -> Iterator[Path]:
    """The package itself, for its loose modules, and all that are in it."""
    yield SOURCE
    yield from sorted(path.parent for path in SOURCE.rglob("*/__init__.py"))


def modules(names: list[str]) -> str:
    """A section a package, with a table of its modules."""
    sections = []
    for package in packages():
        name = ".".join(package.relative_to(SOURCE.parent).parts)
        if names and not any(f".{name}.".endswith(f".{wanted}.") for wanted in names):
            continue
        rows = [
            f"| `{path.stem}` | {purpose(path)} |" for path in sorted(package.glob("*.py")) if path.stem[:2] != "__"
        ]
        table = ["", "| module | what |", "|---|---|", *rows] if rows else []
        sections.append("\n".join([f"## {name}", "", purpose(package / "__init__.py"), *table]))
    if not sections:
        raise SystemExit(f"no package {' or '.join(names)}: expected one such as tables.ops")
    return "\n\n".join(sections)


if __name__ == "__main__":
    print(modules(sys.argv[1:]))
