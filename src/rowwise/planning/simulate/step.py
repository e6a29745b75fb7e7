"""A training step of ours as stages: the seconds of each by rank and cause, in the order of the program.

Stages are named as in `planning/perf/step_program.py`, with layers and collectives as their parts: `forward.bottom.0`,
`reduce.2`. Vectors and gradients travel while layers compute that do not need them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.dense_layers import DenseLayer, DenseLayers
from rowwise.planning.perf.dense_parallel import BF16_bytes, DenseSide, FLOAT_bytes
from rowwise.planning.perf.step_program import StageRef, TimelineStage, look_ahead
from rowwise.planning.simulate.links import Cause, Links, Seconds, add_seconds
from rowwise.planning.simulate.traffic import Flow
from rowwise.tables.spec import FLOATS, FarType, Wire

BUCKET_bytes = 4 << 20  # least size of a bucket of gradients
UPDATE_PASSES = 3  # over the numbers of a parameter and its gradient; and two over each number of optimizer state
COPY_PASSES = 4  # into a bucket, and out of it
BETWEEN_RANKS = ("route", "exchange", "return", "reduce")  # stages that one rank does not have
IDS = ("route.counts", "route.ids")


@dataclass(frozen=True, slots=True, eq=False)
class StageWork:
    """A stage with its seconds of each rank by cause; one number where all ranks are alike."""

    name: str
    resource: str
    causes: Mapping[Cause, Floats | float]
    after: tuple[str, ...] = ()

    def seconds_W(self, speedups: Mapping[Cause, float]) -> Floats:
        """Seconds with the given causes sped up by factors."""
        parts = [np.atleast_1d(seconds) / speedups.get(cause, 1.0) for cause, seconds in self.causes.items()]
        return sum(parts, np.zeros(1))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TableSeconds:
    """Seconds of each rank for its tables, and of the transfers between ranks."""

    lookup_W: Floats
    update_W: Floats
    fetch_W: Floats  # rows of lower tiers
    store_W: Floats
    transfers: Mapping[str, Seconds]  # by stage


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepWork:
    """The parts of a step: tables, dense layers, links."""

    tables: TableSeconds
    layers: DenseLayers
    side: DenseSide
    links: Links
    samples: float  # of a rank
    wire: Wire = FLOATS  # of dense gradients
    batch_s: float = 0.0  # of a processor, in which a rank makes a batch
    ids_beside: bool = False  # ids travel on links of their own, beside vectors and gradients
    tensor_ranks: int = 1  # that share each dense layer, by its columns and rows in turn; not run by this library

    def stages(self, depth: int, speedups: Mapping[Cause, float] | None = None) -> tuple[TimelineStage, ...]:
        """The program with `depth` steps in flight."""
        works = [(work, work.seconds_W(speedups or {})) for work in self.works()]
        slowdown_W = self._slowdown_W(works)
        listed = [
            TimelineStage(
                name=work.name,
                resource="ids" if self.ids_beside and work.name in IDS else work.resource,
                seconds_W=seconds_W * slowdown_W if work.resource == "processor" else seconds_W,
                after=tuple(map(StageRef, work.after)),
                joins=work.resource == "link",
            )
            for work, seconds_W in works
        ]
        return look_ahead(listed, depth)

    def _slowdown_W(self, works: "Sequence[tuple[StageWork, Floats]]") -> Floats:
        """Slowdown of the ranks' computation by batches that are made on the same cores."""
        batches = self.links.machine.hardware.batches
        if batches is None or not self.batch_s:
            return np.ones(1)
        (made_s,) = next(seconds_W for work, seconds_W in works if work.name == "data")
        busy_W = sum((seconds_W for work, seconds_W in works if work.resource == "processor"), np.zeros(1))
        return 1 + made_s * self.links.topology.devices / batches.cores / busy_W

    def works(self) -> list[StageWork]:
        """All stages, in the order of a step without look-ahead."""
        tables = self.tables
        sums = ("update.sums",) if "update.sums" in tables.transfers else ()  # of replicated tables, and over columns
        after_data = ("data",) if self.batch_s else ()
        return [
            *(StageWork(name, "reader", {"batches": self.batch_s}) for name in after_data),
            StageWork("route.pack", "processor", {}, after_data),
            *self.send("route.counts", "route.pack"),
            StageWork("route.send", "processor", {}, ("route.counts",)),
            *self.send("route.ids", "route.send"),
            StageWork("route.unpack", "processor", {}, ("route.ids",)),
            StageWork("prefetch", "host link", {"host link": tables.fetch_W}, ("route.unpack",)),
            StageWork("lookup", "processor", {"memory": tables.lookup_W}, ("prefetch",)),
            *self.send("exchange.inside", "lookup"),
            *self.send("exchange.send", "exchange.inside", "lookup"),
            *_DenseStages(self).all(),
            *(self.send("update.sums", "return.inside") if sums else ()),
            StageWork("update", "processor", {"memory": tables.update_W}, ("return.inside", *sums)),
            StageWork("write back", "host link", {"host link": tables.store_W}, ("update",)),
            *self._overheads(),
        ]

    def _overheads(self) -> Iterator[StageWork]:
        """Fixed overheads of stages, wherever in the step."""
        world = self.links.topology.world
        for overhead in self.links.machine.hardware.overheads:
            if world > 1 or overhead.stage not in BETWEEN_RANKS:
                yield StageWork(f"{overhead.stage}.overhead", "processor", {"device": overhead.seconds})

    def send(self, name: str, *after: str) -> Iterator[StageWork]:
        return self.transfer(name, self.tables.transfers.get(name, {}), *after)

    def transfer(self, name: str, seconds: Seconds, *after: str) -> Iterator[StageWork]:
        """A collective on the link; its processor time is a stage of its own."""
        on_processor = self.links.by_processor
        yield StageWork(name, "link", {c: s for c, s in seconds.items() if c not in on_processor}, after)
        copies: Seconds = {c: s for c, s in seconds.items() if c in on_processor}
        if copies:
            yield StageWork(f"{name}.copies", "processor", copies)


