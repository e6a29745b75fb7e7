"""Is `rowwise simulate` right? The part of `network.py` about simulated steps.

Published steps by their own description, to three digits; and the same models by our bytes and tiers.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace

from parts.madmax import MODELS, DEVICE_bytes, MadMaxModel, ROW_bytes, rate, table_bytes
from parts.report import at_least, at_most, exactly
from rowwise.planning.perf.access import Access, Workload
from rowwise.planning.perf.dense_layers import parse_layers, side_of_layers
from rowwise.planning.perf.step_program import TimelineStage
from rowwise.planning.perf.timeline import steady_step
from rowwise.planning.planner.machines import machine_named
from rowwise.planning.simulate.loads import MissingMemory
from rowwise.planning.simulate.simulation import (
    SimulatedMachine,
    SimulatedModel,
    make_request,
    simulate,
    step_work,
    table_loads,
)
from rowwise.tables.row_optimizers import Sgd
from rowwise.tables.spec import Codecs, RowType, Table, Wire, WireType

DIGITS = 0.0005  # of published numbers of three digits, relative to 1
PUBLISHED = {  # millions of samples a second, as their code prints them
    "DLRM-A": ("DLRM-A", "ddp", 1.214),
    "DLRM-I": ("DLRM-I", "ddp", 3.059),
    "DLRM-A, fully sharded": ("DLRM-A", "fsdp", 0.898),
}
WAYS = ("fsdp", "ddp", "tp")
HALVES = Codecs(forward=WireType.FP16, backward=WireType.FP16)


def simulate_floors(args: argparse.Namespace) -> tuple[list[dict], dict]:
    """Floors, and what was measured."""
    floors, found = [], {}
    for part in (published, ours):
        more, values = part()
        floors += more
        found[part.__name__] = values
    return floors, found


def published() -> tuple[list[dict], dict]:
    """The published description through our timeline."""
    rows = {name: rate(MODELS[model], dense) / 1e6 for name, (model, dense, _) in PUBLISHED.items()}
    floors = [
        at_most(f"{name}: millions of samples/s, off {wanted}", abs(rows[name] - wanted), DIGITS)
        for name, (*_, wanted) in PUBLISHED.items()
    ]
    experts = MODELS["DLRM-A"]._replace(experts=16, active=2)
    for training, wanted in ((True, 2.26), (False, 5.23)):
        rates = {way: rate(experts, way, training=training) for way in WAYS}
        factor = max(rates.values()) / rates["fsdp"]
        name = "DLRM-A with experts, best over fully sharded, " + ("training" if training else "inference")
        rows[name] = factor
        floors.append(at_most(f"{name}, off {wanted}", abs(factor - wanted), 10 * DIGITS))
    need = table_bytes(MODELS["DLRM-F"]) / 1e9
    floors.append(at_least("DLRM-F: GB of tables of a device, of 40", need, DEVICE_bytes / 1e9))
    return floors, rows


def as_ours(model: MadMaxModel, batch: int = 65536, *, ids_beside: bool = False) -> SimulatedModel:
    """The same tables and layers, with pooled vectors in 16 bits on the wire."""
    tables = [
        Table(name=f"t{k}", rows=model.rows, dim=model.dim, row_type=RowType.FP16, optimizer=Sgd())
        for k in range(model.tables)
    ]
    layers = parse_layers(f"{model.width}*{model.bottom + 1}:{model.width}*{model.top + 1}")
    return SimulatedModel(
        name="",
        workloads=tuple(Workload(table=table, access=Access(pooling=model.pooling)) for table in tables),
        layers=layers,
        side=side_of_layers(layers, state_slots=0),
        batch=batch,
        wire=Wire(host=HALVES, network=HALVES),
        ids_beside=ids_beside,
    )


def ours() -> tuple[list[dict], dict]:
    """By our bytes and tiers; ids on links of their own are what the description has, and ours are on the network."""
    rows: dict[str, float] = {}
    floors = []
    place = SimulatedMachine(machine=machine_named("16x8xzionex"), even=True)
    wanted = {"DLRM-A": (0.38, 0.48), "DLRM-I": (2.4, 3.4), "DLRM-F": (1.7, 2.6)}
    for name, (least, most) in wanted.items():
        for beside in (True, False):
            found = simulate(as_ours(MODELS[name], ids_beside=beside), place, explain=False)
            rows[f"{name}, ids {'beside' if beside else 'on the network'}"] = found.samples_s / 1e6
        value = rows[f"{name}, ids beside"]
        floors += [at_least(f"{name}: millions of samples/s by our bytes", value, least)]
        floors += [at_most(f"{name}: millions of samples/s by our bytes", value, most)]
    for name, wanted in (("DLRM-A", 0.48), ("DLRM-I", 2.90)):
        ladder = as_described(MODELS[name])
        rows |= {f"{name}, {change}": value for change, value in ladder.items()}
        off = abs([*ladder.values()][-1] / wanted - 1)
        floors.append(at_most(f"{name} as its description schedules it: off {wanted} million samples/s", off, 0.05))
    below = SimulatedMachine(machine=machine_named("16x8xzionex:device=2GB"), even=True)
    value = rows["DLRM-F, rows in host memory"] = simulate(as_ours(MODELS["DLRM-F"]), below).samples_s / 1e6
    floors.append(at_least("DLRM-F, rows in host memory: millions of samples/s", value, 1.5))
    floors.append(at_most("DLRM-F, rows in host memory: millions of samples/s", value, 2.0))
    alone = SimulatedMachine(machine=machine_named("16x8xzionex:host=0GB"), even=True)
    refused = simulate(as_ours(MODELS["DLRM-F"]), alone)
    floors.append(exactly("DLRM-F without host memory is refused", refused.step_s is None, True))
    rows["DLRM-F, GB that a rank lacks"] = refused.lacking_bytes / 1e9
    return floors, rows


def as_described(model: MadMaxModel) -> dict[str, float]:
    """Millions of samples a second as one after another of what our step does beyond the description is taken away."""
    simulated, place = (
        as_ours(model, ids_beside=True),
        SimulatedMachine(machine=machine_named("16x8xzionex"), even=True),
    )
    loads = table_loads(simulated, place, make_request(simulated, place.machine))
    assert not isinstance(loads, MissingMemory)
    stages = step_work(simulated, place, loads).stages(simulated.depth)
    rows_bytes = model.tables * model.pooling * model.dim * ROW_bytes * simulated.batch / place.machine.topology.world
    rows_s = rows_bytes / place.machine.hardware.device_Bps
    alone = {"lookup": (rows_s,), "update": (2 * rows_s,)}
    changes: dict[str, Callable[[TimelineStage], TimelineStage | None]] = {
        "ids travel when their links are free": lambda s: replace(s, after=()) if s.name == "route.unpack" else s,
        "rows wait for no dense sum": lambda s: None if s.name == "backward.update" else s,
        "tables move rows alone": lambda s: replace(s, seconds_W=alone.get(s.name, s.seconds_W)),
    }
    found = {}
    for name, change in changes.items():
        stages = tuple(changed for stage in stages if (changed := change(stage)) is not None)
        found[name] = simulated.batch / steady_step(stages).step_s / 1e6
    return found
