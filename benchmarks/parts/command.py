"""Commands of rowwise and programs among the parts, in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from parts import BENCHMARKS


def rowwise(*words: str, cwd: Path | None = None) -> str:
    """What a command prints."""
    return _printed(["-m", "rowwise", *words], cwd)


def run_part(name: str, *words: str, env: Mapping[str, str] | None = None) -> str:
    """The last line that `python -m parts.NAME` prints."""
    return _printed(["-m", f"parts.{name}", *words], BENCHMARKS, env or {}).splitlines()[-1]


def _printed(words: list[str], cwd: Path | None, env: Mapping[str, str] = {}) -> str:
    command = [sys.executable, "-W", "ignore", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env={**os.environ, **env})
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()[-2000:]}")
    return done.stdout
