"""`rowwise plan` as users meet it: tables in, a summary and files out, one line for what is wrong."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest
from planning.perf.networks import profile
from small import recipe, write_rows
from test_cli import loaded_by

from rowwise import Mlp, Plan, Tile
from rowwise.base.quantity import format_bytes
from rowwise.cli.plan import PUBLISHED_METHODS, write_atomically
from rowwise.planning.planner.inputs import read_tables
from rowwise.planning.planner.machines import machine_named, parse_size
from rowwise.planning.planner.methods.named import METHODS
from rowwise.recipes.compose import make_model, resolve
from rowwise.recipes.plan import plan_inputs
from rowwise.recipes.sharding import tables_of
from rowwise.recipes.text import decode, write
from rowwise.tables.spec import Codecs, Wire

MADE_UP = Path(__file__).parents[1] / "benchmarks" / "tables" / "dlrm856_like_tables.csv"
HEAD = "name,rows,dim,pooling,zipf_a\n"
LINES = "user,2000000,64,1,1.05\nitem,500000,64,20,1.2\nquery,800000,32,5,\nsite,20000,16,1,\ncountry,200,8,1,\n"
QUICK = ("--seconds", "0.02")


@pytest.fixture
def tables(tmp_path):
    (tmp_path / "tables.csv").write_text(HEAD + LINES)
    return read_tables(tmp_path / "tables.csv")


@pytest.fixture
def ok(command, tables):
    """What was printed of a plan that could be made."""

    def run(*args, machine="4xzionex"):
        code, out, err = command("plan", "--tables", "tables.csv", "--topology", machine, *QUICK, *map(str, args))
        assert (code, err) == (0, "")
        return out

    return run


@pytest.fixture
def refused(refused, tables):
    return partial(refused, "plan")


def read(path):
    return Plan.from_json(Path(path).read_bytes())


def lines_of(out):
    """Lines by their first word."""
    return {line.split()[0]: line for line in out.splitlines() if line[:1].strip()}


def test_a_plan_is_shown_and_written(ok, tables):
    out = ok("--json", "plan.json")
    found = read("plan.json")
    found.validate([w.table for w in tables.workloads])
    assert found.world == 4
    assert found.forecast is not None
    assert (found.forecast.batch, found.forecast.model) == (65536, "roofline of zionex")
    lines = lines_of(out)
    assert lines["tables"].startswith("tables  5 of 3,320,200 rows, ")
    assert lines["machine"] == "machine 4 ranks: 1 host of 4 zionex"
    assert "this one is " in lines["bound"]
    assert "on rank" in lines["step"]
    fullest = max(row[0] for row in found.forecast.memory_bytes)
    assert f"({fullest / found.forecast.limits_bytes[0]:.0%})" in lines["memory"]
    assert sum(int(n) for n in re.findall(r"\d+", lines["layouts"].split("(")[0])) == 5
    assert lines["wrote"] == "wrote   plan.json"
    assert list(Path().glob(".*")) == []


def test_small_tables_need_one_device_only(ok):
    """On one device a small batch takes no exchange; large batches, and tables that do not fit it, need more."""
    note = "note    one device is enough: it holds all tables, and takes "
    assert note in ok("--batch", 16, machine="8xzionex")
    assert note not in ok(machine="8xzionex")
    assert note not in ok("--batch", 16, machine="8xzionex:device=500MB")
    assert note not in ok("--batch", 16, machine="1xzionex")


def test_nothing_is_written_unasked(ok):
    before = set(os.listdir())
    assert "the plan was not written; add --json plan.json to keep it" in ok()
    assert set(os.listdir()) == before


def test_the_same_question_has_the_same_plan(ok):
    ok("--json", "a.json", "--seed", 3)
    ok("--json", "b.json", "--seed", 3)
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()


def test_a_dash_prints_the_plan_alone(command, tables):
    code, out, err = command("plan", "--tables", "tables.csv", "--topology", "2xzionex", *QUICK, "--json", "-")
    assert code == 0
    assert Plan.from_json(out).world == 2
    assert "layouts" in err


def test_layouts_constraints_batch_and_model(ok, tables):
    Path("limits.json").write_text('{"pin": {"user": [3]}, "layouts": {"item": ["column_wise"]}, "reserve": 0.5}')
    limits = ("--constraints", "limits.json", "--layouts", "table-wise")
    ok(*limits, "--batch", 4096, "--model", "torchrec", "--json", "p.json")
    found = read("p.json")
    assert {tile.rank for tile in found.tiles_of("user")} == {3}
    assert len(found.tiles_of("item")) > 1
    for name in ("user", "query", "site", "country"):
        assert len(found.tiles_of(name)) == 1
    assert (found.forecast.batch, found.forecast.model) == (4096, "torchrec")
    whole = read_limits(ok)
    assert found.forecast.limits_bytes[0] == whole // 2


def test_a_plan_is_for_the_wire_that_is_given(ok, command, small_recipe):
    floats = ok("--json", "floats.json", machine="2x2xzionex")
    assert "vectors as fp32 forward and fp32 back" in floats
    wire = ("--wire", "network.forward=int8", "--wire", "network.backward=fp16")
    shown = ok(*wire, "--explain", "--html", "plan.html", "--json", "int8.json", machine="2x2xzionex")
    words = "fp32 forward and fp32 back inside hosts, int8 forward and fp16 back between them"
    assert words in shown
    assert f"Vectors travel as {words}" in " ".join(shown.split())
    assert f"Vectors travel as {words}" in Path("plan.html").read_text()
    wide, narrow = read("floats.json").forecast, read("int8.json").forecast
    assert narrow.wire == Wire(network=Codecs(forward="int8", backward="fp16"))
    assert narrow.step_s < wide.step_s
    of_recipe = ("--recipe", "small.yaml", "--topology", "2xcpu", "--set", "wire.host.forward=bf16")
    assert command("plan", *of_recipe, *QUICK, "--json", "recipe.json")[0] == 0
    assert read("recipe.json").forecast.wire.host.forward == "bf16"


def test_a_profile_that_was_measured_predicts_by_its_networks(ok):
    Path("profile.json").write_text(profile(7).to_json())
    shown = ok("--json", "learned.json", "--explain", machine="2xprofile.json")
    assert "by networks learned on random" in shown
    found = read("learned.json").forecast
    assert set(found.stages_s) == {"lookup", "update", "exchange", "wait"}
    assert found.bound_s <= found.step_s
    ok("--json", "rates.json", "--model", "roofline", machine="2xprofile.json")
    assert read("rates.json").forecast.model == "roofline of random"


@pytest.mark.dist
def test_the_best_plans_are_run_and_the_fastest_is_kept(command):
    Path("small.csv").write_text(HEAD + "a,5000,16,4,1.0\nb,300,8,1,\nc,900,32,2,\n")
    args = ("--topology", "2xcpu", "--batch", "512", *QUICK, "--measure", "2", "--json", "p.json")
    code, out, err = command("plan", "--tables", "small.csv", *args)
    assert (code, err) == (0, "")
    told = [float(ms) for ms in re.findall(r"measured ([\d.]+) ms", out)]
    assert len(told) == 2
    assert out.count(", kept") == 1
    assert read("p.json").forecast.measured_s * 1e3 == pytest.approx(min(told), abs=0.01)


def read_limits(ok):
    ok("--json", "whole.json")
    return read("whole.json").forecast.limits_bytes[0]


def test_differences_from_another_plan(ok):
    ok("--json", "old.json", "--layouts", "table_wise")
    assert "diff    0 of 5 tables are placed differently in old.json" in ok(
        "--diff", "old.json", "--layouts", "table_wise"
    )
    out = ok("--diff", "old.json", "--layouts", "row_wise")
    assert "diff    5 of 5 tables are placed differently in old.json; a step takes " in out
    assert len(re.findall(r"^- .* on rank", out, re.M)) == 5
    assert len(re.findall(r"^\+ .* on rank", out, re.M)) == 20


def test_replanning_starts_at_the_old_plan(ok):
    cuts = ("--layouts", "table_wise,column_wise")
    ok("--json", "old.json", *cuts)
    assert "no change: none repays the cost of moving rows" in ok("--replan", "old.json", *cuts)
    Path("tables.csv").write_text(HEAD + LINES.replace("site,20000,16,1", "site,20000,16,300"))
    out = ok("--replan", "old.json", "--json", "new.json", *cuts)
    assert read("old.json").tiles != read("new.json").tiles
    said = r"to other ranks \(([\d.]+)%\); a step takes ([\d.]+) ms, ([\d.]+) ms without"
    moved, after, before = map(float, re.search(said, out).groups())
    assert moved <= 15
    assert after < before


def test_certified(ok):
    out = ok("--certify", "1s", "--layouts", "table_wise", "--json", "plan.json")
    found = read("plan.json").forecast
    assert found.bound_s is not None
    assert found.bound_s <= found.step_s
    assert "at least" in out


def test_explained(ok):
    out = ok("--explain")
    for name in ("user", "item", "query", "site", "country"):
        assert re.search(rf"^{name}\s", out, re.M)


def test_html(ok):
    ok("--html", "plan.html")
    page = Path("plan.html").read_text()
    assert "<html" in page
    assert "query" in page


def test_torchrec(ok, tables):
    ok("--torchrec", "torchrec.json")
    found = Path("torchrec.json").read_text()
    assert json.loads(found)
    assert all(w.table.name in found for w in tables.workloads)


@pytest.fixture
def small_recipe(tmp_path):
    write_rows(tmp_path / "rows.parquet")
    made = recipe(tmp_path)
    (tmp_path / "small.yaml").write_text(write(made))
    return made


def test_a_recipe_has_the_tables_of_its_model(command, small_recipe, tmp_path):
    args = ("--topology", "2xcpu", *QUICK, "--json", "plan.json", "--set", "model={kind: wide_deep, deep: [8]}")
    code, _, err = command("plan", "--recipe", "small.yaml", *args)
    assert (code, err) == (0, "")
    found = read("plan.json")
    assert {tile.table for tile in found.tiles} == {f"{n}{w}" for n in ("user", "item", "seen") for w in ("", "_wide")}
    assert found.forecast.batch == small_recipe.train.batch


@pytest.mark.usefixtures("small_recipe")
def test_the_dense_side_of_a_recipe_takes_memory(command):
    changes = ("--set", "model={kind: dlrm, bottom: [512, 512], top: [512]}")
    plan = ("plan", "--recipe", "small.yaml", *changes, *QUICK, "--topology")
    code, out, _ = command(*plan, "4xcpu")
    assert code == 0
    shown = r"dense +kind=replicate: (.*) of each rank's memory, (.*) of activations; a rank sends (.*) in a step"
    held, activations, sent = re.search(shown, out).groups()
    parameters = sum(p.numel() for sizes in ((2, 512, 512, 8), (8 + 6, 512, 1)) for p in Mlp(sizes).parameters())
    # In fp32, with gradients and two numbers of Adam; an all-reduce over four ranks sends 2 * 3 / 4 of them.
    assert (held, sent) == (format_bytes(16 * parameters), format_bytes(6 * parameters))
    code, _, err = command(*plan, "4xcpu:device=4MB")
    assert code == 2
    want = r"kind=replicate take 4.. MB of the 4.0 MB of a rank: expected train.dense_parallel={kind: full.*} \(.* MB\)"
    assert re.search(want, err)
    assert parse_size(activations, "activations") > 0
    code, out, _ = command(*plan, "4xcpu:device=4MB", "--set", "train.dense_parallel.kind=full")
    assert code == 0
    code, out, _ = command(*plan, "4xcpu", "--set", "train.accumulate=4")
    of_a_pass = re.search(r"memory, (.*) of activations", out)[1]
    assert parse_size(of_a_pass, "") == pytest.approx(parse_size(activations, ""), rel=0.1)  # of one batch at a time


OWN = """
import torch
class Mine(torch.nn.Module):
    def __init__(self, embeddings, dense_features, tasks, broken=False):
        super().__init__()
        self.embeddings, self.scale, self.broken = embeddings, torch.nn.Parameter(torch.tensor(0.1)), broken
        self.map = torch.nn.Linear(self.embeddings.tables[0].dim, tasks)
    def forward(self, batch):
        if self.broken and int(batch.sparse.values_N.max()) == 0:
            raise RuntimeError("wants other ids")
        return self.map(self.embeddings(batch.sparse)["user"]) * self.scale
