"""The documents are true: their code runs, their links lead somewhere, their numbers come from saved results."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import lab
import pytest
import warm

ROOT = Path(__file__).parents[1]
TOPS = ("src", "tests", "benchmarks", "examples", "tools", "cmake", "docs")
THEIRS = {"modules/mc_modules.py", "modules/hash_mc_modules.py"}  # files of TorchRec
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
OF_TORCHREC = "# TorchRec\n"  # a block that begins so needs TorchRec


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Python and shell blocks in their order; Python blocks without a shell block between them are one script."""
    found: list[tuple[str, str]] = []
    for kind, body in re.findall(r"```(python|sh)\n(.*?)```", page.read_text(), re.S):
        if body.startswith(OF_TORCHREC) and find_spec("torchrec") is None:
            continue
        if kind == "python" and found and found[-1][0] == kind:
            found[-1] = kind, found[-1][1] + body
        else:
            found.append((kind, body))
    return found


WITH_CODE = [page for page in PAGES if "decisions" not in page.parts and blocks_of(page)]  # decisions may sketch


def test_pages_with_code_are_known():
    """Those that people copy from."""
    names = {name_of(page) for page in WITH_CODE}
    assert {"README.md", "docs/faq.md", "docs/migration.md", "docs/tutorials/training.md"} <= names


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_is_python(page):
    """What runs it is slow."""
    for kind, body in blocks_of(page):
        if kind == "python":
            compile(body, page.name, "exec")


def prepare_log(folder: Path) -> None:
    """The log that README speaks of: that of the tutorial."""
    kind, body = blocks_of(ROOT / "docs/tutorials/your-own-csv.md")[0]
    assert kind == "python"
    subprocess.run([sys.executable, "-c", body], cwd=folder, check=True)
    shutil.copy(folder / "clicks.csv", folder / "tomorrow.csv")


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_runs(page, tmp_path):
    if page.name == "network.md" and lab.missing():
        pytest.skip(f"no lab: {lab.missing()}")
    commands = tmp_path / "bin"  # the rowwise and the torch under test, whichever are installed
    commands.mkdir()
    torchrun = f"{sys.executable} -m torch.distributed.run"
    for name, command in (("rowwise", shlex.join(warm.command())), ("torchrun", torchrun)):
        (commands / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    (commands / "lab").write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/lab.py "$@"\n')
    for command in commands.iterdir():
        command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    if page.name == "README.md":
        prepare_log(tmp_path)
    for kind, body in blocks_of(page):
        warnings = "ignore" if OF_TORCHREC in body else "error"  # TorchRec warns when it is imported
        how = [sys.executable, "-W", warnings, "-c"] if kind == "python" else ["bash", "-euo", "pipefail", "-c"]
        done = subprocess.run([*how, body], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{body}\n{done.stdout}\n{done.stderr}"


def test_readme_is_one_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_readme_names_targets_of_make():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = re.findall(r"(?:^    |`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.M)
    assert {"demo", "test", "docs"} <= set(named) <= targets


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page}: {target}"


def test_promises_name_tests_that_there_are():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "trust.md").read_text())
    assert len(named) > 20
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name}"


def test_files_that_pages_name_are_there():
    files = [f"/{path.relative_to(ROOT)}" for top in TOPS for path in (ROOT / top).rglob("*.*")]
    names = re.compile(r"`([\w./-]+/[\w.-]+\.(?:py|h|cpp|c|sh))`")
    named = {name for page in PAGES if page.name != "CHANGELOG.md" for name in names.findall(page.read_text())}
    assert len(named) > 100
    assert {name for name in named if not any(file.endswith(f"/{name}") for file in files)} <= THEIRS


def test_decisions_are_listed():
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"\]\((.*?\.md)\)", (folder / "index.md").read_text())
    assert listed == sorted(path.name for path in folder.glob("0*.md"))


@pytest.mark.parametrize("tool", ["readme_tables.py", "recipe_numbers.py"])
def test_numbers_come_from_saved_results(tool):
    subprocess.run([sys.executable, ROOT / "tools" / tool, "--check"], check=True)
