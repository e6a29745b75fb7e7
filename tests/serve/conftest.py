"""Fixtures of tests of serving."""

import pytest
from increments import make_increments


@pytest.fixture(scope="session")
def increments(tmp_path_factory):
    """Versions of one run, each an increment of the one before; tests leave them as they are."""
    return make_increments(tmp_path_factory.mktemp("increments"))
