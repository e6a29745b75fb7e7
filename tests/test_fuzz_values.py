"""Thousands of broken recipes, plans, profiles and lists of tables, through the readers of commands."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from campaign import Campaign, check_said, plain
from mutations import doubled_key, mutate_bytes, mutate_tree

from rowwise import Plan, Table
from rowwise.planning.perf.hardware import hardware_named, read_hardware
from rowwise.planning.planner.constraints import Constraints
from rowwise.planning.planner.inputs import read_tables
from rowwise.planning.planner.machines import machine_named
from rowwise.recipes.find import LIBRARY, load
from rowwise.recipes.recipe import Recipe
from rowwise.recipes.text import apply_change, decode, parse, read, write

RECIPES = {path.stem: path.read_text() for path in sorted(LIBRARY.glob("*.yaml"))}
TABLES = (Table(name="a", rows=10, dim=8), Table(name="b", rows=1000, dim=16))
PLAN = {
    "world": 2,
    "tiles": [
        {"table": "a", "rank": 0, "rows": [0, 10], "cols": [0, 8]},
        {"table": "b", "rank": 0, "rows": [0, 500], "cols": [0, 16]},
        {"table": "b", "rank": 1, "rows": [500, 1000], "cols": [0, 16], "tier": "host", "cache_rows": 10},
    ],
    "approximate": [],
    "forecast": {"model": "roofline", "batch": 64, "step_s": 0.5, "stages_s": {"lookup": [0.1, 0.2]}, "bound": "x"},
}
LIST = [
    {"name": "a", "rows": 100, "dim": 8, "pooling": 2.5, "zipf_a": 1.1, "row_type": "fp16", "optimizer": "adam"},
    {"name": "b", "rows": 7, "dim": 16, "pooling": 1, "active": 3, "unique_ratio": 0.5, "features": ["b", "c"]},
]
CSV = b"name,rows,dim,pooling,zipf_a,features\na,100,8,2.5,1.1,\nb,7,16,1,,b;c\n"
CONSTRAINTS = {"layouts": {"*": ["table", "row"], "a": ["replicated"]}, "ranks": {"a": [0]}}
SETTINGS = (
    "data",
    "train",
    "tables.each",
    "model",
    "transforms",
    "columns",
    "save.every",
    "log.profile",
    "seed",
    "name",
)


def full_recipe() -> dict[str, Any]:
    """One that says something in every section."""
    recipe = load("dlrm-synthetic", ["train.schedule={warmup_steps: 10}", "data.workers={count: 2}", "log.profile=1:2"])
    return yaml.safe_load(write(recipe, defaults=True))


def as_recipe(path: Path, data: bytes) -> Recipe:
    path.write_bytes(data)
    return read(path)


def check_recipe(data: bytes, recipe: Recipe) -> None:
    """It is what the text says, and its own text is read as the same."""
    given = {key: value for key, value in parse(data.decode("utf-8-sig"), "x").items() if value is not None}
    if given.get("name") == "":  # that of the file
        del given["name"]
    check_said(given, plain(recipe))
    assert decode(parse(write(recipe, defaults=True), "again"), "again") == recipe


@pytest.mark.slow
def test_recipes(tmp_path: Path) -> None:
    campaign, random, path = Campaign("recipes"), Random(1), tmp_path / "x.yaml"
    whole = full_recipe()
    for number in range(3000):
        source = whole if number % 2 else yaml.safe_load(random.choice(list(RECIPES.values())))
        tree = mutate_tree(source, random, changes=random.choice((1, 1, 2, 4)), finite=False)
        data = yaml.safe_dump(tree, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")
        campaign.take(data, lambda data=data: as_recipe(path, data), lambda found, data=data: check_recipe(data, found))
    for _ in range(2000):
        data = mutate_bytes(random.choice(list(RECIPES.values())).encode(), random)
        campaign.take(data, lambda data=data: as_recipe(path, data), lambda found, data=data: check_recipe(data, found))
    campaign.finish()


@pytest.mark.slow
def test_changes_of_recipes() -> None:
    campaign, random = Campaign("--set"), Random(2)
    words = [
        *SETTINGS,
        "train.batch",
        "tables.list.0.rows",
        "data.where",
        "model.kind",
        "..",
        "a.b.c",
        "²",
        "tables.list.²",
    ]
    for _ in range(3000):
        value = mutate_bytes(random.choice((b"1", b"[1, 2]", b"{kind: dcn}", b"x", b"null", b"1e-3")), random)
        change = f"{random.choice(words)}={value.decode('utf-8', 'replace')}"

        def changed(change: str = change) -> tuple[str, Recipe]:
            sections = parse(RECIPES["dlrm-synthetic"], "x")
            apply_change(sections, change)
            return change, decode(sections, "x")

        campaign.take(change, changed, lambda found: None)
    campaign.finish()


def json_campaign(name: str, good: Any, accept: Callable[[bytes], Any], oracle: Callable[[Any, Any], None]) -> None:
    """Mutated trees, keys that are given twice and broken bytes of one JSON format."""
    campaign, random = Campaign(name), Random(name)
    text = json.dumps(good).encode()
    for _ in range(2000):
        tree = mutate_tree(good, random, changes=random.choice((1, 1, 2, 4)))
        data = json.dumps(tree).encode()
        campaign.take(data, lambda data=data: accept(data), lambda found, tree=tree: oracle(tree, found))
    for number in range(1500):
        data = doubled_key(good, random).encode() if number < 100 else mutate_bytes(text, random)
        campaign.take(data, lambda data=data: accept(data), lambda found, data=data: oracle(json.loads(data), found))
    campaign.finish()


@pytest.mark.slow
def test_plans() -> None:
    def accept(data: bytes) -> Plan:
        plan = Plan.from_json(data)
        plan.validate(TABLES)
        return plan

    def oracle(tree: Any, plan: Plan) -> None:
        assert Plan.from_json(plan.to_json()) == plan
        check_said(tree, plain(plan))
        cells = {(t.table, r, t.rank) for t in plan.tiles for r in range(*t.rows)}
        assert {(name, row) for name, row, _ in cells} == {(t.name, r) for t in TABLES for r in range(t.rows)}

    json_campaign("plans", PLAN, accept, oracle)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "a100-like"])
def test_profiles(name: str) -> None:
    good = json.loads(hardware_named(name).to_json())

    def oracle(tree: Any, found: Any) -> None:
        check_said(tree, plain(found))
        assert read_hardware(found.to_json()) == found

    json_campaign(f"profiles of {name}", good, read_hardware, oracle)


@pytest.mark.slow
def test_machines(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    hardware = json.loads(hardware_named("cpu").to_json())

    def accept(data: bytes) -> Any:
        path.write_bytes(data)
        return machine_named(str(path))

    def oracle(tree: Any, found: Any) -> None:
        check_said(tree["topology"], plain(found.topology))
        assert all(size >= 0 for size in found.memory_bytes)

    json_campaign("machines", {"topology": {"hosts": 2, "devices": 4}, "hardware": hardware}, accept, oracle)


@pytest.mark.slow
def test_constraints() -> None:
    json_campaign("constraints", CONSTRAINTS, Constraints.from_json, lambda tree, found: check_said(tree, plain(found)))


@pytest.mark.slow
def test_lists_of_tables(tmp_path: Path) -> None:
    path = tmp_path / "tables.json"

    def accept(data: bytes) -> Any:
        path.write_bytes(data)
        return read_tables(path)

    def oracle(tree: Any, found: Any) -> None:
        assert len(tree) == len(found.workloads)
        for entry, workload in zip(tree, found.workloads, strict=True):
            assert workload.table.name in (str(entry["name"]).strip(), f"t{entry['name']}")  # a number is no name
            assert (int(float(entry["rows"])), int(float(entry["dim"]))) == (workload.table.rows, workload.table.dim)
            assert float(entry["pooling"]) == workload.access.pooling

    json_campaign("lists of tables", LIST, accept, oracle)


@pytest.mark.slow
def test_access_statistics(tmp_path: Path) -> None:
    path = tmp_path / "access.json"
    good = json.loads((Path(__file__).parent / "golden" / "files" / "run" / "access.json").read_bytes())

    def accept(data: bytes) -> Any:
        path.write_bytes(data)
        return read_tables(path)

    json_campaign("access statistics", good, accept, lambda tree, found: check_workloads(tree, found.workloads))


def check_workloads(tree: Any, workloads: Any) -> None:
    assert len(tree) == len(workloads)
    for entry, workload in zip(tree, workloads, strict=True):
        if "table" in entry:
            check_said(entry, plain(workload))


@pytest.mark.slow
def test_tables_as_csv(tmp_path: Path) -> None:
    campaign, random, path = Campaign("tables as CSV"), Random(5), tmp_path / "tables.csv"

    def accept(data: bytes) -> Any:
        path.write_bytes(data)
        return read_tables(path)

    def oracle(found: Any, data: bytes) -> None:
        for workload in found.workloads:
            for number in (workload.table.rows, workload.table.dim):
                digits = data.replace(b".0", b"").replace(b"+", b"")
                assert str(number).encode() in digits or b"e" in data, f"{number} is not in the file"

    for _ in range(4000):
        data = mutate_bytes(CSV, random)
        campaign.take(data, lambda data=data: accept(data), lambda found, data=data: oracle(found, data))
    campaign.finish()
