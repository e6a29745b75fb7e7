"""A worker goes on after a stall, after a batch that raised, and after bodies that mislead its estimates."""

import asyncio
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch

from rowwise.ingest.raw_columns import RawColumns
from rowwise.serve.admission import ServiceLimits
from rowwise.serve.batches import FAILED, Rejection
from rowwise.serve.request import RequestRows
from rowwise.serve.service import ScoringService

ROW_s, BATCH_s = 1e-5, 5e-4


class Version:
    """Computes rows in a time that a test sets; `fault` is raised instead."""

    cached = device_caches = ()
    link = None

    def __init__(self, number, clock):
        self.number, self.clock, self.stall_s, self.fault = number, clock, 0.0, None

    def forward(self, arrays, rows, most, computed=None):
        self.clock.now_s += BATCH_s + ROW_s * rows + self.stall_s
        if self.fault is not None:
            raise self.fault
        return torch.zeros(rows, 1)


def rows_of(count):
    return RequestRows(RawColumns.of({"x": pa.array(range(count))}), count, 0)


@pytest.fixture
def service(clock):
    return SimpleNamespace(service=ScoringService(ServiceLimits(), clock), clock=clock, first=Version(1, clock))


def test_one_stall_does_not_refuse_requests_for_ever(service):
    async def go():
        for _ in range(500):
            await service.service.score(service.first, rows_of(1), 0.05)
        service.first.stall_s = 3.0
        await service.service.score(service.first, rows_of(1), 0.05)
        service.first.stall_s = 0.0
        service.clock.now_s += 3600
        return [await service.service.score(service.first, rows_of(1), 0.05) for _ in range(20)]

    outcomes = asyncio.run(go())
    refused = [isinstance(outcome, Rejection) for outcome in outcomes]
    assert sum(refused) < 10
    assert not any(refused[10:])


def test_bodies_that_mislead_do_not_refuse_others_where_nothing_waits(service):
    scoring = service.service

    async def go():
        await scoring.score(service.first, rows_of(100), 1.0)
        for _ in range(300):
            scoring.admission.observe_body("score", 100, 16_384)
        assert scoring.refusal_unread("score", 1 << 20, 0.05) is None
        waiting = asyncio.ensure_future(scoring.score(service.first, rows_of(10), 1.0))
        await asyncio.sleep(0)
        refusal = scoring.refusal_unread("score", 1 << 20, 0.05)  # now it has to wait
        await waiting
        return refusal

    assert asyncio.run(go()).code == 503


def test_a_batch_that_raises_leaves_other_versions_and_later_batches_alone(service, capsys):
    second = Version(2, service.clock)
    service.first.fault = MemoryError("no memory")

    async def go():
        scores = [service.service.score(version, rows_of(200), 5.0) for version in (service.first, second, second)]
        return await asyncio.wait_for(asyncio.gather(*scores, return_exceptions=True), 5)

    failed, *others = asyncio.run(go())
    assert isinstance(failed, Rejection)
    assert failed.code == FAILED
    assert [len(outcome.values_RP) for outcome in others] == [200, 200]
    assert "no memory" in capsys.readouterr().err


def test_idle_time_is_no_time_of_a_batch(service):
    async def go():
        service.first.fault = MemoryError("no memory")
        assert (await service.service.score(service.first, rows_of(600), 5.0)).code == FAILED
        service.first.fault = None
        service.clock.now_s += 3600
        return await service.service.score(service.first, rows_of(256), 5.0)

    assert len(asyncio.run(go()).values_RP) == 256
    assert service.service.admission.seconds(256) < 0.1
