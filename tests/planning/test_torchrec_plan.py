"""Plans for TorchRec: it takes them, tables lie where they say, and what it cannot execute is refused by name."""

import json
from importlib.util import find_spec

import pytest
import torchrec_ranks
from msgspec import structs

from rowwise import Plan, Pooling, RowType, Sgd, SpecError, Table, Tile, Topology
from rowwise.parallel.comm.spawn import run_processes
from rowwise.planning.perf import Access, Roofline, Workload, hardware_named
from rowwise.planning.perf.hardware import Machine
from rowwise.planning.planner import layouts
from rowwise.planning.planner.constraints import Constraints
from rowwise.planning.planner.export import TorchRecPlan, torchrec_json
from rowwise.planning.planner.pipeline import make_plan
from rowwise.planning.planner.problem import PlanRequest

TORCHREC = pytest.mark.skipif(find_spec("torchrec") is None, reason="needs the extra 'peers'")
WAYS = {
    "a": "table_wise", "b": "column_wise", "c": "row_wise", "d": "replicated", "e": "table_wise", "f": "column_wise",
    "g": "row_wise",
}  # fmt: skip


def tables_of() -> list[Table]:
    return [
        Table(
            name=name,
            rows=11 + 30 * i,
            dim=(16, 32, 8, 4, 64, 24, 12)[i],
            features=(f"{name}0", f"{name}1") if i % 3 == 0 else (),
            pooling=Pooling.MEAN if i in (4, 5) else Pooling.SUM,
        )
        for i, name in enumerate(WAYS)
    ]


def planned(tables: list[Table], topology: Topology) -> Plan:
    hardware = hardware_named("cpu")
    question = PlanRequest(
        workloads=tuple(Workload(table=table, access=Access(pooling=5.0 + i)) for i, table in enumerate(tables)),
        machine=Machine(topology=topology, hardware=hardware),
        model=Roofline(hardware, topology),
        batch=65536,
        constraints=Constraints(layouts={name: (way,) for name, way in WAYS.items()}),
    )
    return make_plan(question, seconds=0.01).plan


@pytest.mark.dist
@TORCHREC
def test_torchrec_executes_our_plans():
    tables, world = tables_of(), 2
    plan = planned(tables, Topology(devices=world))
    text = torchrec_json(plan, tables)
    made = TorchRecPlan.from_json(text).tables
    want = {
        "table_wise": "table_wise", "column_wise": "column_wise", "row_wise": "row_wise", "replicated": "data_parallel",
    }  # fmt: skip
    assert {name: table.sharding_type for name, table in made.items()} == {n: want[way] for n, way in WAYS.items()}
    # By hand: pieces of unlike width, two of them on one rank.
    other = [tile for tile in plan.tiles if tile.table != "e"]
    pieces = [((0, 8), 0), ((8, 20), 1), ((20, 64), 0)]
    other += [Tile(table="e", rank=rank, rows=(0, tables[4].rows), cols=cols) for cols, rank in pieces]
    by_hand = torchrec_json(Plan(world=world, tiles=tuple(other)), tables)
    for one in (text, by_hand):
        ranks = run_processes(world, torchrec_ranks.lies_and_finds, one, tables, timeout_s=200)
        for rank, (held, apart) in enumerate(ranks):
            assert apart < 1e-6
            assert held.keys() == WAYS.keys()
            for table in tables:
                shards = TorchRecPlan.from_json(one).tables[table.name].shards
                mine = [(shard.offsets, shard.sizes) for shard in shards if shard.rank == rank]
                assert held[table.name] == (mine if shards else [((0, 0), (table.rows, table.dim))])


