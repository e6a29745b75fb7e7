"""Training batches of a rank, prepared in its own process or by the workers of its host.

The first rank of each host starts the service of the workers, and sends its address to the host's other ranks.
Evaluations do not use it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import final

from msgspec import structs

from rowwise.ingest.batcher import Batcher, EncodedSplit, OpenedSplit, Position
from rowwise.ingest.prepare import PreparationTask
from rowwise.ingest.service.client import ServiceClient, ServiceHealth
from rowwise.ingest.service.local import Service, Workers, make_client
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.status import broadcast_object, raising_on_all_ranks
from rowwise.recipes.resolved import ResolvedRecipe, batch_shard_of, make_batcher


@final
class Feed:
    """The training batches of one rank; close it when the run ends."""

    def __init__(self, resolved: ResolvedRecipe, comm: Comm) -> None:
        self._resolved, self._comm, self._cleanup = resolved, comm, ExitStack()
        self._client: ServiceClient | None = None
        self._quarantine: Path | None = None

    def __call__(self, position: Position | None) -> Batcher:
        batcher = self._open(position)
        if self._client is None:
            return batcher
        return batcher.use_splits(partial(_splits_from_client, self._client, batcher.splits))

    def start(self, quarantine: Path) -> None:
        """Start the workers, if the recipe has any, with the folder for quarantined rows; a collective."""
        self._quarantine = quarantine.absolute()  # workers may have another working directory
        workers = self._resolved.recipe.data.workers
        if isinstance(workers, Workers):  # resolve has turned a number into Workers
            join = self._join_cluster if workers.on == "ray" else self._join
            self._client = join(workers)

    def quarantine(self) -> Path | None:
        """The folder for quarantined rows; None before `start`."""
        return self._quarantine

    def _open(self, position: Position | None) -> Batcher:
        resolved = self._resolved
        return make_batcher(resolved, resolved.rows.train, position, batch_shard_of(self._comm), self._quarantine)

    @property
    def health(self) -> ServiceHealth | None:
        """Health of the worker service; None without workers."""
        return None if self._client is None else self._client.health

    @contextmanager
    def closed_by_errors(self) -> Iterator[None]:
        """End the workers if the block raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._cleanup.close()

    def _task(self) -> PreparationTask:
        return replace(self._open(None).task, epochs=self._resolved.recipe.train.epochs)

    def _join(self, workers: Workers) -> ServiceClient:
        comm, topology, service = self._comm, self._comm.topology, None
        host_ranks = topology.ranks_of(topology.host_of(comm.rank))
        with raising_on_all_ranks(comm, during="starting the workers that prepare rows"):
            if comm.rank == host_ranks[0]:
                service = self._cleanup.enter_context(Service(self._task(), workers, len(host_ranks)))
        address = "" if service is None else str(service.address)
        for host in range(topology.hosts):
            first = topology.ranks_of(host)[0]
            received = broadcast_object(comm, address, first, "workers")
            address = received if first == host_ranks[0] else address
        if service is not None:
            return service.client()
        return self._cleanup.enter_context(closing(make_client(Path(address), comm.rank - host_ranks[0])))

    def _join_cluster(self, workers: Workers) -> ServiceClient:
        from rowwise.ingest.service.cluster import ServiceCluster

        comm, cluster = self._comm, None
        if len(comm.ranks) > 1 and workers.address is None:
            workers = structs.replace(workers, address="auto")  # other ranks cannot join a private cluster
        with raising_on_all_ranks(comm, during="starting the workers that prepare rows"):
            if comm.rank == 0:
                cluster = self._cleanup.enter_context(ServiceCluster(self._task(), workers, len(comm.ranks)))
        name = broadcast_object(comm, None if cluster is None else cluster.name, 0, "workers")
        with raising_on_all_ranks(comm, during="joining the workers that prepare rows"):
            cluster = cluster or ServiceCluster(self._task(), workers, len(comm.ranks), name)
        assert cluster is not None
        return cluster.client(comm.rank)


def _splits_from_client(client: ServiceClient, splits: int, epoch: int, position: int) -> Iterator[OpenedSplit]:
    return map(EncodedSplit, client.splits(epoch, position, splits))
