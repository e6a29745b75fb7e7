"""The slow tests of a change: `pytest --full --change`, as CI runs them; the change is since the last green whole run.

A plugin of pytest. A test module is as near to a changed file as the chain of imports between them is short; imports
inside functions count, so that a command is near to what it runs. As long as their seconds last (`seconds.json`), these
are run: one case of each cheap test, whatever changed; then the tests nearest to the change, the first case of each
before the second of any. What is left is for `make test-nightly`.

Where git does not know that commit, every file counts as changed.
"""

import ast
import fnmatch
import functools
from collections import defaultdict, deque
from pathlib import Path

import budgets
import pytest
import since
from tiers import cases_in_order

ROOT = Path(__file__).parents[1]
CHEAP_s, UNKNOWN_s = 3.0, 1.0
ALL_s = 1_500.0  # processor seconds of the slow tests of a change
LEFT_OUT = {"conftest", "budgets", "forked", "impact", "tiers"}  # what runs tests is near to none of them
FAR = 99


def pytest_addoption(parser):
    parser.addoption("--change", action="store_true", help="only tests near to what has changed")


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(config, items):
    if not config.getoption("change"):
        return
    commit = since.base()
    changed = since.changed_files(commit)
    near = distances(changed) if changed is not None else dict.fromkeys(map(module_of, items), 1)
    kept = choose(items, near, budgets.saved("slow"), ALL_s)
    left = [item for item in items if item.nodeid not in kept]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item.nodeid in kept]
    what = "unknown, so all files" if changed is None else f"{len(changed)} files since {commit[:10]}"
    config.stash[said] = f"slow tests of the change ({what}): {len(kept)} of {len(kept) + len(left)}"


said = pytest.StashKey[str]()


def pytest_report_collectionfinish(config):
    return config.stash.get(said, [])


def choose(items, near, seconds, max_s):
    """The ids of the tests that are run, by the docstring above."""
    ranks = cases_in_order(items)

    def takes_s(item):
        return seconds.get(item.nodeid.partition("[")[0], UNKNOWN_s)

    def order(item):
        distance, rank = near.get(module_of(item), FAR), ranks[item.nodeid]
        covers = rank == 0 and takes_s(item) <= CHEAP_s
        return (not covers, distance, rank, item.nodeid)

    kept, sum_s = set(), 0.0
    for item in sorted(items, key=order):
        touched = near.get(module_of(item), FAR) < FAR
        if (touched or not order(item)[0]) and sum_s + takes_s(item) <= max_s:
            kept.add(item.nodeid)
            sum_s += takes_s(item)
    return kept


def module_of(item):
    return item.nodeid.partition("::")[0]


def distances(changed):
    """For each test module, by its path, the number of imports between it and the nearest change."""
    files = {**modules(ROOT / "src"), **modules(ROOT / "tests")}
    imported_by = defaultdict(set)
    for name, path in files.items():
        for other in imports(path, name):
            while other and other not in files:
                other = other.rpartition(".")[0]
            if other and other != name:
                imported_by[other].add(name)
    begin = {name for path in changed for name in modules_of_file(path, files)}
    found, waiting = dict.fromkeys(begin, 0), deque(begin)
    while waiting:
        name = waiting.popleft()
        for other in imported_by[name] - found.keys():
            found[other] = found[name] + 1
            waiting.append(other)
    paths = {name: files[name].relative_to(ROOT).as_posix() for name in found}
    return {paths[name]: distance for name, distance in found.items() if paths[name].startswith("tests/")}


def modules(folder):
    """Names of modules below a folder that is on the path, with their files."""
    found = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: path for name, path in found.items() if name and name not in LEFT_OUT}


@functools.cache
def imports(path, name):
    """Modules that a file imports anywhere or names as files, and names in them, which may be modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and str(node.value).endswith(".py"):
            found |= modules_named(path, name, node.value)
    return found


def modules_named(path, name, pattern):
    """Modules beside a module that runs them in a process of their own: `interpreted_*.py`."""
    beside = (other.stem for other in path.parent.glob("*.py") if fnmatch.fnmatch(other.name, pattern))
    return {f"{name.rpartition('.')[0]}.{stem}".lstrip(".") for stem in beside}


def modules_of_file(path, files):
    """The modules that a changed file is, or is read by.

    Of native code and data in a package, its modules; of other files, the tests in which their name stands.
    """
    by_path = {one.relative_to(ROOT).as_posix(): name for name, one in files.items()}
    if path in by_path:
        return {by_path[path]}
    folder = Path(path).parent
    while folder.parts:
        if (ROOT / folder / "__init__.py").exists():
            return {name for one, name in by_path.items() if Path(one).parent == folder}
        folder = folder.parent
    words = {Path(path).name, Path(path).stem, Path(path).parts[0]} - {"src", "tests"}
    return {name for one, name in by_path.items() if one.startswith("tests/") and _mentions(one, words)}


def _mentions(path, words):
    text = (ROOT / path).read_text()
    return any(f'"{word}"' in text or f"/{word}" in text or f'"{word}/' in text for word in words)
