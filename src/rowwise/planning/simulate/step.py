"""A training step of ours as stages: the seconds of each by rank and cause, in the order of the program.

Stages are named as in `planning/perf/step_program.py`, with layers and collectives as their parts: `forward.bottom.0`,
`reduce.2`. Vectors and gradients travel while layers compute that do not need them.

Ranks can cut dense layers between them, which this library does not run: each layer by its columns and rows in turn
(tp), or the stack into parts that work on micro-batches one after the other (pp).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.dense_layers import DenseLayer, DenseLayers
from rowwise.planning.perf.dense_parallel import BF16_bytes, DenseSide, FLOAT_bytes
from rowwise.planning.perf.step_program import StageRef, TimelineStage, look_ahead
from rowwise.planning.simulate.links import Cause, Links, Seconds, add_seconds, scale_seconds
from rowwise.planning.simulate.traffic import Flow
from rowwise.tables.spec import FLOATS, FarType, Topology, Value, Wire

BUCKET_bytes = 4 << 20  # least size of a bucket of gradients
UPDATE_PASSES = 3  # over the numbers of a parameter and its gradient; and two over each number of optimizer state
COPY_PASSES = 4  # into a bucket, and out of it
BETWEEN_RANKS = ("route", "exchange", "return", "reduce")  # stages that one rank does not have
FORWARD = ("data", "route", "prefetch", "lookup", "exchange", "forward")  # stages that an inference has, too
MICRO_BATCHES = 4  # of a pipeline, for each of its parts
VECTORS = ("exchange.send", "return.send")
# How a published description (arXiv 2310.02784) counts a step otherwise than this library; see `simplified_tables`.
Simplification = Literal["ids", "optimizer", "rows", "latency", "vectors"]
SIMPLIFICATIONS: Mapping[Simplification, str] = {
    "ids": "no ids travel",
    "optimizer": "rows wait for no dense sums, and the dense optimizer takes no time",
    "rows": "tables move rows alone",
    "latency": "no latency",
    "vectors": "exchanges of looked-up rows over the ranks, twice, instead of vectors",
}


class LayerCut(Value, frozen=True):
    """Ranks that cut dense layers between them; not run by this library."""

    kind: Literal["tp", "pp"] = "tp"
    ranks: int = 1
    across: bool = False  # a rank of each host; otherwise consecutive ranks

    def is_inside(self, topology: Topology) -> bool:
        """Whether the ranks that share a layer are on one host."""
        return topology.hosts == 1 or (not self.across and self.ranks <= topology.devices)

    def __str__(self) -> str:
        return f"{self.kind}:{'hosts' if self.across else self.ranks}"


UNCUT = LayerCut()


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
    vectors_bytes: float = 0.0  # of a sample
    cut: LayerCut = UNCUT
    training: bool = True  # False leaves out the backward and the update
    simplified: frozenset[Simplification] = frozenset()

    def stages(self, depth: int, speedups: Mapping[Cause, float] | None = None) -> tuple[TimelineStage, ...]:
        """The program with `depth` steps in flight."""
        free: dict[Cause, float] = {"latency": float("inf")} if "latency" in self.simplified else {}
        works = [(work, work.seconds_W(free | dict(speedups or {}))) for work in self.works()]
        slowdown_W = self._slowdown_W(works)
        listed = [
            TimelineStage(
                name=work.name,
                resource=work.resource,
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
        dense = _DenseStages(self)
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
            *dense.forward(),
            *(self._trained(dense) if self.training else (StageWork("update", "processor", {}),)),
            *self._overheads(),
        ]

    def _trained(self, dense: "_DenseStages") -> Iterator[StageWork]:
        """The backward and the updates: a bad gradient changes no row, so rows wait for the sums of dense gradients."""
        tables = self.tables
        sums = ("update.sums",) if "update.sums" in tables.transfers else ()  # of replicated tables, and over columns
        backward = list(dense.backward())
        yield from backward
        update = dense.update(tuple(stage.name for stage in backward if stage.name.startswith(("reduce.", "fill."))))
        waits = "optimizer" not in self.simplified
        yield from (update,) if waits else ()
        yield from self.send("update.sums", "return.inside") if sums else ()
        yield StageWork("update", "processor", {"memory": tables.update_W}, ("return.inside", *sums))
        yield StageWork("write back", "host link", {"host link": tables.store_W}, ("update",))
        yield from () if waits else (replace(update, causes={}),)

    def _overheads(self) -> Iterator[StageWork]:
        """Fixed overheads of stages, wherever in the step."""
        world = self.links.topology.world
        for overhead in self.links.machine.hardware.overheads:
            if (world > 1 or overhead.stage not in BETWEEN_RANKS) and (self.training or overhead.stage in FORWARD):
                yield StageWork(f"{overhead.stage}.overhead", "processor", {"device": overhead.seconds})

    def send(self, name: str, *after: str) -> Iterator[StageWork]:
        seconds = self.tables.transfers.get(name, {})
        if self.cut.kind == "pp" and name in VECTORS:
            seconds = self._to_one_part(seconds)
        return self.transfer(name, seconds, *after)

    def _to_one_part(self, seconds: Seconds) -> Seconds:
        """An exchange with the ranks of one part of a pipeline alone; inside a host, others pass its vectors on."""
        if not self.cut.is_inside(self.links.topology):
            return scale_seconds(seconds, self.cut.ranks)
        passed_bytes = (self.cut.ranks - 1) * self.samples * self.vectors_bytes
        return add_seconds(seconds, self.links.send(passed_bytes, inside=True))

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

    def forward(self) -> Iterator[StageWork]:
        yield from self._piped("forward", [*self._forward_all()])
        filled = ("fill.forward",) if self._is_pipeline else ()
        yield StageWork("backward.top", "processor", {}, (*self._awaited(len(self._layers)), *filled))

    def _forward_all(self) -> Iterator[StageWork]:
        layers = self.work.layers
        yield from self._forward(layers.before, ())
        summed = self._awaited(len(layers.before))
        yield StageWork("forward.vectors", "processor", {}, ("exchange.send", *summed))
        yield from self._forward(layers.after, layers.before)

    def backward(self) -> Iterator[StageWork]:
        yield from self._piped("backward", [*self._backward()], "backward.top")

    @property
    def _is_pipeline(self) -> bool:
        return self.work.cut.kind == "pp" and self.work.cut.ranks > 1

    def _piped(self, direction: str, stages: Sequence[StageWork], *after: str) -> Iterator[StageWork]:
        """The stages; of a pipeline also what its parts send each other, and the time in which it fills and empties."""
        if not self._is_pipeline:
            yield from stages
            return
        cut, layers = self.work.cut, self._layers
        last = [layers[part * len(layers) // cut.ranks - 1] for part in range(1, cut.ranks)]
        numbers = max(layer.rows * layer.outputs for layer in last) * self.work.samples * cut.ranks
        sent = self.work.links.send(FLOAT_bytes * numbers, inside=cut.is_inside(self.work.links.topology))
        yield from self.work.transfer(f"send.{direction}", sent, *after)
        yield from stages
        computing = [stage for stage in stages if stage.resource == "processor"]
        computed: Seconds = {"device": sum(float(np.max(stage.causes.get("device", 0.0))) for stage in computing)}
        idle = scale_seconds(add_seconds(computed, sent), (cut.ranks - 1) / (MICRO_BATCHES * cut.ranks))
        yield StageWork(f"fill.{direction}", "pipeline", idle, (f"send.{direction}", computing[-1].name))

    @property
    def _shards(self) -> int:
        return self.work.side.shards_on(self.work.links.topology)

    def _forward(self, layers: Sequence[DenseLayer], before: Sequence[DenseLayer]) -> Iterator[StageWork]:
        for k, layer in enumerate(layers, len(before)):
            gathered = self._gather(k, "forward", self._layers)
            yield from gathered
            previous = (f"forward.{self._layers[k - 1].name}",) if k else ()
            waited = ("forward.vectors",) if k == len(self.work.layers.before) else previous
            routed = self._to_experts(layer, "forward.to", *waited)
            yield from routed
            waits = (stage.name for stage in (*gathered, *routed))
            yield self._compute(layer, "forward", (*waits, *self._awaited(k)))
            if self._is_summed(k):
                yield from self.work.transfer(
                    f"sum.{layer.name}.forward", self._activation_sum(layer, layer.outputs), f"forward.{layer.name}"
                )
            yield from self._to_experts(layer, "forward.from", f"forward.{layer.name}")

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
            routed = self._to_experts(layer, "backward.to", f"backward.{order[k - 1].name}" if k else "backward.top")
            yield from routed
            yield self._compute(layer, "backward", (*(stage.name for stage in (*gathered, *routed)), *summed))
            if self._is_summed_back(k):
                yield from self.work.transfer(
                    f"sum.{layer.name}.backward", self._activation_sum(layer, layer.inputs), f"backward.{layer.name}"
                )
            yield from self._to_experts(layer, "backward.from", f"backward.{layer.name}")
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

    def _to_experts(self, layer: DenseLayer, way: str, *after: str) -> list[StageWork]:
        """Samples on their way to the ranks of their experts, or back: one expert's share of those of the ranks."""
        cut = self.work.cut
        if not self._is_cut or layer.experts == 1:
            return []
        size = FLOAT_bytes * self.work.samples * cut.ranks * layer.outputs / layer.experts
        sent = self.work.links.send(size, inside=cut.is_inside(self.work.links.topology))
        return list(self.work.transfer(f"experts.{layer.name}.{way}", sent, *after))

    def _compute(self, layer: DenseLayer, direction: str, after: tuple[str, ...]) -> StageWork:
        """Ranks that cut layers between them compute their part for the samples of them all."""
        share = self.work.cut.ranks
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
        first = ("backward.top",) if direction == "backward" else ()
        after = (f"{direction}.{order[k - ahead].name}",) if k >= ahead else first
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
        ranks, inside = topology.world // work.cut.ranks, topology.hosts == 1 or work.cut.across
        return work.links.dense_sum(parameters // work.cut.ranks, work.wire.dense, ranks, inside=inside)

    def update(self, reduces: tuple[str, ...]) -> StageWork:
        """Copies of gradients into and out of buckets, and the optimizer."""
        side, layers = self.work.side, self.work.layers
        held = layers.parameters / self._shards / self.work.cut.ranks
        passes = UPDATE_PASSES + 2 * side.state_slots + (COPY_PASSES if self.work.links.topology.world > 1 else 0)
        seconds = passes * FLOAT_bytes * held / self.work.links.machine.hardware.device_Bps
        return StageWork("backward.update", "processor", {"memory": seconds}, reduces)

    def _is_inside(self, ranks: int) -> bool:
        topology = self.work.links.topology
        return topology.hosts == 1 or ranks <= topology.devices

    def _is_summed(self, k: int) -> bool:
        """Whether activations are summed after the forward of the k-th layer: after each second one of an MLP."""
        return self._is_cut and self._index_in_mlp(k) % 2 == 1

    def _is_summed_back(self, k: int) -> bool:
        """The same for the backward of the layer that comes k-th in it."""
        return self._is_cut and self._index_in_mlp(len(self._layers) - 1 - k) % 2 == 0

    @property
    def _is_cut(self) -> bool:
        """Whether ranks share each layer."""
        return self.work.cut.kind == "tp" and self.work.cut.ranks > 1

    def _index_in_mlp(self, k: int) -> int:
        """The place of the k-th layer in its MLP."""
        before = len(self.work.layers.before)
        return k if k < before else k - before

    def _awaited(self, k: int) -> tuple[str, ...]:
        """Transfers after the forward of the layer before the k-th."""
        if not k or not self._is_cut:
            return ()
        layer, summed = self._layers[k - 1], self._is_summed(k - 1)
        routed = (f"experts.{layer.name}.forward.from",) if layer.experts > 1 else ()
        return (*routed, *((f"sum.{layer.name}.forward",) if summed else ()))

    def _activation_sum(self, layer: DenseLayer, width: int) -> Seconds:
        cut = self.work.cut
        size = FLOAT_bytes * self.work.samples * cut.ranks * layer.rows * width
        return self.work.links.all_reduce(size, cut.ranks, inside=cut.is_inside(self.work.links.topology))
