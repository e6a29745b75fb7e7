"""What runs the tests: forks, budgets of processor time, and the slow tests that a change may break."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import budgets
import impact
import pytest

TESTS = Path(__file__).parent
FILES = {
    "test_good.py": "import pytest\n@pytest.mark.parametrize('n', range(5))\ndef test_n(n): print(n)\n"
    "def test_left_out(): pytest.skip('today')\n",
    "test_bad.py": "def test_sum():\n    print('what was printed')\n    assert 1 + 1 == 3\n",
    "test_crash.py": "import os\ndef test_before(): pass\ndef test_end(): os._exit(3)\ndef test_after(): pass\n",
    "test_setup.py": "import pytest\n@pytest.fixture(scope='session')\ndef broken(): raise OSError('no disk')\n"
    "def test_it(broken): pass\n",
}


def run(folder, *args):
    plugins = ("-p", "budgets", "-p", "forked", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    command = [sys.executable, "-m", "pytest", "-q", "--forks", "2", *plugins, *args]
    environment = os.environ | {"PYTHONPATH": str(TESTS), "PYTEST_ADDOPTS": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_forks_report_what_one_process_would(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    done = run(tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1].startswith("2 failed, 6 passed, 1 skipped, 1 error in ")
    for text in ("assert (1 + 1) == 3", "what was printed", "OSError: no disk"):
        assert text in done.stdout
    assert "FAILED test_crash.py::test_end - the process that ran it ended with status" in done.stdout


def test_a_file_that_takes_more_than_it_has_fails():
    budget = {f"{n}.py": 2.0 for n in range(20)}
    tests = {f"{file}::test[{k}]": 0.1 for file in budget for k in range(20)}
    assert not budgets.excess(tests, tests, budget)
    slower = {test: 3 * seconds for test, seconds in tests.items()}
    assert not budgets.excess(slower, slower, budget), "a slow machine"
    more = {f"3.py::more[{k}]": 0.4 for k in range(14)}
    assert budgets.excess(tests | more, {}, budget).keys() == {"3.py"}
    assert budgets.excess(tests, {"3.py::long": 2.6}, budget).keys() == {"3.py::long"}
    assert "new.py" in budgets.excess({f"new.py::{k}": 0.3 for k in range(14)}, {}, budget)
    many = {f"{file}::new[{k}]": 0.1 for file in [*budget][:9] for k in range(25)}
    assert budgets.excess(tests | many, {}, budget).keys() == {"all files"}


def test_the_list_of_files_is_short_enough_in_all():
    saved = budgets.saved()
    assert sum(saved.values()) <= budgets.ALL_FAST_s
    assert [file for file in saved if not (TESTS.parent / file).exists()] == []


def items(**tests):
    """Tests by module, each with so many cases."""
    return [
        SimpleNamespace(nodeid=f"tests/{module}.py::test[{k}]", callspec=SimpleNamespace(indices={"k": k}))
        for module, count in tests.items()
        for k in range(count)
    ]


@pytest.mark.parametrize(("max_s", "near"), [(100, 4), (7, 4), (3.5, 1)])
def test_the_nearest_tests_are_chosen_and_one_case_of_each(max_s, near):
    """As long as seconds last; of what is far from the change one case."""
    seconds = {"tests/near.py::test": 1.0, "tests/next.py::test": 1.0, "tests/far.py::test": 1.0}
    distances = {"tests/near.py": 1, "tests/next.py": 2}
    chosen = impact.choose(items(near=4, next=4, far=4), distances, seconds, max_s)
    by_module = {name: sum(name in one for one in chosen) for name in ("near", "next", "far")}
    assert by_module["near"] == near
    assert by_module["far"] == 1
    assert by_module["next"] == {100: 4, 7: 2, 3.5: 1}[max_s]
    assert sum(by_module.values()) <= max_s


@pytest.mark.slow
def test_a_test_is_as_near_as_its_imports_say():
    near = impact.distances(["src/rowwise/tables/ops/linear.py"])
    assert near["tests/tables/ops/test_linear.py"] == 1
    assert near["tests/models/test_inference.py"] == 2  # by the layers of models
    assert (
        impact.distances(["src/rowwise/tables/ops/_triton/cache.py"])["tests/tables/ops/test_triton.py"] <= 3
    )  # by interpreted_*
    assert near["tests/tables/ops/test_linear.py"] < near["tests/recipes/test_runs.py"]
    assert impact.distances(["tests/tables/ops/test_linear.py"]) == {"tests/tables/ops/test_linear.py": 0}
    assert impact.distances(["src/rowwise/tables/ops/_cpp/apply.h"])["tests/tables/ops/test_kernels.py"] <= 2
    assert "tests/test_docs.py" in impact.distances(["docs/faq.md"])
