"""What a step takes beside its simulation is measured by a run of this machine, and is part of the profile."""

import pytest
from msgspec import structs

from rowwise.base.errors import PeerError
from rowwise.planning.perf.hardware import hardware_named, read_hardware
from rowwise.recipes import step_overheads
from rowwise.recipes.step_overheads import MEASURED, with_overheads

SHARED = structs.replace(hardware_named("cpu"), copies_inside=True)


@pytest.mark.slow
@pytest.mark.dist
def test_a_small_run_says_what_any_step_takes():
    found = with_overheads(SHARED, 2)
    seconds = {one.stage: one.seconds for one in found.overheads}
    assert {"forward", "backward", "other"} <= seconds.keys() <= set(MEASURED)
    assert min(seconds.values()) > 0
    assert found.batches.read_s + found.batches.encode_s > 0
    assert read_hardware(found.to_json()) == found
    assert structs.replace(found, overheads=(), batches=None) == SHARED


def test_a_run_that_fails_is_said(monkeypatch):
    monkeypatch.setattr(step_overheads, "SMALL", {"model.bottom": "none"})
    with pytest.raises(PeerError, match="run that measures steps"):
        with_overheads(SHARED, 1)
