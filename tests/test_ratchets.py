"""Two numbers that only grow if nobody looks: patches in tests, and lines of source.

Where one fires: first look for what can go. A patch becomes an argument, a real file or a process; lines are saved
where two things are one. What is worth its lines raises the number here, in the change that brings them.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATCH = re.compile(r"\b(monkeypatch|patch)\.(setattr|setitem|setenv|delattr|delitem|delenv)\(|\bmock\.|unittest\.mock")
PATCHES_OF_100_TESTS = 3.0
LINES = {"*.py": 54_600, "*.cpp *.c *.h": 8_700}


def lines_of(patterns):
    paths = [path for pattern in patterns.split() for path in (ROOT / "src").rglob(pattern)]
    return sum(path.read_text().count("\n") for path in paths)


def test_patches_are_few():
    texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    tests = sum(len(re.findall(r"^\s*def test_", text, re.M)) for text in texts)
    patches = sum(len(PATCH.findall(text)) for text in texts)
    assert patches <= PATCHES_OF_100_TESTS * tests / 100, f"{patches} patches in {tests} tests"


def test_the_source_is_not_larger_than_it_has_to_be():
    found = {patterns: lines_of(patterns) for patterns in LINES}
    assert all(found[patterns] <= most for patterns, most in LINES.items()), f"{found}: want at most {LINES}"
