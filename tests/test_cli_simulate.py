"""`rowwise simulate` as users meet it: a machine and a model in, a step out, one line for what is wrong."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from rowwise.parallel.plan import Plan
from rowwise.planning.perf.links import Network, NetworkHost, PairLink
from rowwise.planning.simulate.simulation import describe_wire
from rowwise.recipes.find import load
from rowwise.tables.spec import Codecs, Wire, WireType

LINES = "name,rows,dim,pooling,zipf_a\nuser,2000000,64,1,1.05\nitem,500000,64,20,1.2\nsite,20000,16,1,\n"
DENSE = ("--dense", "13,64,32:80,64,1")


@pytest.fixture
def tables(tmp_path):
    (tmp_path / "tables.csv").write_text(LINES)


@pytest.fixture
def ok(command, tables):
    def run(*args, machine="2x4xzionex"):
        code, out, err = command("simulate", "--tables", "tables.csv", "--topology", machine, *DENSE, *map(str, args))
        assert code == 0, err
        return out

    return run


@pytest.fixture
def refused(refused, tables):
    return partial(refused, "simulate")


def test_a_step_is_shown_with_what_would_help(ok):
    out = ok()
    assert "8 ranks: 2 hosts of 4 zionex" in out
    assert "samples/s" in out
    for words in ("busy", "exposed", "what would help", "limits  ", "note    rates of a data sheet: rates published"):
        assert words in out


@pytest.mark.slow
def test_the_same_question_has_the_same_answer(ok):
    settings = ("hosts=2,4", "batch=64k,128k", "dense=replicated,full", "wire=fp32,int8")
    vary = [word for one in settings for word in ("--vary", one)]
    first = ok(*vary)
    assert ok(*vary) == first
    assert "best    lossless: " in first
    assert "best    lossy: " in first
    assert "what would help" in first


def test_json_pages_and_traces_are_written(ok):
    found = json.loads(ok("--json", "--html", "one.html", "--trace", "step.json"))
    assert found["step_s"] > 0
    assert "<table" in Path("one.html").read_text()
    names = {event["name"] for event in json.loads(Path("step.json").read_text())["traceEvents"]}
    assert {"lookup", "forward.top.0", "backward.top.0", "update", "process_name"} <= names
    swept = json.loads(ok("--json", "--html", "many.html", "--vary", "hosts=1,2"))
    assert [row["settings"]["hosts"] for row in swept["rows"]]
    assert "Combinations" in Path("many.html").read_text()


def test_plans_and_even_loads(ok, command):
    command("plan", "--tables", "tables.csv", "--topology", "2x4xzionex", "--seconds", "0.02", "--json", "plan.json")
    assert "samples/s" in ok("--plan", "plan.json")
    assert "samples/s" in ok("--even", machine="512x8xzionex")


def test_a_network_is_read(ok):
    link = PairLink(latency_s=1e-5, rate_Bps=1e9)
    hosts = tuple(NetworkHost(name=f"h{k}", devices=4) for k in range(2))
    Path("net.json").write_text(Network(hosts=hosts, link=link, groups=(0, 1), uplink_Bps=(1e8, 1e8)).to_json())
    assert "uplink twice as fast" in ok("--network", "net.json")


def test_a_recipe_is_simulated_with_its_own_layers(command):
    code, out, err = command("simulate", "dlrm-synthetic", "--topology", "2x4xh100-like", "--json")
    assert (code, err) == (0, "")
    found, layers = json.loads(out), load("dlrm-synthetic").model
    assert found["batch"] == load("dlrm-synthetic").train.batch
    forward = [stage["stage"] for stage in found["stages"] if stage["stage"].startswith("forward.")]
    assert (
        len([name for name in forward if name.startswith("forward.bottom.")]) == len(layers.bottom) + 1
    )  # to the dim of tables
    assert (
        len([name for name in forward if name.startswith("forward.top.")]) == len(layers.top) + 2
    )  # the dots, and the logit


@pytest.mark.slow
def test_torch_is_not_loaded_for_tables(tables):
    code = "import sys; from rowwise.cli.main import make_app; make_app()(sys.argv[1:], standalone_mode=False); "
    code += "sys.exit('torch' in sys.modules)"
    args = ("simulate", "--tables", "tables.csv", "--topology", "2x8xzionex", "--vary", "wire=fp32,int8")
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_memory_that_is_too_small_is_refused_with_bytes(refused):
    err = refused("--tables", "tables.csv", "--topology", "2xzionex:device=50MB,host=0GB")
    assert "it does not fit: a rank lacks " in err
    assert "device " in err


TABLES = ("--tables", "tables.csv")


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (TABLES, "--topology is not given: expected a machine such as 8xa100-like"),
        ((*TABLES, "--topology", "2xzionx"), "no hardware preset 'zionx'; there are zionex"),
        ((*TABLES, "--topology", "2xzionex", "--batch", "1"), "batch=1: fewer samples than the 2 ranks"),
        ((*TABLES, "--topology", "2xzionex", "--dense", "5"), "--dense '5': expected widths"),
        ((*TABLES, "--topology", "2xzionex", "--vary", "hots=2"), "=64k,128k; did you mean hosts?"),
        ((*TABLES, "--topology", "2xzionex", "--vary", "hosts="), "--vary hosts=: no values"),
        ((*TABLES, "--topology", "2xzionex", "--vary", "dense=tp:3"), "3 ranks do not divide 2"),
        ((*TABLES, "--topology", "2xzionex", "--html", "no/x.html"), "the folder no does not exist"),
        ((*TABLES, "--topology", "2xzionex", "--network", "no.json"), "no.json"),
        (("--check", "runs/none"), "runs/none"),
    ],
)
def test_wrong_arguments_are_refused(refused, args, why):
    assert why in refused(*args)


def test_a_plan_of_another_world_is_refused(refused, command):
    command("plan", *TABLES, "--topology", "4xzionex", "--seconds", "0.02", "--json", "plan.json")
    assert Plan.from_json(Path("plan.json").read_bytes()).world == 4
    err = refused(*TABLES, "--topology", "2xzionex", "--plan", "plan.json")
    assert "--plan: a plan for 4 ranks, and the machine has 2: expected a plan for this machine" in err


def test_networks_of_other_hosts_are_refused(refused):
    link, three = PairLink(latency_s=1e-5, rate_Bps=1e9), NetworkHost(name="b", devices=3)
    Path("net.json").write_text(Network(hosts=(NetworkHost(name="a", devices=4), three), link=link).to_json())
    args = (*TABLES, "--network", "net.json", "--topology")
    assert "net.json: 2 hosts, but the machine has 3" in refused(*args, "3x4xcpu")
    assert "net.json: host b has 3 devices, but the machine 4" in refused(*args, "2x4xcpu")


def test_a_run_is_compared_with_its_simulation(command, tmp_path):
    steps = ("--set", "train.epochs=1", "--set", "log.every=4", "--set", "data.rows=40000")
    assert command("train", "dlrm-synthetic", *steps, "--hardware", "cpu")[0] == 0
    (stages,) = Path("runs").rglob("stages.csv")
    code, out, _ = command("simulate", "--check", str(stages.parent))
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()][:2] == ["run", "stage"]
    assert {"lookup", "forward", "backward", "update", "step"} <= {line.split()[0] for line in out.splitlines()}
    recipe = stages.parent / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("hardware: cpu", "hardware: xeon"))
    stages.parent.joinpath("env.json").write_text('{"cpu": "another processor"}')
    code, _, err = command("simulate", "--check", str(stages.parent))
    assert (code, "it ran on another processor, but xeon is measured on Intel" in err) == (2, True)
    for text in ("[]", '{"hosts": "many"}', '{"hosts": 0}', "[" * 100_000, '{"network": 7}'):
        stages.parent.joinpath("env.json").write_text(text)
        code, _, err = command("simulate", "--check", str(stages.parent))
        assert (code, "env.json: " in err, err.count("\n")) == (2, True, 1), err
    stages.unlink()
    code, _, err = command("simulate", "--check", str(stages.parent))
    assert (code, "no stages.csv with complete lines: expected a run" in err) == (2, True)


@pytest.mark.slow
def test_a_run_on_several_hosts_is_compared_on_its_network(command):
    """Ranks of this machine stand for hosts: env.json says what a run on two would."""
    steps = ("--set", "train.steps=8", "--set", "log.every=4", "--set", "data.rows=20000", "--nproc", "2")
    assert command("train", "dlrm-synthetic", *steps, "--hardware", "cpu")[0] == 0
    (stages,) = Path("runs").rglob("stages.csv")
    facts, predicted = json.loads(stages.with_name("env.json").read_text()), []
    for uplink_Bps, order in ((None, None), (1e6, ("c", "a")), (1e8, ("c", "a"))):
        if uplink_Bps is not None:
            link, hosts = PairLink(latency_s=1e-5, rate_Bps=1e8), tuple(NetworkHost(name=name) for name in "abc")
            net = Network(hosts=hosts, link=link, groups=(0, 0, 1), uplink_Bps=(uplink_Bps,) * 2)
            Path("net.json").write_text(net.to_json())
            ordered = {"source": "net.json", "order": {"hosts": order}, "gain": 2.0}
            stages.with_name("env.json").write_text(json.dumps(facts | {"hosts": 2, "network": ordered}))
        code, out, err = command("simulate", "--check", str(stages.parent), "--json")
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert ("--network: this network was not measured" in found["notes"]) == (uplink_Bps is not None)
        predicted.append(found["predicted_s"])
    assert predicted[1] > predicted[2] > predicted[0]


def test_sums_in_two_levels_are_simulated(command, refused):
    what = ("dlrm-synthetic", "--topology", "2+2x1xcpu", "--set", "wire.far=int8")
    code, out, err = command("simulate", *what, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["wire"], found["exact"]) == ("fp32/fp32/int8", False)
    assert {"reduce.0", "reduce.far.0"} <= {stage["stage"] for stage in found["stages"]}
    err = refused(*what, "--vary", "dense=replicated,full")
    assert "dense=full with wire.far=int8: expected dense=replicated, or wire.far=null" in err
    err = refused(*what, "--set", "train.dense_parallel.kind=full")
    assert "wire.far=int8 with train.dense_parallel.kind=full: expected" in err


def test_uplinks_have_wires_of_their_own():
    near, far = Codecs(), Codecs(forward=WireType.INT8)
    assert describe_wire(Wire()) == "fp32"
    assert describe_wire(Wire(uplink=far)) == "fp32/fp32/int8/fp32/fp32"
    assert describe_wire(Wire(host=near, network=far)) == "int8/fp32/fp32"