def test_shards_are_tiles_but_for_rows_that_torchrec_cuts_in_blocks():
    tables = [Table(name=name, rows=10, dim=8, optimizer=Sgd()) for name in "abcdef"]
    topology = Topology(hosts=2, devices=2)
    a, b, c, d, e, f = tables
    tiles = (
        *layouts.table_wise(a, 3), *layouts.column_wise(b, [2, 1]), *layouts.row_wise(c, range(4)),
        *layouts.table_row_wise(d, topology, 1), *layouts.grid(e, topology, [1, 0]), *layouts.replicated(f, range(4)),
    )  # fmt: skip
    tiles = tuple(structs.replace(t, tier="host", cache_rows=2) if t.table == "b" else t for t in tiles)
    text = torchrec_json(Plan(world=4, tiles=tiles), tables, topology)
    made = json.loads(text)
    assert (made["world"], made["local_world"]) == (4, 2)
    found = {name: (t["sharding_type"], t["compute_kernel"], t["ranks"]) for name, t in made["tables"].items()}
    assert found == {
        "a": ("table_wise", "fused", [3]),
        "b": ("column_wise", "fused_uvm_caching", [2, 1]),
        "c": ("row_wise", "fused", [0, 1, 2, 3]),
        "d": ("table_row_wise", "fused", [2, 3]),
        "e": ("grid_shard", "fused", [2, 3, 0, 1]),
        "f": ("data_parallel", "dense", [0, 1, 2, 3]),
    }
    assert made["tables"]["b"]["cache_load_factor"] == 0.2
    rows = [(shard["offsets"], shard["sizes"]) for shard in made["tables"]["c"]["shards"]]
    assert rows == [([0, 0], [3, 8]), ([3, 0], [3, 8]), ([6, 0], [3, 8]), ([9, 0], [1, 8])]
    blocks = [(s["offsets"], s["sizes"], s["rank"]) for s in made["tables"]["e"]["shards"]]
    assert blocks == [([0, 0], [5, 4], 2), ([5, 0], [5, 4], 3), ([0, 4], [5, 4], 0), ([5, 4], [5, 4], 1)]
    assert made["notes"] == ["table 'c': rows are cut in blocks of 3, as TorchRec finds them"]
    assert TorchRecPlan.from_json(text).tables["a"].ranks == (3,)


def test_state_of_rows_that_is_kept_by_pieces_is_said():
    table = Table(name="a", rows=10, dim=8)
    plan = Plan(world=2, tiles=layouts.column_wise(table, [0, 1]))
    for approximate in ((), ("a",)):
        notes = json.loads(torchrec_json(structs.replace(plan, approximate=approximate), [table])).get("notes", [])
        assert (notes == []) == bool(approximate)
        assert approximate or "keeps the state of RowWiseAdagrad for each piece" in notes[0]


BIG = Table(name="big", rows=10, dim=16, optimizer=Sgd())


@pytest.mark.parametrize(
    ("table", "tiles", "says"),
    [
        (
            BIG,
            layouts.row_wise(BIG, [1, 0, 2, 3]),
            "has rows on ranks 1, 0, 2, 3; TorchRec cuts rows over the 2 ranks of a",
        ),
        (
            BIG,
            layouts.row_wise(BIG, [0, 1, 2]),
            "has rows on ranks 0, 1, 2; .*--layouts table_wise,column_wise,row_wise",
        ),
        (
            BIG,
            tuple(Tile(table="big", rank=r, rows=rows, cols=(0, 16)) for r, rows in ((0, (0, 7)), (1, (7, 10)))),
            "has rows 0:7 on rank 0; TorchRec cuts rows evenly",
        ),
        (
            structs.replace(BIG, rows=5),
            layouts.row_wise(structs.replace(BIG, rows=5), range(4)),
            "has 5 rows for 4 ranks; TorchRec cuts blocks of 2, which leaves rank 3 with none",
        ),
        (
            structs.replace(BIG, dim=12),
            layouts.grid(structs.replace(BIG, dim=12), Topology(hosts=2, devices=2), [0, 1]),
            "has a grid of 4, 8 columns; TorchRec needs equally many",
        ),
        (
            BIG,
            layouts.grid(BIG, Topology(hosts=2, devices=2), [0, 0]),
            "has a grid of 8, 8 columns; .* each on its own host",
        ),
        (
            BIG,
            (
                *layouts.row_wise(structs.replace(BIG, dim=8), [0, 1]),
                Tile(table="big", rank=2, rows=(0, 10), cols=(8, 16)),
            ),
            "has rows that are cut in some columns only",
        ),
        (
            BIG,
            tuple(structs.replace(t, tier="disk") for t in layouts.table_wise(BIG, 0)),
            "lives on disk; TorchRec has rows on the device, or all on the host",
        ),
        (
            BIG,
            tuple(structs.replace(t, tier="host") for t in layouts.replicated(BIG, range(4))),
            "is replicated on the host; TorchRec replicates on devices only",
        ),
        (
            structs.replace(BIG, dim=6),
            layouts.table_wise(structs.replace(BIG, dim=6), 0),
            "has 6 columns on rank 0; TorchRec needs multiples of 4; change Table.dim",
        ),
        (
            structs.replace(BIG, row_type=RowType.INT8),
            layouts.table_wise(structs.replace(BIG, row_type=RowType.INT8), 0),
            "has rows of int8; TorchRec trains rows of fp32",
        ),
        (
            structs.replace(BIG, pooling=Pooling.SEQUENCE),
            layouts.table_row_wise(structs.replace(BIG, pooling=Pooling.SEQUENCE), Topology(hosts=2, devices=2), 1),
            "is not pooled, and table_row_wise; TorchRec does that with pooled tables only",
        ),
    ],
)
def test_what_torchrec_cannot_do_is_refused(table, tiles, says):
    with pytest.raises(SpecError, match=f"table 'big' {says}".replace("(", r"\(")):
        torchrec_json(Plan(world=4, tiles=tiles), [table], Topology(hosts=2, devices=2))


