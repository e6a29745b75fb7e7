"""MAD-Max's published description of models and of ZionEX as data, and its schedule on our timeline.

Its byte counts are its own, not ours: an exchange moves the looked-up rows over the ranks, twice, and not pooled
vectors; layers are square, and one with experts computes the active ones. Written anew from the description (arXiv
2310.02784), whose code was run beside it once.
"""

from typing import NamedTuple

from rowwise.planning.perf.step_program import StageRef, TimelineStage
from rowwise.planning.perf.timeline import stage_times

FLOAT_bytes, ROW_bytes = 4, 2  # of a weight, and of a number of a row
AHEAD = 2  # layers whose weights are gathered before they are needed


class MadMaxModel(NamedTuple):
    """Square layers before and after the vectors, and equal tables."""

    bottom: int
    top: int
    width: int
    tables: int
    rows: int
    dim: int
    pooling: int
    experts: int = 1  # of each layer after the vectors
    active: int = 1


class MadMaxSystem(NamedTuple):
    """Rates that are reached."""

    world: int
    devices: int
    flops: float
    memory_Bps: float
    host_Bps: float  # of links inside a host
    network_Bps: float
    near: float  # weight of the links inside a host in the rate of sums over all ranks

    @property
    def sum_Bps(self) -> float:
        return self.near * self.host_Bps + (1 - self.near) * self.network_Bps


ZIONEX = MadMaxSystem(
    world=128, devices=8, flops=156e12 * 0.705, memory_Bps=1555e9 * 0.836, host_Bps=12 * 25e9 * 0.6667,
    network_Bps=12.5e9 * 0.56, near=0.2746,
)  # fmt: skip
DEVICE_bytes = 40e9
MODELS = {
    "DLRM-A": MadMaxModel(bottom=10, top=10, width=3994, tables=4096, rows=2_080_000, dim=94, pooling=15),
    "DLRM-I": MadMaxModel(bottom=22, top=22, width=826, tables=512, rows=7_050_000, dim=92, pooling=70),
    "DLRM-F": MadMaxModel(bottom=4, top=4, width=560, tables=64, rows=732_000_000, dim=256, pooling=20),
}
SAMPLES = 512  # of a rank


class Layer(NamedTuple):
    """A layer by its name, its number in its MLP, and its experts."""

    name: str
    number: int
    experts: int
    active: int


def table_bytes(model: MadMaxModel, system: MadMaxSystem = ZIONEX) -> float:
    """Of a rank."""
    return model.tables * model.rows * model.dim * ROW_bytes / system.world


def rate(model: MadMaxModel, dense: str = "ddp", *, training: bool = True) -> float:
    """Samples a second with dense layers replicated (ddp), sharded (fsdp), or cut in each of two hosts (tp)."""
    program = Program(model, dense)
    program.forward()
    if training:
        program.backward()
    last = max(float(times.end_W.max()) for times in stage_times(program.stages, 1))
    return SAMPLES * ZIONEX.world / last


class Program:
    """The stages of a step in MAD-Max's order."""

    def __init__(self, model: MadMaxModel, dense: str) -> None:
        self.model, self.dense, self.stages = model, dense, list[TimelineStage]()
        self.ranks = 16 if dense == "tp" else 1  # that share a layer
        before = [Layer(f"bot{k}", k, 1, 1) for k in range(model.bottom)]
        after = [Layer(f"top{k}", k, model.experts, model.active) for k in range(model.top)]
        self.layers = [*before, *after]
        looked_bytes = model.tables * model.pooling * model.dim * ROW_bytes * SAMPLES
        self.lookup_s = looked_bytes / ZIONEX.memory_Bps
        self.exchange_s = 2 * looked_bytes / ZIONEX.world / ZIONEX.network_Bps

    def add(self, name: str, resource: str, seconds: float, *after: str) -> None:
        waits = tuple(StageRef(one) for one in after if one)
        self.stages.append(TimelineStage(name=name, resource=resource, seconds_W=(seconds,), after=waits))

    def forward(self) -> None:
        self.add("lookup", "processor", self.lookup_s)
        self.add("vectors", "link", self.exchange_s, "lookup")
        self._run("f", self.layers, ())

    def backward(self) -> None:
        self._run("b", self.layers[::-1], tuple(stage.name for stage in self.stages))
        self.add("rows", "processor", self.lookup_s, "gradients")

    def _run(self, way: str, order: list[Layer], first: tuple[str, ...]) -> None:
        """`first`: what the first layer waits for."""
        for k, layer in enumerate(order):
            if way == "b" and layer.name == f"bot{self.model.bottom - 1}":
                self.add("gradients", "link", self.exchange_s, "top0b", self._named("top0b sum"))
            waits = [*(first if k == 0 else ()), *self._gather(way, order, k, first)]
            if way == "f" and layer.name == "top0":
                waits.append("vectors")
            waits.append(self._named(f"{order[k - 1].name}{way} sum") if k else "")
            waits.append(self._to_experts(way, layer, first if k == 0 else (), "to"))
            operations = 2 * self.model.width**2 * layer.active * SAMPLES * self.ranks
            seconds = (1 if way == "f" else 2) * operations / self.ranks / ZIONEX.flops
            self.add(f"{layer.name}{way}", "processor", seconds, *waits)
            self._sums(way, layer)

    def _weights_bytes(self, layer: Layer) -> float:
        return self.model.width**2 * FLOAT_bytes * layer.experts

    def _gather(self, way: str, order: list[Layer], k: int, first: tuple[str, ...]) -> list[str]:
        if self.dense != "fsdp":
            return []
        name = f"{order[k].name}{way} gather"
        before = [f"{order[k - AHEAD].name}{way}"] if k >= AHEAD else []
        waits = [*before, *(first if k == 0 else ())]
        self.add(name, "link", self._weights_bytes(order[k]) / (2 * ZIONEX.sum_Bps), *waits)
        return [name]

    def _sums(self, way: str, layer: Layer) -> None:
        done, weights = f"{layer.name}{way}", self._weights_bytes(layer)
        if self.dense == "tp":
            if way == "b":
                self.add(f"{done} reduce", "link", weights / self.ranks / ZIONEX.host_Bps, done)
            if layer.number % 2 == (1 if way == "f" else 0):
                size = SAMPLES * self.ranks * self.model.width * FLOAT_bytes
                self.add(f"{done} sum", "link", size / ZIONEX.sum_Bps, done)
            self._to_experts(way, layer, (done,), "from")
        elif way == "b":
            rate_Bps = ZIONEX.sum_Bps * (2 if self.dense == "fsdp" else 1)
            self.add(f"{done} reduce", "link", weights / rate_Bps, done)

    def _to_experts(self, way: str, layer: Layer, waits: tuple[str, ...], where: str) -> str:
        """Samples to their experts, and back."""
        if self.dense != "tp" or layer.experts == 1:
            return ""
        size = SAMPLES * self.ranks * self.model.width * FLOAT_bytes / layer.experts
        name = f"{layer.name}{way} {where}"
        self.add(name, "link", size / ZIONEX.network_Bps, *waits)
        return name

    def _named(self, name: str) -> str:
        """The name, if there is such a stage."""
        return name if any(stage.name == name for stage in self.stages) else ""
