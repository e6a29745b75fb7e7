"""A real browser without a window, by its command line alone."""

import shutil
import subprocess
import tempfile
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
