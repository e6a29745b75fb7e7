"""The documents are true: their code runs, their links lead somewhere, README's tables come from saved results."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/tutorials/*.md")), ids=lambda p: p.stem)
def test_tutorial_runs(page, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert blocks
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join(blocks))
    subprocess.run([sys.executable, "-W", "error", script], check=True)
    for commands in re.findall(r"```sh\n(.*?)```", page.read_text(), re.S):
        for line in commands.strip().splitlines():
            command = line.replace("rowwise ", f"{sys.executable} -m rowwise.cli.main ", 1)
            subprocess.run(command.split(), check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page}: {target}"


def test_readme_tables_come_from_saved_results():
    subprocess.run([sys.executable, ROOT / "tools" / "readme_tables.py", "--check"], check=True)
