"""Fixtures of tests of serving."""

import os

import pytest
from increments import make_increments


class Clock:
    """Seconds that pass where a test says so."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(scope="session")
def increments(tmp_path_factory):
    """Versions of one run, each an increment of the one before; tests leave them as they are."""
    return make_increments(tmp_path_factory.mktemp("increments"))


@pytest.fixture
def file():
    """A file in memory, for rows of versions."""
    made = os.memfd_create("rows")
    yield made
    os.close(made)
