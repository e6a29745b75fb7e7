"""What is too large for any machine is refused in one line that says the bound, as it is read."""

import pytest

from rowwise import Plan, SpecError, Table
from rowwise.ingest.transform.ids import FirstX, NGram
from rowwise.planning.perf.hardware import hardware_named, read_hardware
from rowwise.recipes.text import apply_change, decode
from rowwise.tables.idmaps import HashIds
from rowwise.tables.spec import Topology


def changed(sections, change):
    apply_change(sections, change)
    return sections


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("train.batch=4611686018427387904", "train.batch=4611686018427387904: expected at most 16,777,216"),
        ("train.threads=1099511627776", "train.threads=1099511627776: expected at most 1,024"),
        ("train.steps=1000000000000000000000000", "train.steps=1000000000000000000000000: expected at most"),
        ("train.epochs=4611686018427387904", "expected at most 1,099,511,627,776"),
        ("train.accumulate=4611686018427387904", "expected at most 16,777,216"),
        ("train.ahead=1099511627776", "expected at most 4,096"),
        ("train.virtual_shards=1099511627776", "expected at most 16,777,216"),
        ("evaluate.batch=1099511627776", "evaluate.batch=1099511627776: expected at most 16,777,216"),
        ("evaluate.slice_ids=1099511627776", "expected at most"),
        ("log.window=1099511627776", "log.window=1099511627776: expected at most 16,777,216"),
        ("log.profile='1:99999999999999999999'", "expected the first and last step"),
        ("log.profile='²:3'", "expected the first and last step"),
        ("data.rows=4611686018427387904", "data.rows=4611686018427387904: expected at most 17,179,869,184"),
        ("data.workers={count: 1099511627776}", "data.workers.count=1099511627776: expected at most 4,096"),
        ("data.workers={ahead: 1099511627776}", "data.workers.ahead=1099511627776: expected at most 4,096"),
        (
            "model={kind: dlrm, top: [1099511627776]}",
            "model.top: 1099511627776 is the width of a layer: expected at most",
        ),
        ("model={kind: dcn, crosses: 1099511627776}", "model.crosses: 1099511627776"),
        ("tables.list=[{name: a, rows: 4611686018427387904, dim: 8}]", "expected fewer than 2**40"),
        ("tables.list=[{name: a, rows: 8, dim: 1099511627776}]", "dim=1099511627776: expected at most 65,536"),
        ("seed=1000000000000000000000000", "less than 2**63"),
        ("train.clip=1e999", "expected a number that 64 bits can hold"),
    ],
)
def test_sizes_of_recipes(change: str, told: str) -> None:
    sections = {"data": {"dataset": "synthetic"}}
    with pytest.raises(SpecError) as caught:
        decode(changed(sections, change), "x.yaml")
    assert told in str(caught.value)


def test_sizes_of_values() -> None:
    profile = hardware_named("cpu").to_json()
    for make, told in (
        (lambda: Table(name="a\x1b[2J", rows=1, dim=1), "control character"),
        (lambda: Table(name="\n", rows=1, dim=1), "control character"),
        (lambda: HashIds(rows=1 << 62), r"expected fewer than 2\*\*40"),
        (lambda: NGram(column="a", n=1 << 62), "at most 1024"),
        (lambda: FirstX(column="a", count=1 << 62), r"less than 2\*\*31"),
        (lambda: Topology(hosts=1 << 31, devices=1 << 31), "expected at most 16,384 devices"),
        (lambda: Plan(world=1 << 40, tiles=()).validate(()), "expected at most 16,384"),
        (lambda: read_hardware(profile.replace("17179869184", "9" * 19)), "expected at most 1,152,921,504,606,846,976"),
        (lambda: read_hardware(profile.replace("2.5e-8", "-1")), "backward_issue_s=-1.0: expected 0 or more"),
    ):
        with pytest.raises(SpecError, match=told):
            make()
