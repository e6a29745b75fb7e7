"""Fixtures shared by all tests; what runs when is in `tiers.py`."""

import functools
import gc
import signal
import threading

import pytest
import torch
import typer

import rowwise.tables.ops  # noqa: F401 - loads the operators
from rowwise.tables.ops.linear import choose_library, has_onednn

torch.set_num_threads(1)  # small tensors gain nothing from more, and forks must not find a pool; see `threads`
gc.set_threshold(50_000, 20, 100)  # tests make many objects, of which few are rubbish
pytest_plugins = ["tiers", "budgets", "forked", "impact"]


def usable_sets() -> list[str]:
    widest = torch.ops.rowwise.isa()
    names = []
    for name in ("base", "avx2", "avx512"):
        try:
            torch.ops.rowwise.limit_isa(name)
            names.append(name)
        except RuntimeError:
            continue
    torch.ops.rowwise.limit_isa(widest)
    return names


@pytest.fixture(params=usable_sets(), scope="module")
def isa(request):
    """Run a test once for each instruction set."""
    widest = torch.ops.rowwise.isa()
    torch.ops.rowwise.limit_isa(request.param)
    yield request.param
    torch.ops.rowwise.limit_isa(widest)


@pytest.fixture(params=["torch", "onednn"])
def library(request):
    """Run a test once with each library of matrix products."""
    if request.param == "onednn" and not has_onednn():
        pytest.skip("this torch was built without oneDNN")
    choose_library(request.param)
    yield request.param
    choose_library(None)


@pytest.fixture(scope="session", autouse=True)
def ctrl_c():
    """Processes that tests start hear Ctrl-C, also where the tests run in the background of a shell that ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def dcp():
    """torch.distributed.checkpoint, which takes two seconds to import: only where a test asks for it."""
    from torch.distributed import checkpoint

    return checkpoint


@functools.cache
def app():
    """All commands; `test_cli.py` builds them anew."""
    from rowwise.cli.main import make_app

    return typer.main.get_command(make_app())


@pytest.fixture
def threads():
    """Set torch's threads inside a test; put back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """A command in this process: its exit code, and what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*args):
        with pytest.raises(SystemExit) as ended:
            app()(args)
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


@pytest.fixture
def refused(command):
    """The one line of a command that ends as a user's mistake."""

    def run(*args):
        code, out, err = command(*map(str, args))
        assert (code, out) == (2, "")
        assert err.startswith("rowwise: ")
        assert err.count("\n") == 1
        return err.removesuffix("\n")

    return run


@pytest.fixture
def models_one_after_the_other(monkeypatch):
    """Models of ranks are made from torch's one generator, which threads share and processes do not."""
    from rowwise.recipes import run_setup

    lock, make = threading.Lock(), run_setup.make_model

    def made(*args, **how):
        with lock:
            return make(*args, **how)

    monkeypatch.setattr(run_setup, "make_model", made)
