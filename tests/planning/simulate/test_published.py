"""Published models: steps counted as their description does, against sums by hand; cut layers; files of models."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
from msgspec import structs
from planning.simulate.test_simulated_step import EMPTY, work_of

from rowwise.base.errors import SpecError
from rowwise.cli.simulate import simulate as simulate_command
from rowwise.planning.perf.dense_layers import DenseLayer, DenseLayers, parse_layers, side_of_layers
from rowwise.planning.perf.hardware import LinkRates, Machine, hardware_named
from rowwise.planning.perf.links import Network, NetworkHost, PairLink
from rowwise.planning.perf.timeline import steady_step
from rowwise.planning.planner.machines import machine_named
from rowwise.planning.simulate.links import Links
from rowwise.planning.simulate.published_models import published_names, read_published
from rowwise.planning.simulate.simulation import SimulatedMachine, choose_dense, simulate
from rowwise.planning.simulate.step import MICRO_BATCHES, SIMPLIFICATIONS, LayerCut
from rowwise.planning.simulate.sweep import Case, sweep

ALL = frozenset(SIMPLIFICATIONS)
MACHINE = machine_named("4x2xzionex:device=1TB")
SMALL = {
    "machine": "4x2xzionex", "batch": 800, "tables": {"count": 8, "rows": 1000, "dim": 16, "pooling": 10},
    "dense": "1100*4:1100*3",
}  # fmt: skip


def read_small(tmp_path, **changes):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL | changes))
    model = read_published(str(path))
    assert model is not None
    return model.simulated("small")


def step(model, dense="replicated", machine=MACHINE, **changes):
    chosen = replace(choose_dense(model, dense, machine.topology), **changes)
    return simulate(chosen, SimulatedMachine(machine=machine, even=True))


def described_s(dense, before, after, tables, *, training=True):
    """Two streams, the computation and the links: arXiv 2310.02784, on rings. `tables`: seconds of rows, of vectors."""
    rows_s, vectors_s = tables
    width, ranks, samples = 1100, 8, 100
    size = 4 * width * (width + 1) * (ranks - 1) / ranks / 119e9
    layer_s, gather_s = 2 * width**2 * samples / 110e12, size if dense == "full" else 0.0
    computed, sent = [rows_s], rows_s + vectors_s
    received = sent
    for k in range(before + after):
        sent = max(sent, computed[k - 1] if k >= 2 else 0.0) + gather_s
        waits = [computed[-1], sent if gather_s else 0.0, received if k == before else 0.0]
        computed.append(max(waits) + layer_s)
    if not training:
        return computed[-1]
    order, at = [computed[-1]], 0.0
    for k in range(before + after):
        if k == after:
            sent = at = max(sent, order[-1]) + vectors_s
        if gather_s:
            sent = max(sent, order[max(0, k - 1)]) + gather_s
        order.append(max(order[-1], sent if gather_s else 0.0) + 2 * layer_s)
        sent = max(sent, order[-1]) + size * (1 if dense == "full" else 2)
    return max(max(order[-1], at) + rows_s, sent)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dense", ["replicated", "full"])
@pytest.mark.parametrize("pooling", [10, 2000])
def test_a_step_counted_as_described_is_that_of_two_streams(tmp_path, dense, pooling, training):
    model = read_small(tmp_path, tables=SMALL["tables"] | {"pooling": pooling})
    looked_bytes = 8 * pooling * 16 * 2 * 100
    tables = (looked_bytes / 1.3e12, 2 * looked_bytes / 8 / 7e9)
    found = step(model, dense, simplified=ALL, training=training)
    assert found.step_s == pytest.approx(described_s(dense, 3, 2, tables, training=training), rel=1e-9)


@pytest.mark.parametrize(
    ("name", "millions"), [("dlrm-i", 3.059), ("dlrm-i-transformer", 1.341), ("dlrm-i-moe", 1.791)]
)
def test_the_rates_of_the_public_code_are_found(name, millions):
    published = read_published(name)
    found = simulate(published.simulated(name), SimulatedMachine(machine=machine_named(published.machine), even=True))
    assert found.counted[-1].samples_s / 1e6 == pytest.approx(millions, rel=0.002)
    assert [counted.what for counted in found.counted] == list(SIMPLIFICATIONS.values())
    assert found.published[-1].samples_s == pytest.approx(millions * 1e6)
    assert found.samples_s <= found.counted[0].samples_s  # ids travel


def test_each_simplification_leaves_out_what_it_names(tmp_path):
    model = read_small(tmp_path)
    ours = {stage.stage: stage.seconds for stage in step(model).stages}

    def left(name):
        return {stage.stage: stage.seconds for stage in step(model, simplified=frozenset({name})).stages}

    assert ours["route.ids"] > 0 == left("ids")["route.ids"]
    assert ours["backward.update"] > 0 == left("optimizer")["backward.update"]
    names = list(left("optimizer"))
    assert names.index("backward.update") > names.index("update")
    assert left("rows")["lookup"] == left("rows")["update"] == pytest.approx(8 * 10 * 16 * 2 * 100 / 1.3e12)
    assert left("latency")["exchange.send"] == pytest.approx(ours["exchange.send"] - 20e-6)
    assert left("vectors")["exchange.send"] == pytest.approx(20e-6 + 2 * 8 * 10 * 16 * 2 * 100 / 8 / 7e9)


def cut_work(cut, layers="4,4:4,4,4"):
    """The step of 4 hosts of 2 devices: a byte a second inside hosts, two between them, an operation a second."""
    topology = machine_named("4x2xcpu").topology
    near, far = (LinkRates(all_to_all_Bps=rate, reduce_scatter_Bps=rate, all_reduce_Bps=rate) for rate in (1.0, 2.0))
    hardware = structs.replace(hardware_named("zionex"), host=near, network=far, flops=1.0)
    layers = parse_layers(layers) if isinstance(layers, str) else layers
    tables = replace(EMPTY, transfers={"exchange.send": {"network": 5.0}})
    return work_of(Links(Machine(topology, hardware)), tables, layers, cut=cut, vectors_bytes=3.0)


def seconds_of(cut, layers="4,4:4,4,4"):
    work = cut_work(cut, layers)
    return {stage.name: sum(float(np.max(x)) for x in stage.causes.values()) for stage in work.works()}


def test_layers_cut_by_tensors_by_hand():
    for cut, summed_s, reduced_s in ((LayerCut("tp", 2), 32.0, 90.0), (LayerCut("tp", 4, across=True), 48.0, 60.0)):
        found = seconds_of(cut)
        sums = {name: seconds for name, seconds in found.items() if name.startswith("sum.")}
        assert sums == dict.fromkeys(("sum.top.1.forward", "sum.top.0.backward", "sum.bottom.0.backward"), summed_s)
        assert (found["forward.top.0"], found["backward.top.0"]) == (32.0, 64.0)
        assert found["reduce.0"] == reduced_s  # 60 parameters, over the ranks with the same part
        assert found["exchange.send"] == 5.0


def test_samples_travel_to_their_experts_and_back():
    after = (DenseLayer("top.0", 4, 4, parameters=80, experts=4, active=2),)
    found = seconds_of(LayerCut("tp", 4, across=True), DenseLayers(after=after))
    routed = {name: seconds for name, seconds in found.items() if name.startswith("experts.")}
    ways = ("forward.to", "forward.from", "backward.to", "backward.from")
    assert routed == {f"experts.top.0.{way}": 8.0 for way in ways}  # 4 samples of 16 bytes, a quarter to each expert
    assert found["forward.top.0"] == 64.0
    assert side_of_layers(DenseLayers(after=after)).shapes.units == (((16, 4), (16,)),)


def test_a_pipeline_fills_and_empties_and_one_part_has_the_vectors():
    found = seconds_of(LayerCut("pp", 2))
    assert MICRO_BATCHES * 2 == 8
    assert found["send.forward"] == found["send.backward"] == 32.0
    assert (found["fill.forward"], found["fill.backward"]) == ((96 + 32) / 8, (192 + 32) / 8)
    assert found["reduce.0"] == 90.0
    assert found["exchange.send"] == 5.0 + 3.0  # passed on inside the host
    assert seconds_of(LayerCut("pp", 4, across=True), "4,4:4,4,4,4")["exchange.send"] == 20.0
    # Forwards of 96 and their fill of 16, backwards of 192 and the sum of 90: activations travel beside them.
    assert steady_step(cut_work(LayerCut("pp", 2)).stages(1)).step_s == pytest.approx(96 + 16 + 192 + 90)


def test_a_network_limits_what_ranks_of_several_hosts_send():
    machine, hosts = machine_named("4x2xcpu"), tuple(NetworkHost(name=f"h{k}", devices=2) for k in range(4))
    network = Network(
        hosts=hosts, link=PairLink(latency_s=0.5, rate_Bps=10.0), groups=(0, 0, 1, 1), uplink_Bps=(8.0, 8.0)
    )
    links = Links(machine, network.arrays())
    # A host sends 60 bytes, a third of them to each other host; a group sends 80 of its 120 through its uplink.
    assert links.send(30.0, inside=False) == pytest.approx({"network": 6.0, "uplink": 4.0, "latency": 0.5})
    assert links.send(30.0, inside=True) == Links(machine).send(30.0, inside=True)


def test_cut_layers_take_less_memory_and_are_not_run_here(tmp_path):
    model = read_small(tmp_path)
    whole = step(model).memory[0].dense_bytes
    for dense in ("tp:2", "tp:hosts", "pp:2", "pp:hosts"):
        found = step(model, dense)
        assert (found.dense, found.runs_here) == (dense, False)
        assert found.memory[0].dense_bytes < whole
    assert "fill.forward" in {stage.stage for stage in step(model, "pp:2").stages}
    for dense, why in (
        ("pp:8", "8 parts of 5 layers"),
        ("tp:x", "expected replicated"),
        ("full:2", "expected replicated"),
    ):
        with pytest.raises(SpecError, match=why):
            step(model, dense)
    with pytest.raises(SpecError, match="dense=pp:hosts on one host: expected several hosts, or pp:RANKS"):
        step(model, "pp:hosts", machine_named("8xzionex"))


def test_an_inference_is_a_forward(tmp_path):
    model = read_small(tmp_path)
    found = step(model, training=False)
    assert not any(
        stage.stage.startswith(("backward.", "reduce.", "return.")) and stage.seconds for stage in found.stages
    )
    assert found.step_s < step(model).step_s
    assert not found.runs_here


def test_more_memory_is_never_slower_for_tables_that_are_shared_evenly():
    case = Case(
        read_published("dlrm-f").simulated("f"), SimulatedMachine(machine=machine_named("16x8xzionex"), even=True)
    )
    rows = sweep(case, {"memory": ("2GB", "40GB", "8GB", "160GB", "200GB")}).rows
    assert [row.settings["memory"] for row in rows] == ["200GB", "160GB", "40GB", "8GB", "2GB"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"batch": 0}, "batch"),
        ({"tables": {"count": 0, "rows": 1, "dim": 1, "pooling": 1}}, "count"),
        ({"tables": {"count": 1, "rows": 0, "dim": 1, "pooling": 1}}, "table 't0' is 0 x 1"),
        ({"dense": "5"}, "--dense '5': expected widths"),
        ({"rows": 3}, "unknown field `rows`"),
        ({"blocks": {"count": 1, "vectors": 4, "layers": [[0, 3]]}}, "layers"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path, changes, why):
    with pytest.raises(SpecError, match=re.escape(why)):
        read_small(tmp_path, **changes)


def test_the_help_names_all_published_models():
    (option,) = get_type_hints(simulate_command, include_extras=True)["recipe"].__metadata__
    assert set(published_names()) <= set(re.findall(r"[a-z-]+", option.help))


def test_other_names_and_changes_of_recipes_are_refused(refused):
    err = refused("simulate", "dlrm-aa", "--topology", "8xzionex")
    assert "no recipe or published model 'dlrm-aa': expected a recipe of `rowwise ls`, a path, or one of dlrm-a," in err
    assert "did you mean 'dlrm-a'?" in err
    assert "--set with dlrm-i, which is no recipe" in refused("simulate", "dlrm-i", "--set", "train.batch=2")


def test_a_model_of_a_file_is_swept(command, tmp_path):
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    code, out, err = command("simulate", str(tmp_path / "small.json"), "--vary", "task=training,inference", "--json")
    assert (code, err) == (0, "")
    assert {row["settings"]["task"] for row in json.loads(out)["rows"]} == {"training", "inference"}


def test_what_was_published_is_shown_beside_the_step(command):
    code, out, _ = command("simulate", "dlrm-i", "--html", "i.html")
    assert code == 0
    assert "paper   3.4 M samples/s, measured on 128 GPUs of ZionEX (arXiv 2104.05158)" in out
    assert re.search(r"exchanges of looked-up rows .* 3\.05\d M", out)
    assert "Counted as in the paper" in Path("i.html").read_text()
    assert "paper" not in command("simulate", "dlrm-i", "--topology", "32x8xzionex")[1]