"""


@pytest.mark.usefixtures("small_recipe")
@pytest.mark.parametrize("broken", ["false", "true"])
def test_the_dense_side_of_a_model_of_ones_own(command, tmp_path, broken):
    """With a single number, which cannot be sharded, and code that refuses made-up samples."""
    (tmp_path / "own.py").write_text(OWN)
    change = f"model={{kind: own, module: own.py:Mine, args: {{broken: {broken}}}}}"
    plan = ("plan", "--recipe", "small.yaml", *QUICK, "--topology", "2xcpu", "--set", change)
    code, out, err = command(*plan)
    assert (code, err) == (0, "")
    assert ("activations not counted" in out) == (broken == "true")
    assert "kind: full" not in out
    code, _, err = command(*plan, "--set", "train.dense_parallel.kind=full")
    assert code == 2
    assert "parameter scale is a single number, and cannot be sharded: expected a shape of (1,)" in err


def test_a_sequence_model_looks_up_lists_and_what_it_scores(small_recipe):
    lists = {
        "columns": {"labels": [], "sparse": [{"column": "seen", "ids": "direct", "table": "seen"}]},
        "tables": {"list": [{"name": "seen", "rows": 20, "dim": 8, "features": ["seen"], "pooling": "sequence"}]},
        "model": {"kind": "sasrec", "length": 7},
        "evaluate": {"metric": "ndcg@10"},
    }
    made = decode({**msgspec.to_builtins(small_recipe), "tables": {}, **lists}, "")
    (workload,) = plan_inputs(made, machine_named("2xcpu")).workloads
    assert workload.access.pooling == pytest.approx(8 + 20 * 2 / made.train.batch)


def test_a_step_over_a_graph_reads_each_row_once(small_recipe):
    ids = [{"column": name, "ids": "direct", "table": name} for name in ("user", "item")]
    rows = {"user": 400, "item": 30}
    listed = [{"name": name, "rows": count, "dim": 8, "features": [name]} for name, count in rows.items()]
    changes = {"columns": {"labels": ["label"], "sparse": ids}, "tables": {"list": listed}}
    model = {"model": {"kind": "graph", "user": "user", "item": "item"}, "evaluate": {"metric": "ndcg@10"}}
    made = decode({**msgspec.to_builtins(small_recipe), **changes, **model}, "")
    for topology in ("1xcpu", "2xcpu"):
        found = plan_inputs(made, machine_named(topology))
        assert {w.table.name: w.access.pooling * found.batch for w in found.workloads} == pytest.approx(rows)


def test_a_recipe_s_tables_take_one_id_a_feature(small_recipe):
    elsewhere = msgspec.structs.replace(small_recipe, train=msgspec.structs.replace(small_recipe.train, device="cuda"))
    wanted = plan_inputs(elsewhere, machine_named("2xcpu"))
    tables = tables_of(make_model(resolve(small_recipe)))
    assert tuple(w.table for w in wanted.workloads) == tables
    assert [w.access.pooling for w in wanted.workloads] == [len(t.feature_names) for t in tables]
    assert wanted.batch == small_recipe.train.batch


def test_what_inspect_says_can_be_planned(command, tmp_path):
    write_rows(tmp_path / "rows.parquet")
    code, out, _ = command("data", "inspect", "rows.parquet", "--json")
    assert code == 0
    Path("card.json").write_text(out)
    code, out, err = command("plan", "--tables", "card.json", "--topology", "2xcpu", *QUICK, "--json", "plan.json")
    assert (code, err) == (0, "")
    assert {tile.table for tile in read("plan.json").tiles} == {"user", "item", "seen"}


def test_options_are_refused_in_one_line(refused, tmp_path):
    machine = ("--topology", "2xcpu")
    given = ("--tables", "tables.csv", *machine)
    Path("limits.json").write_text('{"pin": {"nobody": [0]}}')
    Path("broken.json").write_text("{")
    assert "--topology is not given: expected a machine such as 8xa100-like" in refused("--tables", "tables.csv")
    assert "no hardware preset 'gpu'" in refused("--tables", "tables.csv", "--topology", "2xgpu")
    assert "none.csv: No such file" in refused("--tables", "none.csv", *machine)
    assert "; did you mean 'dlrm-synthetic'?" in refused("--recipe", "dlrm-syntetic", *machine)
    assert "--model 'best': expected learned, roofline, torchrec" in refused(*given, "--model", "best")
    assert "--seconds -1.0: expected 0 seconds or more" in refused(*given, "--seconds", -1)
    assert "--seconds nan: expected 0 seconds or more" in refused(*given, "--seconds", "nan")
    assert "--certify 'long': expected a number of seconds, such as 30 or 30s" in refused(*given, "--certify", "long")
    assert "--layouts 'table_wise,rows': 'rows': expected one or more of" in refused(
        *given, "--layouts", "table_wise,rows"
    )
    assert "limits.json: pin: no table is called 'nobody': expected names" in refused(
        *given, "--constraints", "limits.json"
    )
    assert "broken.json: not constraints: " in refused(*given, "--constraints", "broken.json")
    assert "broken.json: not a plan: " in refused(*given, "--diff", "broken.json")
    assert "none.json: No such file" in refused(*given, "--replan", "none.json")
    Path("old.json").write_text('{"world": 3, "tiles": []}')
    assert "the plan in force is for 3 ranks, the machine has 2" in refused(*given, "--replan", "old.json")
    assert "--model learned: the profile cpu was not measured: expected a profile" in refused(
        *given, "--model", "learned"
    )
    assert "--wire 'forward=int8': expected LINK.WAY=TYPE with host, network, uplink, and forward" in refused(
        *given, "--wire", "forward=int8"
    )
    assert "'int4': expected one of" in refused(*given, "--wire", "host.forward=int4")
    twice = ("--wire", "host.forward=fp16", "--wire", "host.forward=int8")
    assert "host.forward is given twice" in refused(*given, *twice)
    one = ("--wire", "host.forward=fp16")
    assert "--wire host.forward=fp16: --model torchrec does not model wires: expected another mo" in refused(
        *given, *one, "--model", "torchrec"
    )
    wide = ("--tables", "tables.csv", "--topology", "2x2xcpu")
    assert "a plan for 2 hosts of 2 devices cannot be measured here" in refused(*wide, *QUICK, "--measure", 2)


@pytest.mark.slow
def test_places_are_refused_before_the_search(refused, tmp_path):
    given = ("--tables", "tables.csv", "--topology", "2xcpu", "--seconds", "1000")
    Path("folder").mkdir()
    assert "--json no/plan.json: the folder no does not exist: create it first" in refused(
        *given, "--json", "no/plan.json"
    )
    assert "--html -: expected the name of a file" in refused(*given, "--html", "-")
    assert "--html folder: this is a folder: expected the name of a file" in refused(*given, "--html", "folder")
    assert "--torchrec a: --json writes the same file" in refused(*given, "--json", "a", "--torchrec", "./a")


def test_what_does_not_fit_says_why_in_one_line(refused):
    err = refused("--tables", "tables.csv", "--topology", "2xzionex:device=100MB,host=0", *QUICK)
    assert "rowwise: no plan fits: " in err


TIGHT = "2xzionex:device=300MB"


def test_memory_below_the_device_is_planned_where_tables_need_it(ok, refused, command):
    given = ("--tables", "tables.csv", "--topology", TIGHT, *QUICK)
    assert "note    tables are too large for the devices alone: rows are on the host, too\n" in ok(machine=TIGHT)
    err = refused(*given, "--tiers", "device", "--json", "plan.json")
    assert err.startswith("rowwise: no plan fits without rows on the host: ")
    for way in (
        "devices of this kind suffice",
        "fp16 rows save",
        "`rowwise plan --tiers device,host`",
        "`rowwise compress`",
    ):
        assert way in err
    assert not Path("plan.json").exists()
    host = ok("--tiers", "device,host", "--json", "plan.json", machine=TIGHT)
    tiles = read("plan.json").tiles
    assert {tile.tier for tile in tiles} == {"device", "host"}
    cut = any(t.tier == "host" and t.cols != (0, max(o.cols[1] for o in tiles if o.table == t.table)) for t in tiles)
    assert (": parts of rows of table " in host) == cut
    whole = ok("--tiers", "device,host", "--layouts", "table_wise,row_wise", machine=TIGHT)
    assert "cannot run" not in whole
    disk = ok("--tiers", "device,disk", "--json", "plan.json", machine=f"{TIGHT},disk=1TB")
    lower = {tile.table for tile in read("plan.json").tiles if tile.tier == "disk"}
    others = f" and {len(lower) - 1} other{'s' * (len(lower) > 2)}" * (len(lower) > 1)
    rows = f"rows of table {min(lower)!r}{others} are on the disk"
    assert f"note    rowwise cannot run this plan yet on any device but a CPU: {rows}\n" in disk
    assert {tile.tier for tile in read("plan.json").tiles} == {"device", "disk"}


def test_with_less_memory_than_tables_need_some_are_on_disk(ok):
    out = ok("--memory", "500MB", "--json", "plan.json", machine="2xcpu")
    lower = [tile for tile in read("plan.json").tiles if tile.tier == "disk"]
    assert lower
    assert all(tile.cache_rows > 0 for tile in lower)
    assert max(bytes_M[0] for bytes_M in read("plan.json").forecast.memory_bytes) <= 250e6
    assert "disk" in next(line for line in out.splitlines() if line.startswith("memory"))
    ok("--memory", "50GB", "--json", "plan.json", machine="2xcpu")
    assert {tile.tier for tile in read("plan.json").tiles} == {"device"}


def test_a_plan_that_the_runtime_runs_says_nothing_of_tiers(ok):
    ok("--json", "plain.json")
    assert "cannot run" not in ok("--tiers", "device,host", "--json", "plan.json")
    assert read("plan.json").tiles == read("plain.json").tiles


def test_tiers_that_there_are_not_are_refused(refused):
    given = ("--tables", "tables.csv", "--topology", "4xzionex", *QUICK)
    assert "--tiers 'nonsense': 'nonsense': expected device, and optionally host, disk" in refused(
        *given, "--tiers", "nonsense"
    )
    assert "--tiers 'host': no device: expected device" in refused(*given, "--tiers", "host")
    assert "zionex has no disk memory for tables: expected its size in --topology, such as :disk=1TB" in refused(
        *given, "--tiers", "device,disk"
    )
    got = refused(*given, "--tiers", "device,host", "--measure", 2)
    assert "--measure with rows below the device: expected tables that fit into devices, or no --measure" in got


def test_runs_take_a_plan_on_disk(command, small_recipe):
    made = {t.name: t for t in tables_of(make_model(resolve(small_recipe), on_meta=True))}
    tiles = [Tile(table=n, rank=0, rows=(0, t.rows), cols=(0, t.dim), tier="disk") for n, t in made.items()]
    Path("disk.json").write_text(Plan(world=1, tiles=tuple(tiles)).to_json())
    code, _, err = command("train", "small.yaml", "--plan", "disk.json")
    assert code == 0
    assert "user, item, seen on disk, in up to " in err


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    place = tmp_path / "plan.json"
    write_atomically(place, "first")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(place, "\ud800")
    assert place.read_text() == "first"
    write_atomically(place, "second")
    assert (place.read_text(), os.listdir(tmp_path)) == ("second", ["plan.json"])
    write_atomically(Path(os.devnull), "anything")
    assert not Path(os.devnull).is_file()


@pytest.mark.slow
def test_many_tables_from_a_shell(tmp_path):
    """No tensors, no Arrow, no solver: the answer is there while others still import."""
    machine = ("--topology", "16xa100-like", "--layouts", "table_wise,column_wise")
    args = ("--tables", str(MADE_UP), "--dim", "64", *machine)
    loaded = loaded_by("plan", *args, "--seconds", "0.1", "--json", "p.json", cwd=tmp_path)
    assert {"rowwise", "numpy"} <= loaded
    assert loaded.isdisjoint({"torch", "pyarrow", "scipy", "pandas"})
    found = read(tmp_path / "p.json")
    found.validate([w.table for w in read_tables(MADE_UP, dim=64).workloads])
    assert found.forecast.gap < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "tables.csv: the file is empty"),
        (HEAD + "a,ten,4,1,\n", "tables.csv, line 2, column 'rows': 'ten': expected a whole number of at least 1"),
    ],
)
def test_wrong_input_from_a_shell(tmp_path, text, message):
    (tmp_path / "tables.csv").write_text(text)
    command = [sys.executable, "-W", "error", "-m", "rowwise", "plan", "--tables", "tables.csv", "--topology", "2xcpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"rowwise: {message}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", METHODS)
def test_a_published_method_makes_a_plan(ok, command, name):
    assert name in PUBLISHED_METHODS.split(", ")
    Path("tables.csv").write_text(HEAD + "".join(f"t{i},{50_000 * (i + 5)},64,{i + 5},1.1\n" for i in range(12)))
    ok("--json", "best.json")
    given = ("--tables", "tables.csv", "--topology", "4xzionex", "--method", name, "--json", "plan.json")
    assert command("plan", *given)[0] == 0
    made, best = read("plan.json").forecast, read("best.json").forecast
    assert best.step_s <= made.step_s * 1.001
    assert made.bound_s <= made.step_s


def test_methods_with_learned_costs_say_where_they_have_none(command):
    Path("tables.csv").write_text(HEAD + "".join(f"t{i},{50_000 * (i + 5)},64,{i + 5},1.1\n" for i in range(6)))

    def printed(method, topology, *args):
        code, out, _ = command("plan", "--tables", "tables.csv", "--topology", topology, "--method", method, *args)
        assert code == 0
        return " ".join(out.split())

    note = "note costs are the roofline of zionex, as no networks were trained for it: xeon, zen4, zen5 and profiles"
    assert note in printed("dreamshard", "2xzionex")
    assert note in printed("neuroshard", "2xzionex")
    assert "no networks" not in printed("ldm", "2xzionex")
    assert "no networks" not in printed("neuroshard", "2xxeon")
    assert "no networks" not in printed("neuroshard", "2xzionex", "--model", "torchrec")


def test_a_method_that_finds_nothing_says_so(refused):
    given = ("--tables", "tables.csv", "--topology", "4xzionex")
    assert "method 'none': expected random, size" in refused(*given, "--method", "none")
    got = refused("--tables", "tables.csv", "--topology", "4xzionex:device=200MB", "--method", "ldm")
    assert "method ldm found no plan that fits memory and constraints; take another method" in got