def sum_transfers(flows: Sequence[Flow], links: Links) -> dict[str, Seconds]:
    """Seconds of the collectives of each stage, one after the other."""
    by_stage: dict[str, Seconds] = {}
    for flow in flows:
        by_stage[flow.stage] = add_seconds(by_stage.get(flow.stage, {}), links.flow(flow))
    return by_stage


@dataclass(frozen=True, slots=True)
class _DenseStages:
    """The stages of dense layers, of the collectives of their parameters, and of their update."""

    work: StepWork

    def all(self) -> Iterator[StageWork]:
        layers = self.work.layers
        yield from self._forward(layers.before, ())
        summed = self._awaited_sum(len(layers.before))
        yield StageWork("forward.vectors", "processor", {}, ("exchange.send", *summed))
        yield from self._forward(layers.after, layers.before)
        yield StageWork("backward.top", "processor", {}, self._awaited_sum(len(layers.all)))
        backward = list(self._backward())
        yield from backward
        yield self._update(tuple(stage.name for stage in backward if stage.name.startswith("reduce.")))

    @property
    def _shards(self) -> int:
        return self.work.side.shards_on(self.work.links.topology)

    def _forward(self, layers: Sequence[DenseLayer], before: Sequence[DenseLayer]) -> Iterator[StageWork]:
        for k, layer in enumerate(layers, len(before)):
            gathered = self._gather(k, "forward", self._layers)
            yield from gathered
            waits = tuple(stage.name for stage in gathered)
            yield self._compute(layer, "forward", (*waits, *self._awaited_sum(k)))
            if self._is_summed(k):
                yield from self.work.transfer(
                    f"sum.{layer.name}.forward", self._activation_sum(layer), f"forward.{layer.name}"
                )

    @property
    def _layers(self) -> tuple[DenseLayer, ...]:
        return self.work.layers.all

    def _backward(self) -> Iterator[StageWork]:
        order, pending, bucket = self._layers[::-1], 0, 0
        far_sums: list[Seconds] = []  # second levels of sums, which follow the backward
        for k, layer in enumerate(order):
            if k == len(self.work.layers.after):
                yield from self._return_gradients()
            gathered = self._gather(k, "backward", order) if self.work.side.reshard else []
            yield from gathered
            summed = (f"sum.{order[k - 1].name}.backward",) if k and self._is_summed_back(k - 1) else ()
            yield self._compute(layer, "backward", (*(stage.name for stage in gathered), *summed))
            if self._is_summed_back(k):
                yield from self.work.transfer(
                    f"sum.{layer.name}.backward", self._activation_sum(layer), f"backward.{layer.name}"
                )
            pending += layer.parameters
            last = k == len(order) - 1
            if self._shards > 1 or pending * FLOAT_bytes >= BUCKET_bytes or last:
                if (far := self._far) is None:
                    reduced = self._reduce(pending)
                else:
                    reduced, rest = self.work.links.two_level_sum(pending, far)
                    far_sums.append(rest)
                yield from self.work.transfer(f"reduce.{bucket}", reduced, f"backward.{layer.name}")
                pending, bucket = 0, bucket + 1
        if len(order) == len(self.work.layers.after):
            yield from self._return_gradients()
        for number, seconds in enumerate(far_sums):
            yield from self.work.transfer(
                f"reduce.far.{number}", seconds, f"reduce.{number}", f"backward.{order[-1].name}"
            )

    @property
    def _far(self) -> FarType | None:
        """The type between groups or hosts; None for sums in one level."""
        far, topology = self.work.wire.far, self.work.links.topology
        return FarType.parse(far) if far is not None and self._shards == 1 and len(topology.near_ranks) > 1 else None

    def _return_gradients(self) -> Iterator[StageWork]:
        """Gradients of vectors, once the layers above them are differentiated."""
        yield StageWork("backward.vectors", "processor", {})
        yield from self.work.send("return.send", "backward.vectors")
        yield from self.work.send("return.inside", "return.send")

    def _compute(self, layer: DenseLayer, direction: str, after: tuple[str, ...]) -> StageWork:
        """Ranks that share a layer compute their part of it for the samples of them all."""
        share = self.work.tensor_ranks
        seconds = layer.seconds(self.work.links.machine.hardware, self.work.samples * share)
        taken_s = seconds.forward_s if direction == "forward" else seconds.backward_s
        if direction == "backward" and self.work.side.recompute:
            taken_s += seconds.forward_s
        return StageWork(f"{direction}.{layer.name}", "processor", {"device": taken_s / share}, after)

    def _gather(self, k: int, direction: str, order: Sequence[DenseLayer]) -> list[StageWork]:
        """All-gather of the parameters of the k-th layer, up to `prefetch` layers ahead."""
        shards, ahead = self._shards, 1 + self.work.side.prefetch
        if shards == 1:
            return []
        size = order[k].parameters * (BF16_bytes if self.work.side.bf16 else FLOAT_bytes)
        seconds = self.work.links.gather(size, shards, inside=self._is_inside(shards))
        after = (f"{direction}.{order[k - ahead].name}",) if k >= ahead else ()
        return list(self.work.transfer(f"gather.{order[k].name}.{direction}", seconds, *after))

    def _reduce(self, parameters: int) -> Seconds:
        """The sum of the gradients of `parameters`: an all-reduce, or a reduce-scatter of shards."""
        work, shards = self.work, self._shards
        topology = work.links.topology
        if shards > 1:
            scattered = work.links.gather(FLOAT_bytes * parameters, shards, inside=self._is_inside(shards))
            across = work.links.all_reduce(
                FLOAT_bytes * parameters / shards, topology.world // shards, inside=topology.hosts == 1
            )
            return add_seconds(scattered, across)
        ranks = topology.world // work.tensor_ranks
        return work.links.dense_sum(parameters // work.tensor_ranks, work.wire.dense, ranks, inside=topology.hosts == 1)

    def _update(self, reduces: tuple[str, ...]) -> StageWork:
        """Copies of gradients into and out of buckets, and the optimizer."""
        side, layers = self.work.side, self.work.layers
        held = layers.parameters / self._shards / self.work.tensor_ranks
        passes = UPDATE_PASSES + 2 * side.state_slots + (COPY_PASSES if self.work.links.topology.world > 1 else 0)
        seconds = passes * FLOAT_bytes * held / self.work.links.machine.hardware.device_Bps
        return StageWork("backward.update", "processor", {"memory": seconds}, reduces)

    def _is_inside(self, ranks: int) -> bool:
        topology = self.work.links.topology
        return topology.hosts == 1 or ranks <= topology.devices

    def _is_summed(self, k: int) -> bool:
        """Whether activations are summed after the forward of the k-th layer: after each second one of an MLP."""
        return self.work.tensor_ranks > 1 and self._index_in_mlp(k) % 2 == 1

    def _is_summed_back(self, k: int) -> bool:
        """The same for the backward of the layer that comes k-th in it."""
        return self.work.tensor_ranks > 1 and self._index_in_mlp(len(self._layers) - 1 - k) % 2 == 0

    def _index_in_mlp(self, k: int) -> int:
        """The place of the k-th layer in its MLP."""
        before = len(self.work.layers.before)
        return k if k < before else k - before

    def _awaited_sum(self, k: int) -> tuple[str, ...]:
        return (f"sum.{self._layers[k - 1].name}.forward",) if k and self._is_summed(k - 1) else ()

    def _activation_sum(self, layer: DenseLayer) -> Seconds:
        ranks = self.work.tensor_ranks
        size = FLOAT_bytes * self.work.samples * ranks * layer.rows * layer.outputs
        return self.work.links.all_reduce(size, ranks, inside=self._is_inside(ranks))
