"""What only grows if nobody looks: lines of each package, and patches in tests.

`lines.csv` has the lines of each package when somebody last looked. One that is more than a fiftieth larger fails:
first look for what can go. What is worth its lines goes into the list, by `python tests/test_lines.py`, in a commit
whose message has a line that begins with `Lines:` and says why. A patch becomes an argument, a real file or a process.
"""

import csv
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("lines.csv")
SLACK, SLACK_lines = 0.02, 30
PATCH = re.compile(r"\b(monkeypatch|patch)\.(setattr|setitem|setenv|delattr|delitem|delenv)\(|\bmock\.|unittest\.mock")
PATCHES_OF_100_TESTS = 3.0


def lines_of(folder, *patterns):
    return sum(path.read_text().count("\n") for pattern in patterns for path in folder.rglob(pattern))


def lines_by_package():
    source = ROOT / "src/rowwise"
    found = {path.name: lines_of(path, "*.py") for path in sorted(source.iterdir()) if path.is_dir()}
    found["modules"] = sum(path.read_text().count("\n") for path in source.glob("*.py"))
    found["C and C++"] = lines_of(source, "*.cpp", "*.c", "*.h")
    return {name: lines for name, lines in found.items() if lines}


def parse(text):
    return {name: int(lines) for name, lines in csv.reader(text.splitlines()[1:])}


def git(*args):
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def test_a_package_grows_where_somebody_has_looked():
    saved = parse(LIST.read_text())
    larger = {
        name: f"{lines:,} lines, {saved.get(name, 0):,} when somebody last looked"
        for name, lines in lines_by_package().items()
        if lines > saved.get(name, 0) * (1 + SLACK) + SLACK_lines
    }
    assert not larger, f"{larger}: see the top of tests/test_lines.py"


def test_the_list_grows_in_commits_that_say_why():
    name = LIST.relative_to(ROOT).as_posix()
    commit = (git("log", "-1", "--format=%H", "--", name) or "").strip()
    before = git("show", f"{commit}^:{name}") if commit else None
    if before is None:  # no history, or the first list
        return
    old, new = parse(before), parse(git("show", f"{commit}:{name}"))
    grown = {package: lines for package, lines in new.items() if lines > old.get(package, 0)}
    message = git("log", "-1", "--format=%B", commit)
    assert not grown or re.search(r"^Lines:", message, re.M), f"{commit[:10]}: {grown}, without a line `Lines: why`"


def test_patches_are_few():
    texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    tests = sum(len(re.findall(r"^\s*def test_", text, re.M)) for text in texts)
    patches = sum(len(PATCH.findall(text)) for text in texts)
    assert patches <= PATCHES_OF_100_TESTS * tests / 100, f"{patches} patches in {tests} tests"


if __name__ == "__main__":
    LIST.write_text("".join(f"{name},{lines}\n" for name, lines in [("package", "lines"), *lines_by_package().items()]))
