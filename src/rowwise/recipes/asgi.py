"""The application of `rowwise serve` for other servers: Ray Serve, KServe, or any server of ASGI.

It is a worker in one process, which follows the versions of its folder. Known limits: open versions do not share
memory; `/metrics` covers this process only.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from starlette.applications import Starlette

from rowwise.base.errors import CheckpointError
from rowwise.checkpoint.manifest import CheckpointManifest
from rowwise.planning.planner.machines import parse_size
from rowwise.recipes.served import open_version
from rowwise.serve.admission import ServiceLimits
from rowwise.serve.app import make_app
from rowwise.serve.host import POLL_s
from rowwise.serve.package import find_version, read_traffic
from rowwise.serve.row_tiers import IN_MEMORY, make_tiers
from rowwise.serve.service import ScoringService
from rowwise.serve.traffic import Traffic
from rowwise.serve.version import ServedVersion
from rowwise.serve.versions import Lag, VersionRefused

OpenVersion = Callable[..., ServedVersion]


def asgi_app(
    folder: str | Path,
    *,
    version: int | None = None,
    expect: str | None = None,
    limits: ServiceLimits | None = None,
    memory: str | None = None,
) -> Starlette:
    """An application that serves the versions of a folder.

    Where several processes share the cores, let each call `torch.set_num_threads(1)` first, as workers do.

    Args:
        folder: a folder that `rowwise export` wrote, or a version in it.
        version: serve this version only; None: follow the current one.
        expect: the only digest that is accepted.
        limits: limits on sizes and times of requests.
        memory: budget for the rows of a version, such as 8GB; larger tables are cached. None: all rows are in memory.
    """
    service, path = ScoringService(limits or ServiceLimits()), Path(folder)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        first = find_version(path, version)
        fixed = version is not None or first.path == path
        traffic = Traffic(first.number) if fixed else read_traffic(path)
        tiers = IN_MEMORY
        if memory is not None:
            tiers = make_tiers(CheckpointManifest.read(first.path), parse_size(memory, "memory"), (), None)
        open_number = partial(open_version, path, expect, tiers=tiers)
        await _switch(service, open_number, traffic)
        service.metrics.wanted.set(traffic, 0.0)
        follower = None if fixed else asyncio.create_task(_follow(service, path, open_number, traffic))
        yield
        if follower is not None:
            follower.cancel()

    return make_app(service, lifespan)


async def _follow(service: ScoringService, path: Path, open_number: OpenVersion, applied: Traffic) -> None:
    """Poll the folder's traffic and switch to it; a version that cannot be opened is refused, and old ones stay."""
    wanted, lag = applied, Lag()
    async with asyncio.TaskGroup() as group:
        switch = None
        while True:
            await asyncio.sleep(POLL_s)
            with suppress(CheckpointError):  # current.json is damaged: the next export rewrites it
                wanted = read_traffic(path)
            if wanted != applied and (switch is None or switch.done()):
                applied = wanted
                switch = group.create_task(_switch(service, open_number, wanted))
            service.metrics.wanted.set(wanted, lag.seconds(wanted, service.traffic, applied, time.monotonic()))


async def _switch(service: ScoringService, open_number: OpenVersion, traffic: Traffic) -> None:
    for number in traffic.versions:
        if number not in service.versions:
            try:
                service.open(await asyncio.to_thread(partial(open_number, number=number)))
            except Exception as error:  # a version's own code may raise anything
                if service.traffic is None:
                    raise
                service.refused = service.refused | {number: VersionRefused.because(number, error).reason}
                traffic = service.traffic
                break
            service.refused = {other: why for other, why in service.refused.items() if other != number}
    service.move(traffic)
    for number in service.versions.keys() - set(traffic.versions):
        service.close(number)
