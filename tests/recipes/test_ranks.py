"""Runs on several ranks, as threads: where tables are put, who writes, what is refused; and the same bits as alone."""

import json
import re
from dataclasses import replace

import pytest
from msgspec import structs
from small import lines, recipe, same, sections, tensors, train_on_ranks, write_rows
from typer.testing import CliRunner

from rowwise import DataError, Plan, SpecError, Topology
from rowwise.base.errors import AgreedError, TableMemoryError
from rowwise.cli.environment import HINT, CommandEnvironment, Torchrun
from rowwise.cli.main import make_app
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.spawn import RankFailure, RanksFailed
from rowwise.parallel.comm.thread import run_threads
from rowwise.recipes.compose import make_model, resolve
from rowwise.recipes.device_tables import move_sharded
from rowwise.recipes.placement import describe_cached_tiles, rank_bytes, table_bytes, tiles_bytes
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.sharding import choose_plan, shard_tables, tables_of
from rowwise.recipes.table_memory import measure_memory
from rowwise.recipes.text import decode, parse, write
from rowwise.recipes.trained import evaluate
from rowwise.tables.spec import Codecs, Wire
from rowwise.train.step import embeddings_of

ELASTIC = {"batch": 1024, "determinism": "elastic", "virtual_shards": 4, "epochs": 2}


pytestmark = pytest.mark.usefixtures("models_one_after_the_other")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    run = TrainingRun.start(recipe(folder, train=ELASTIC), folder / "runs")
    return run.go(), run.folder.path


@pytest.mark.few(1)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_end_with_the_bits_of_one(alone, tmp_path, world):
    write_rows(tmp_path / "rows.parquet")
    told = train_on_ranks(world, recipe(tmp_path, train=ELASTIC), tmp_path / "runs")
    assert {path for _, path in told} == {tmp_path / "runs/small/1"}
    result, run = told[0]
    assert result.status == "finished"
    assert same(tensors(run), tensors(alone[1]))
    assert {json.dumps(r.test) for r, _ in told} == {json.dumps(result.test)}
    assert lines(run) == lines(alone[1])
    assert {"ne", "auc", "calibration"} <= {name for line in lines(run) for name in line}
    assert result.test == alone[0].test
    assert evaluate(run).tasks["label"] == result.test["label"]
    assert Plan.from_json((run / "plan.json").read_text()).world == world
    assert json.loads((run / "env.json").read_text())["ranks"] == world


@pytest.mark.slow
def test_a_run_goes_on_with_other_ranks_and_another_plan(alone, tmp_path):
    made = recipe(tmp_path, train=ELASTIC | {"steps": 1}, save={"every": 1, "keep": 9})
    _, run = train_on_ranks(4, made, tmp_path / "runs")[0]
    before = json.loads((run / "env.json").read_text())["ranks"]
    tiles = [
        {"table": name, "rank": rank, "rows": [0, rows], "cols": [4 * rank, 4 * rank + 4]}
        for name, rows in (("user", 50), ("item", 30), ("seen", 20))
        for rank in range(2)
    ]
    (tmp_path / "plan.json").write_text(json.dumps({"world": 2, "tiles": tiles}))
    changes = ("train.steps=null", f"plan='{tmp_path}/plan.json'")
    run_threads(2, lambda comm: TrainingRun.resume(run, changes, comm=comm).go(), timeout_s=60)
    assert same(tensors(run), tensors(alone[1]))
    mine = lines(run)  # which has evaluated at its stop, too
    assert all(line in mine for line in lines(alone[1]))
    assert (before, json.loads((run / "env.json").read_text())["ranks"]) == (4, 2)
    assert len(Plan.from_json((run / "plan.json").read_text()).tiles) == 6
    with pytest.raises(SpecError, match="1: expected --nproc 2"):
        TrainingRun.resume(run, ["train.epochs=3"])
    assert TrainingRun.resume(run, ["train.epochs=3", "plan=null"]).go().epochs == 3


def test_a_warm_start_is_sharded(alone, tmp_path):
    write_rows(tmp_path / "rows.parquet")
    made = recipe(tmp_path, init_from=str(alone[1]), train={"steps": 1})

    def on_a_rank(comm):
        run = TrainingRun.start(made, tmp_path / "runs", comm=comm)
        match = run.match
        run.go()
        return match

    for match in run_threads(2, on_a_rank, timeout_s=60):
        assert "model/embeddings.user" in match.loaded
        assert (match.skipped, match.new) == ({}, [])


@pytest.mark.parametrize("kind", ["dlrm", "deepfm", "dcn", "wide_deep"])
def test_no_rank_ever_has_all_tables(tmp_path, kind):
    found = resolve(recipe(tmp_path, model={"kind": kind}))
    model = make_model(found, on_meta=True)
    names = {table.name for table in tables_of(model)}
    plan = choose_plan(found.recipe, model, Topology(devices=3))
    assert {tile.table for tile in plan.tiles} == names
    assert all(parameter.is_meta for name, parameter in model.named_parameters() if name.rpartition(".")[2] in names)
    whole = choose_plan(found.recipe, model, Topology())
    assert rank_bytes(whole, tables_of(model)) == [sum(t.rows * t.row_bytes for t in tables_of(model))]


