"""Who prepares the rows of a run: the trainers themselves, or workers that the trainers of a host share.

Evaluations read their rows themselves.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import final

from msgspec import structs

from rowwise.comm.seam import Comm
from rowwise.comm.status import broadcast_object, raising_on_all_ranks
from rowwise.ingest.batcher import Batcher, EncodedSplit, Position, SplitPosition
from rowwise.ingest.prepare import PreparationTask
from rowwise.ingest.service.client import ServiceClient, ServiceHealth
from rowwise.ingest.service.local import Service, Workers, client_of
from rowwise.recipes.compose import ResolvedRecipe, deal_of, make_batcher


@final
class Feed:
    """The training batches of one rank; close it when the run ends."""

    def __init__(self, resolved: ResolvedRecipe, comm: Comm) -> None:
        """Without workers yet, and where a bad row is an error."""
        self._resolved, self._comm, self._ends = resolved, comm, ExitStack()
        self._client: ServiceClient | None = None
        self._aside: Path | None = None

    def __call__(self, position: Position | None) -> Batcher:
        batcher = self._open(position)
        if self._client is None:
            return batcher
        return batcher.served_by(partial(_served, self._client, batcher.splits))

    def start(self, aside: Path) -> None:
        """Start the workers, if there are to be any; called by all ranks. `aside`: where bad rows go, if anywhere."""
        self._aside = aside.absolute()  # workers may be in another folder
        workers = self._resolved.recipe.data.workers
        if isinstance(workers, Workers):  # a number was made workers when the recipe was resolved
            join = self._join_cluster if workers.on == "ray" else self._join
            self._client = join(workers)

    def aside(self) -> Path | None:
        """Where bad rows go; None: not known yet, or nowhere."""
        return self._aside

    def _open(self, position: Position | None) -> Batcher:
        resolved = self._resolved
        return make_batcher(resolved, resolved.parts.train, position, deal_of(self._comm), self._aside)

    @property
    def health(self) -> ServiceHealth | None:
        """How the workers keep up; None where there are none."""
        return None if self._client is None else self._client.health

    @contextmanager
    def closed_by_errors(self) -> Iterator[None]:
        """Leave no workers behind where a run does not come to be."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._ends.close()

    def _task(self) -> PreparationTask:
        return replace(self._open(None).task, epochs=self._resolved.recipe.train.epochs)

    def _join(self, workers: Workers) -> ServiceClient:
        comm, topology, service = self._comm, self._comm.topology, None
        here = topology.ranks_of(topology.host_of(comm.rank))
        with raising_on_all_ranks(comm, during="starting the workers that prepare rows"):
            if comm.rank == here[0]:
                service = self._ends.enter_context(Service(self._task(), workers, len(here)))
        address = "" if service is None else str(service.address)
        for host in range(topology.hosts):
            first = topology.ranks_of(host)[0]
            told = broadcast_object(comm, address, first, "workers")
            address = told if first == here[0] else address
        if service is not None:
            return service.client()
        return self._ends.enter_context(closing(client_of(Path(address), comm.rank - here[0])))

    def _join_cluster(self, workers: Workers) -> ServiceClient:
        from rowwise.ingest.service.cluster import ServiceCluster

        comm, found = self._comm, None
        if len(comm.ranks) > 1 and workers.address is None:
            workers = structs.replace(workers, address="auto")  # one that only this process has cannot be joined
        with raising_on_all_ranks(comm, during="starting the workers that prepare rows"):
            if comm.rank == 0:
                found = self._ends.enter_context(ServiceCluster(self._task(), workers, len(comm.ranks)))
        name = broadcast_object(comm, None if found is None else found.name, 0, "workers")
        with raising_on_all_ranks(comm, during="joining the workers that prepare rows"):
            found = found or ServiceCluster(self._task(), workers, len(comm.ranks), name)
        assert found is not None
        return found.client(comm.rank)


def _served(client: ServiceClient, splits: int, epoch: int, at: int) -> Iterator[SplitPosition]:
    return map(EncodedSplit, client.splits(epoch, at, splits))
