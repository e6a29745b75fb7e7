"""The documents are true: their code runs, their links lead somewhere, their numbers come from saved results."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Python and shell blocks in their order; Python blocks without a shell block between them are one script."""
    found: list[tuple[str, str]] = []
    for kind, body in re.findall(r"```(python|sh)\n(.*?)```", page.read_text(), re.S):
        if kind == "python" and found and found[-1][0] == kind:
            found[-1] = kind, found[-1][1] + body
        else:
            found.append((kind, body))
    return found


TUTORIALS = [*sorted(ROOT.glob("docs/tutorials/*.md")), ROOT / "docs/torchrec.md", ROOT / "README.md"]
MOST_LINES = 120  # of README: one page


def test_readme_is_one_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorials_are_python(page):
    """What runs them is slow."""
    for kind, body in blocks_of(page):
        if kind == "python":
            compile(body, page.name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorial_runs(page, tmp_path):
    commands = tmp_path / "bin"  # the rowwise and the torch under test, whichever are installed
    commands.mkdir()
    for name, module in (("rowwise", "rowwise.cli.main"), ("torchrun", "torch.distributed.run")):
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (commands / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    blocks = blocks_of(page)
    assert blocks
    for kind, body in blocks:
        how = [sys.executable, "-W", "error", "-c"] if kind == "python" else ["bash", "-euo", "pipefail", "-c"]
        done = subprocess.run([*how, body], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{body}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("tool", ["readme_tables.py", "recipe_numbers.py"])
def test_numbers_come_from_saved_results(tool):
    subprocess.run([sys.executable, ROOT / "tools" / tool, "--check"], check=True)
