"""Hooks of mkdocs: pages that are made of code, and those that lie outside `docs`.

Pages with a line `<!-- generated: NAME -->` get what NAME makes. README, CONTRIBUTING, CHANGELOG and LICENSE become
pages, and links between them and the pages of `docs` lead where they should.
"""

import importlib
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))

import docs_commands
import docs_modules
import docs_recipe

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rowwise"
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
}
LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]+)")
PAGE = "reference/python.md"
PYTHON = """# Python API

What each package exports, from its docstrings. Names are imported from the package that heads the page:
`from rowwise.planning.planner import make_plan`. What is not listed here may change without notice.

| package | what |
|---|---|
"""


def public_packages() -> dict[str, Any]:
    """Those with `__all__`, by name. Others are not imported: some load torch."""
    homes = [path.parent for path in sorted(SOURCE.rglob("__init__.py")) if "__all__" in path.read_text()]
    names = [".".join(home.relative_to(SOURCE.parent).parts) for home in homes]
    return {name: importlib.import_module(name) for name in names}


def python_pages() -> dict[str, str]:
    """A page a package, and one that lists them."""
    index, pages = PYTHON, {}
    for name, package in public_packages().items():
        about = (package.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        page = f"{name.replace('.', '-')}.md"
        index += f"| [`{name}`]({page}) | {about} |\n"
        directives = "\n\n".join(f"::: {name}.{one}" for one in package.__all__)
        pages[f"reference/{page}"] = f"# {name}\n\n{about}\n\n{directives}\n"
    return {PAGE: index} | pages


GENERATED = {
    "commands": docs_commands.reference,
    "recipe": docs_recipe.reference,
    "modules": lambda: docs_modules.modules([]),
}


def moved(text: str, source: str, page: str) -> str:
    """Links of a file of the repository, from where its page is in the site."""

    def to(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        if target in OUTSIDE:
            there = OUTSIDE[target]
        elif target == "docs/decisions":
            there = "decisions/index.md"
        else:
            there = target.removeprefix("docs/")
        return match[1] + posixpath.relpath(there, posixpath.dirname(page) or ".")

    return LINK.sub(to, text)


def decision_pages() -> list[str]:
    return [f"decisions/{path.name}" for path in sorted((ROOT / "docs/decisions").glob("0*.md"))]


def on_config(config: Any) -> Any:
    """Lists of pages in the navigation that nobody has to keep."""
    lists = {"decisions/index.md": decision_pages(), "reference/python.md": [p for p in python_pages() if p != PAGE]}

    def longer(items: list[Any]) -> list[Any]:
        for item in items:
            for title, value in item.items() if isinstance(item, dict) else ():
                item[title] = longer(value) if isinstance(value, list) else [value, *lists.get(value, [])]
                if len(item[title]) == 1 and not isinstance(value, list):
                    item[title] = value
        return items

    config.nav = longer(config.nav)
    return config


def on_files(files: Any, config: Any) -> Any:
    for source, page in OUTSIDE.items():
        text = (ROOT / source).read_text()
        content = f"# License\n\n```text\n{text}```\n" if source == "LICENSE" else moved(text, source, page)
        files.append(File.generated(config, page, content=content))
    for page, content in python_pages().items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    if uri not in OUTSIDE.values():
        markdown = moved(markdown, f"docs/{uri}", uri)
    return re.sub(r"<!-- generated: (\w+) -->", lambda match: GENERATED[match[1]](), markdown)