def test_averages_that_torchrec_gets_wrong_are_refused():
    """Measured: with TorchRec 1.8.0, pools of other tables come out divided by how many ids they have."""
    topology = Topology(hosts=2, devices=2)
    mean, other = structs.replace(BIG, pooling=Pooling.MEAN), structs.replace(BIG, name="b")
    for tiles in (layouts.row_wise(mean, range(4)), layouts.table_row_wise(mean, topology, 0)):
        rows = Plan(world=4, tiles=(*tiles, *layouts.row_wise(other, range(4))))
        assert json.loads(torchrec_json(rows, [mean, other], topology))["tables"].keys() == {"big", "b"}
        whole = Plan(world=4, tiles=(*tiles, *layouts.table_wise(other, 1)))
        with pytest.raises(SpecError, match="table 'big' is averaged"):
            torchrec_json(whole, [mean, other], topology)
    plan = Plan(world=4, tiles=layouts.grid(mean, topology, [0, 1]))
    with pytest.raises(SpecError, match="table 'big' is averaged"):
        torchrec_json(plan, [mean], topology)


def test_other_files_are_refused():
    with pytest.raises(SpecError, match="plan for TorchRec: Object"):
        TorchRecPlan.from_json(Plan(world=4, tiles=layouts.table_wise(BIG, 0)).to_json())
    text = torchrec_json(Plan(world=4, tiles=layouts.table_wise(BIG, 0)), [BIG]).replace("sharding-1", "sharding-9")
    with pytest.raises(SpecError, match="format 'torchrec-sharding-9'"):
        TorchRecPlan.from_json(text)


@TORCHREC
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_plans_are_held_to_the_module():
    from rowwise.recipes.torchrec import sharding_plan

    tables = tables_of()
    text = torchrec_json(planned(tables, Topology(devices=2)), tables)
    model = torchrec_ranks.Model(tables)
    assert list(sharding_plan(text, model, "inner").plan) == ["inner.bags"]
    spec = sharding_plan(text, model, device="cuda").plan["inner.bags"]["c"].sharding_spec
    assert [str(shard.placement) for shard in spec.shards] == ["rank:0/cuda:0", "rank:1/cuda:1"]
    with pytest.raises(SpecError, match="'else' has table 'a'"):
        sharding_plan(text, model, "else")
    with pytest.raises(SpecError, match="table 'a' of module"):
        sharding_plan(torchrec_json(planned(tables, Topology(devices=2)), tables).replace('"a"', '"z"'), model)
    larger = torchrec_ranks.Model([structs.replace(tables[0], rows=99), *tables[1:]])
    with pytest.raises(SpecError, match="table 'a' is 99"):
        sharding_plan(text, larger)
