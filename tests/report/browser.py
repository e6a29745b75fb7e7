"""A real browser without a window, by its command line alone."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--v=0",
    "--virtual-time-budget=5000",
)


def executable() -> str:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    assert found, "no chromium to look at pages with; run tools/browser.sh, which installs it or says how"
    return found


def dump(page: Path) -> tuple[str, str]:
    """The document after its scripts, and what the browser logged."""
    with tempfile.TemporaryDirectory() as profile:
        command = [executable(), *FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    said = done.stderr.decode(errors="replace")
    assert done.returncode == 0, said
    return done.stdout.decode(), said


@contextmanager
def opened(address: str) -> Iterator[Path]:
    """A browser that shows a page until the `with` ends; gives the file of its log."""
    # Its processes may still write into the folder while that is removed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, (Path(profile) / "log").open("wb") as log:
        flags = [flag for flag in FLAGS if "virtual-time" not in flag]
        command = [executable(), *flags, "--remote-debugging-port=0", f"--user-data-dir={profile}", address]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)
        try:
            yield Path(log.name)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(20)