def on_gpus(made):
    return structs.replace(made, train=structs.replace(made.train, device="cuda"))


def with_plan(made, plan, folder):
    (folder / "plan.json").write_text(plan.to_json())
    return structs.replace(made, plan=str(folder / "plan.json"))


def test_a_plan_for_gpus_fits_the_memory_of_each(tmp_path):
    found = resolve(recipe(tmp_path))
    model = make_model(found, on_meta=True)
    tables = tables_of(model)
    gpus, world = on_gpus(found.recipe), Topology(devices=4)
    plan = choose_plan(gpus, model, world, gpu_bytes=1_000_000)
    assert sum(rank_bytes(plan, tables)) >= sum(table.rows * table.row_bytes for table in tables)
    with pytest.raises(TableMemoryError, match="GPUs, each with 100"):
        choose_plan(gpus, model, world, gpu_bytes=100)
    given = with_plan(gpus, plan, tmp_path)
    assert choose_plan(given, model, world, gpu_bytes=1_000_000).tiles == plan.tiles
    with pytest.raises(TableMemoryError, match="GPU has 100 B"):
        choose_plan(given, model, world, gpu_bytes=100)


def test_tables_that_gpus_have_no_room_for_are_in_host_memory(tmp_path):
    large = [{"name": name, "rows": 20_000, "dim": 8} for name in ("user", "item", "seen")]
    found = resolve(recipe(tmp_path, tables={"list": large}, train={"batch": 64}, evaluate={"batch": 64}))
    model = make_model(found, on_meta=True)
    tables, world = tables_of(model), Topology(devices=4)
    gpus = on_gpus(found.recipe)
    memory = replace(measure_memory(found, solo()), topology=world)
    room = sum(map(table_bytes, tables)) // 8
    plan = choose_plan(gpus, model, world, memory, gpu_bytes=room)
    plan.validate(tables)
    samples = max(found.recipe.train.batch, found.recipe.evaluate.batch)
    assert any(tile.tier == "host" and tile.cache_rows for tile in plan.tiles)
    assert plan.forecast is None
    assert all(tiles_bytes(plan.tiles_on(rank), tables, samples) <= room for rank in range(4))
    given = with_plan(gpus, plan, tmp_path)
    assert choose_plan(given, model, world, memory, gpu_bytes=room) == plan
    with pytest.raises(TableMemoryError, match=r".* but its GPU"):
        choose_plan(given, model, world, memory, gpu_bytes=room // 2)

    def on_a_rank(comm):
        part = make_model(found, on_meta=True)
        shard_tables(found.recipe, part, plan, comm, None)
        move_sharded(part, plan, "cpu", samples)
        return sum(arena.store is not None for module in embeddings_of(part) for arena in module.arenas)

    for rank, cached in enumerate(run_threads(world, on_a_rank, timeout_s=60)):
        assert bool(cached) == any(tile.tier == "host" for tile in plan.tiles_on(rank))
    shown = describe_cached_tiles(plan, tables, samples)
    assert re.match(r"\w+(, \w+)* in .* of host memory; [\d.]+\s% of their rows cached in ", shown)
    little = replace(memory, free_H=(1000,))
    with pytest.raises(TableMemoryError, match="4 GPUs, each"):
        choose_plan(gpus, model, world, little, gpu_bytes=room // 2)


def test_rows_that_are_all_read_at_once_have_to_fit(tmp_path):
    """Each evaluation scores all items, and no cache has slots for them."""
    kinds = {"kind": "sasrec", "length": 4, "layers": 1, "heads": 1}
    item = {"list": [{"name": "seen", "rows": 20_000, "dim": 8, "pooling": "sequence"}]}
    columns = {"sparse": [{"column": "seen", "ids": "direct"}], "dense": [], "labels": []}
    scored = {"metric": "ndcg@10"}
    found = resolve(recipe(tmp_path, model=kinds, tables=item, columns=columns, train={"batch": 64}, evaluate=scored))
    model = make_model(found, on_meta=True)
    gpus = on_gpus(found.recipe)
    memory, world = replace(measure_memory(found, solo()), topology=Topology(devices=2)), Topology(devices=2)
    with pytest.raises(TableMemoryError, match=r"GPUs, each with 50\.0"):
        choose_plan(gpus, model, world, memory, gpu_bytes=50_000)


def test_a_run_is_planned_for_its_wire_and_compared_with_no_other(tmp_path):
    found = resolve(recipe(tmp_path, wire={"host": {"forward": "int8"}}))
    model = make_model(found, on_meta=True)
    plan = choose_plan(found.recipe, model, Topology(devices=2))
    assert plan.forecast.wire == found.recipe.wire
    given = with_plan(found.recipe, plan, tmp_path)
    assert choose_plan(given, model, Topology(devices=2)) == plan
    # A network that no two ranks are connected by makes no difference; another type on the host does.
    floats = structs.replace(given, wire=Wire(network=Codecs(forward="int8")))
    other = choose_plan(floats, model, Topology(devices=2))
    assert (other.tiles, other.forecast) == (plan.tiles, None)
    alike = structs.replace(given, wire=structs.replace(given.wire, network=Codecs(forward="int8")))
    assert choose_plan(alike, model, Topology(devices=2)) == plan


def test_what_is_wrong_is_said_by_the_first_rank_and_leaves_nothing(tmp_path):
    made = recipe(tmp_path, data={"valid": "parquet:none.parquet"})
    said = []

    def on_a_rank(comm):
        try:
            TrainingRun.start(made, tmp_path / "runs", comm=comm)
        except (DataError, AgreedError) as error:
            said.append((comm.rank, type(error), str(error)))

    run_threads(3, on_a_rank, timeout_s=60)
    assert sorted((rank, kind) for rank, kind, _ in said) == [(0, DataError), (1, AgreedError), (2, AgreedError)]
    assert len({text for *_, text in said}) == 1
    assert "none.parquet: no such file" in said[0][2]
    assert not (tmp_path / "runs").exists()


def test_a_plan_and_a_wire_are_part_of_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = decode(sections(tmp_path, plan="plan.json", wire={"host": {"forward": "fp16"}, "dense": "bf16"}), "")
    assert str(made.wire.host.forward) == "fp16"
    write_rows(tmp_path / "rows.parquet")
    found = resolve(made).recipe
    assert found.plan == f"{tmp_path}/plan.json"
    assert decode(parse(write(found, defaults=True), ""), "") == found
    with pytest.raises(SpecError, match="key 'hosts' in wire"):
        decode(sections(tmp_path, wire={"hosts": {}}), "")


def test_the_cause_is_the_failure_that_tells_most():
    reached = RankFailure(kind="peer_failed", rank=0, line="rank 1 has ended", trace="...")
    refused = RankFailure(kind="user_error", rank=2, line="no such id", trace="...")
    killed = RankFailure(kind="killed", rank=1, line="was killed by SIGKILL", exit_code=-9)
    assert RanksFailed([reached, refused]).line == "rank 2: no such id"
    assert RanksFailed([reached, refused, killed]).line == "rank 1 was killed by SIGKILL"
    same = RankFailure(kind="peer_failed", rank=1, line="no such id", trace="...")
    assert RanksFailed([refused, same]).line == "no such id"


def test_torchrun_is_known_by_what_it_sets():
    found = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "1", "OMP_WAIT_POLICY": "passive"}
    assert CommandEnvironment.read({}).torchrun is None
    assert CommandEnvironment.read({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "here"}).torchrun is None
    assert CommandEnvironment.read(found).torchrun == Torchrun(rank=2, world=4, attempt=0)
    assert CommandEnvironment.read(found | {"TORCHELASTIC_RESTART_COUNT": "1"}).torchrun.attempt == 1
    assert CommandEnvironment.read(found | {"ROWWISE_LISTENER": "7"}).torchrun.listener is None
    assert CommandEnvironment.read(found | {"ROWWISE_LISTENER": "7", "RANK": "0"}).torchrun.listener == 7


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "abc"}, "RANK=abc: expected a whole number"),
        ({"RANK": "-1"}, "RANK=-1: expected a whole number"),
        ({"RANK": "\u0661"}, "RANK=\u0661: expected a whole number"),
        ({"WORLD_SIZE": "1.5"}, "WORLD_SIZE=1.5: expected a whole number"),
        ({"RANK": "2"}, "RANK=2 with WORLD_SIZE=2"),
        ({"TORCHELASTIC_RESTART_COUNT": "one"}, "TORCHELASTIC_RESTART_COUNT=one: expected a whole number"),
        ({"RANK": "0", "ROWWISE_LISTENER": "x"}, "ROWWISE_LISTENER=x: expected a whole number"),
        ({"MASTER_ADDR": ""}, "RANK=1 without MASTER_ADDR"),
        ({"RANK": "", "MASTER_ADDR": "", "MASTER_PORT": ""}, "WORLD_SIZE=2 without RANK, MASTER_ADDR, MASTER_PORT"),
    ],
    ids=str,
)
def test_an_environment_that_is_not_that_of_torchrun(variables, message):
    whole = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    with pytest.raises(SpecError, match=message):
        _ = CommandEnvironment.read(whole | variables).torchrun


@pytest.mark.parametrize("arguments", [("train", "dlrm-synthetic"), ("resume", "run"), ("calibrate",)], ids=str)
def test_a_command_in_such_an_environment(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(make_app(), arguments, env={"WORLD_SIZE": "2"})
    line = f"WORLD_SIZE=2 without RANK, MASTER_ADDR, MASTER_PORT; {HINT}"
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"rowwise: {line}\n")
    assert list(tmp_path.iterdir()) == []
    assert CliRunner().invoke(make_app(), ["ls"], env={"WORLD_SIZE": "2"}).exit_code == 0
