"""Tests in forks of one process that has imported and collected everything: `pytest --forks 2`.

A plugin of pytest. A fork takes a file of tests, runs it, and takes the next one; those with the most processor time
(`seconds.json`) come first. Each fork reports through a pipe, and its parent hands the reports to pytest as if it had
run the tests itself. Fixtures of a session exist once in each fork.

A fork has only the thread that forks: `conftest.py` keeps torch at one thread, so that there is no pool of others.
"""

import atexit
import contextlib
import gc
import json
import mmap
import os
import selectors
import shutil
import signal
import struct
import sys
import tempfile
import traceback

import budgets
import pytest
import warm
from _pytest.config import create_terminal_writer

NUMBER = struct.Struct("=H")
NAME_BYTES = 4096
CRASHED = "the process that ran it ended with status {}; other tests of its file were not run"


def pytest_addoption(parser):
    parser.addoption("--forks", type=int, default=1, help="processes that run tests")


def pytest_configure(config):
    if config.getoption("forks") > 1:
        os.environ[warm.USED] = tempfile.mkdtemp()


def pytest_unconfigure(config):
    if config.getoption("forks") > 1:
        shutil.rmtree(os.environ.pop(warm.USED), ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    forks = session.config.getoption("forks")
    if forks < 2 or session.config.getoption("collectonly") or session.testsfailed:
        return None
    files = {}
    for item in session.items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    seconds = budgets.saved() | budgets.saved("slow")

    def takes_s(items):
        slow = sum(seconds.get(item.nodeid.partition("[")[0], 0.0) for item in items)
        return slow if session.config.getoption("full", False) else seconds.get(items[0].nodeid.partition("::")[0], 1.0)

    ordered = sorted(files.values(), key=takes_s, reverse=True)
    if len(ordered) < 2:
        return None
    gc.collect()
    gc.freeze()  # a look at an object would copy its page
    _run(session, ordered, forks)
    return True


def _run(session, files, forks):
    if "launching" in sys.modules:
        warm.command(sys.modules["launching"].ENVIRONMENT)  # one for all forks, and ready by the time it is used
    tickets, give = os.pipe()
    for number in range(len(files)):
        os.write(give, NUMBER.pack(number))
    os.close(give)
    children = [Child.start(session, files, tickets) for _ in range(min(forks, len(files)))]
    os.close(tickets)
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.reports, selectors.EVENT_READ, child)
        try:
            while selector.get_map():
                for key, _ in selector.select():
                    if not key.data.receive(session):
                        selector.unregister(key.fileobj)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
        finally:
            for child in children:
                child.end(session)


class Child:
    """A fork, as its parent sees it."""

    def __init__(self, pid, reports, running):
        self.pid, self.reports, self.running = pid, reports, running
        self.rest, self.done = b"", False

    @classmethod
    def start(cls, session, files, tickets):
        reports, send = os.pipe()
        running = mmap.mmap(-1, NAME_BYTES)
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            os.close(send)
            return cls(pid, reports, running)
        status = 1
        try:
            os.close(reports)
            _be_child(session, files, tickets, Sender(session.config, send, running))
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        os._exit(status)

    def receive(self, session):
        """Hands reports on; returns whether more can come."""
        data = os.read(self.reports, 1 << 16)
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self.take(session, json.loads(line))
        return bool(data)

    def take(self, session, message):
        config, hook = session.config, session.config.hook
        match message:
            case {"report": data}:
                report = hook.pytest_report_from_serializable(config=config, data=data)
                hook.pytest_runtest_logreport(report=report)
                if report.failed:  # also now, as a whole run takes an hour
                    config.get_terminal_writer().line(f"\n{report.nodeid}: failed")
            case {"seconds": seconds, "calls": calls}:
                budgets.measured(config, seconds, calls)
            case {"end": True}:
                self.done = True

    def end(self, session):
        """Wait for it, or stop it; a test that took its process with it has failed."""
        if not self.done and self.reports is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGINT if session.shouldfail else signal.SIGCONT)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.reports)
        if self.done or session.shouldfail:
            return
        name = self.running[:].rstrip(b"\0").decode(errors="replace") or "tests"
        location = name.partition("::")[0], None, name
        report = pytest.TestReport(name, location, {}, "failed", CRASHED.format(status), "call")
        session.config.hook.pytest_runtest_logreport(report=report)


class Sender:
    """Where a fork's reports go; a plugin in the place of the terminal."""

    def __init__(self, config, send, running):
        self.config, self.send, self.running = config, send, running
        self.calls = {}  # processor time of tests without that of their fixtures

    def tell(self, **message):
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[os.write(self.send, data) :]

    def pytest_runtest_logstart(self, nodeid):
        name = nodeid.encode()[:NAME_BYTES]
        self.running[:] = name.ljust(NAME_BYTES, b"\0")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        begin_s = budgets.processor_seconds()
        try:
            return (yield)
        finally:
            self.calls[item.nodeid] = round(budgets.processor_seconds() - begin_s, 3)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            self.tell(report=self.config.hook.pytest_report_to_serializable(config=self.config, report=report))


def _be_child(session, files, tickets, sender):
    config = session.config
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # whose files have one position in all forks
    capture.start_global_capturing()
    config.pluginmanager.unregister(name="terminalreporter")
    # Of what `pytest-timeout` says of threads: the report of the test has it.
    config.get_terminal_writer = lambda: create_terminal_writer(config, sys.stderr)
    config.pluginmanager.register(sender, "sender")
    status = 0
    try:
        _run_files(session, files, tickets, sender)
    except KeyboardInterrupt:
        status = 2
    with contextlib.suppress(FileNotFoundError):  # all forks remove the folders of earlier runs, as they end
        config._tmp_path_factory._exit_stack.close()
    config.hook.pytest_sessionfinish(session=session, exitstatus=status or (session.testsfailed and 1))
    capture.stop_global_capturing()
    atexit._run_exitfuncs()
    sender.tell(end=True)


def _run_files(session, files, tickets, sender):
    items = _take(files, tickets)
    while items:
        following, seconds, at_s = None, {}, budgets.processor_seconds()
        sender.calls.clear()
        for item, then in zip(items, [*items[1:], None], strict=True):
            if then is None:
                following = _take(files, tickets)
                then = following[0] if following else None
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=then)
            if session.shouldstop:
                return
            before_s, at_s = at_s, budgets.processor_seconds()
            seconds[item.nodeid] = round(at_s - before_s, 3)
        sender.tell(seconds=seconds, calls=sender.calls)
        items = following


def _take(files, tickets):
    number = os.read(tickets, NUMBER.size)
    return files[NUMBER.unpack(number)[0]] if number else None
