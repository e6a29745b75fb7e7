import pytest


@pytest.fixture
def short_head(monkeypatch):
    """Text files whose first kilobyte is what is looked at first."""
    monkeypatch.setattr("rowwise.ingest.delimited.HEAD_BYTES", 1000)
