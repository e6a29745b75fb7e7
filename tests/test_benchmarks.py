"""Benchmarks start, end, and say what they measured in one line of JSON; they use what the library shows everybody."""

import argparse
import ast
import importlib.util
import json
import math
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from from_benchmarks import BENCHMARKS, part
from pyarrow import csv
from torch.utils.flop_counter import FlopCounterMode

from rowwise import Embeddings, Jagged, RowType, Table

ENTRIES = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
OWN = ("self", "cls")


def run(name, *options, cwd):
    command = [sys.executable, "-W", "ignore", BENCHMARKS / f"{name}.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.bench
@pytest.mark.parametrize("name", ENTRIES)
def test_starts_and_ends_with_the_right_results(name, tmp_path):
    saved = tmp_path / "result.json"
    result = run(name, "--smoke", "--save", saved, cwd=tmp_path)
    assert result == json.loads(saved.read_text())
    assert (result["benchmark"], result["run"]) == (name, "smoke")
    assert result["rows"]
    assert result["floors"]
    for floor in result["floors"]:
        assert floor.keys() >= {"name", "value", "floor", "ok"}
        assert floor["ok"], floor


@pytest.mark.bench
def test_ours_send_no_more_than_the_formulas_say(tmp_path):
    floors = run("shard_step", "--quick", "--only", "bytes", cwd=tmp_path)["floors"]
    assert len(floors) >= 4
    assert all(floor["ok"] for floor in floors)


@pytest.mark.bench
@pytest.mark.skipif(find_spec("torchrec") is None, reason="needs the extra 'peers'")
def test_torchrec_is_held_against_itself_over_two_processes(tmp_path):
    """The same model by another way of adding up; a state for each piece of a row is not the same model."""
    rows = run("shard_step", "--quick", "--peer-only", "--only", "plans", cwd=tmp_path)["rows"]
    away = {row["layout"]: row["difference"] / row["moved"] for row in rows}
    assert away["row-wise"] < 1e-5
    assert away["column-wise"] > 0.01


@pytest.mark.bench
def test_a_calibration_is_measured_and_judged(tmp_path):
    """As a whole, on little data: what it finds is in order, if not good."""
    sections = ["sets", "chosen", "plans"]
    result = run("calibrate", "--quick", "--only", *sections, cwd=tmp_path)
    found = {section: [row for row in result["rows"] if row["section"] == section] for section in sections}
    (sets,) = found["sets"]
    assert sets["errors"][0]["tau"] > 0.5
    assert len(found["chosen"]) == 2
    assert {"ours", "ldm", "dreamshard"} <= {row["plan"] for row in found["plans"]}
    assert all(row["measured_ms"] > 0 and row["predicted_ms"] > 0 for row in found["chosen"] + found["plans"])
    assert len(result["floors"]) == 6


@pytest.mark.parametrize("name", ENTRIES)
def test_a_docstring_says_what_is_asked_taken_and_needed(name):
    """What `rowwise bench --list` shows."""
    lines = ast.get_docstring(ast.parse((BENCHMARKS / f"{name}.py").read_text())).splitlines()
    assert lines[0].endswith("?")
    assert [line.split(":")[0] for line in lines if line.startswith(("Takes: ", "Needs: "))] == ["Takes", "Needs"]


def private_names(tree):
    """Names with one underscore in front that code takes from anything but itself."""
    methods = {"_asdict", "_replace", "_fields"}  # named so by Python, lest they meet a field
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in OWN):
            found = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            found = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        else:
            continue
        yield from (
            name for name in found if name.startswith("_") and not name.startswith("__") and name not in methods
        )


PUBLIC_CODE = sorted((*BENCHMARKS.rglob("*.py"), *(BENCHMARKS.parent / "examples").rglob("*.py")))
# Of others, who have no public name for it: what TorchRec's planner found, and hooks of torch and Triton's interpreter.
ALLOWED = {
    "planner_torchrec.py": {"_best_plan"},
    "recd.py": {"_python_dispatch"},
    "gpu_trace.py": {"_patch_lang"},
    # Of our own, the kernels that are compiled.
    **{f"{name}.py": {"_triton"} for name in ("gpu_budget", "gpu_variants")},
}


@pytest.mark.parametrize("path", PUBLIC_CODE, ids=lambda p: p.name)
def test_no_private_name_is_used(path):
    found = set(private_names(ast.parse(path.read_text())))
    assert found <= ALLOWED.get(path.name, set())


def test_a_private_name_is_found():
    code = "from rowwise.x._y import _z\na.b._c(self._own, x._asdict(), y.__len__())"
    assert set(private_names(ast.parse(code))) == {"_y", "_z", "_c"}


def cpuinfo(vendor, family, model, name, flags):
    facts = (
        f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: {name}\nflags\t\t: {flags}\n"
    )
    return f"processor\t: 0\n{facts}\nprocessor\t: 1\n{facts}"


AVX2 = "fpu sse2 fma f16c avx avx2 bmi1 bmi2"
AVX512 = f"{AVX2} avx512f avx512dq avx512cd avx512bw avx512vl"
PROCESSORS = {
    "amd-zen1-avx2": cpuinfo("AuthenticAMD", 23, 1, "AMD EPYC 7601", AVX2),
    "amd-zen2-avx2": cpuinfo("AuthenticAMD", 23, 49, "AMD EPYC 7742", AVX2),
    "amd-zen3-avx2": cpuinfo("AuthenticAMD", 25, 1, "AMD EPYC", AVX2),
    "amd-zen4-avx512": cpuinfo("AuthenticAMD", 25, 17, "AMD EPYC", AVX512),
    "amd-zen4-avx2": cpuinfo("AuthenticAMD", 25, 17, "AMD EPYC", f"{AVX2} avx512f"),  # not all that is wanted of it
    "amd-zen5-avx512": cpuinfo("AuthenticAMD", 26, 2, "AMD EPYC 9755", AVX512),
    "amd-family27-avx512": cpuinfo("AuthenticAMD", 27, 2, "", AVX512),
    "intel-xeon-avx512": cpuinfo("GenuineIntel", 6, 143, "Intel(R) Xeon(R) Processor @ 2.50GHz", AVX512),
    "intel-core-avx2": cpuinfo("GenuineIntel", 6, 151, "12th Gen Intel(R) Core(TM) i7-12700K", AVX2),
    "intel-core-base": cpuinfo("GenuineIntel", 6, 23, "Intel(R) Core(TM)2 Duo", "fpu sse2"),
    "hygongenuine-family24-avx2": cpuinfo("HygonGenuine", 24, 0, "Hygon C86", AVX2),
    "aarch64-neon": "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n",
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_has_one_name(name):
    machine = "aarch64" if "neon" in name else "x86_64"
    assert part("processor").processor_name(PROCESSORS[name], machine) == name


def test_saved_results_are_those_of_their_processor():
    """As far as a result names one itself."""
    for path in sorted((BENCHMARKS / "results").rglob("*.json")):
        result = json.loads(path.read_text())
        if path.parent.name.startswith("nvidia-"):
            gpu = next(row["device"] for row in result["rows"] if row["section"] == "machine")
            assert gpu.lower().replace(" ", "-").startswith(path.parent.name)
            continue
        made = result["environment"]
        vendor = {"amd": "AMD", "intel": "Intel"}[path.parent.name.split("-")[0]]
        assert made["cpu"].startswith(vendor)
        assert made["isa"] == path.parent.name.split("-")[-1]
        assert made.get("processor", path.parent.name) == path.parent.name


@pytest.mark.parametrize("row_type", RowType)
def test_rows_that_are_rewritten_stay_as_they_are(row_type):
    tables = [Table(name=f"t{dim}", rows=40, dim=dim, row_type=row_type) for dim in (4, 20, 64)]
    module = Embeddings(tables)
    before = module.arena.rows.clone()
    generator = torch.Generator().manual_seed(0)
    lengths_FB = torch.randint(0, 5, (len(tables) * 30,), generator=generator)
    ids_N = torch.randint(0, 40, (int(lengths_FB.sum()),), generator=generator)
    batch = Jagged(features=tuple(t.name for t in tables), values_N=ids_N, lengths_FB=lengths_FB)
    rows = part("limits").Rows(module, batch)
    assert min(rows.gather_s(), rows.rewrite_s()) > 0
    assert torch.equal(module.arena.rows, before)
    assert not module.staged


def test_products_of_a_step_are_those_that_torch_counts():
    """Of linear layers; pairs of vectors are half of the square that torch multiplies."""
    bottom, top, batch = (3, 8, 4), (4, 16, 1), 5
    mlp = part("dlrm").torch_mlp
    layers = torch.nn.Sequential(mlp(bottom, True), mlp(top, False))
    with FlopCounterMode(display=False) as counted:
        layers(torch.randn(batch, bottom[0])).sum().backward()
    flops = part("limits").dlrm_flops
    assert flops(batch, bottom, top, vectors=1) == counted.get_total_flops()
    assert flops(batch, bottom, top, vectors=3) - flops(batch, bottom, top, vectors=1) == 2 * 3 * batch * 3 * bottom[-1]


@pytest.mark.parametrize(("options", "name"), [([], "ops.json"), (["--quick"], "ops.quick.json")])
def test_a_coarse_result_does_not_replace_a_full_one(options, name):
    report = part("report")
    args = report.parsed(report.options("ops", "What?"), [*options, "--save"])
    assert args.save == BENCHMARKS / "results" / part("processor").this_processor() / name


def test_a_smoke_run_is_not_kept_with_results(capsys):
    report = part("report")
    with pytest.raises(SystemExit):
        report.parsed(report.options("ops", "What?"), ["--smoke", "--save"])
    assert "give --save a FILE elsewhere" in capsys.readouterr().err


def test_frappe_is_read_from_the_file_that_is_given(tmp_path):
    data = part("first_hour_data")
    lines = [f"{1 if k % 3 else -1} {' '.join(f'{100 * f + k % 7}:1' for f in range(10))}" for k in range(50)]
    (tmp_path / "rows.libfm").write_text("\n".join(lines) + "\n")
    folder = data.write_rows("frappe", tmp_path / "made", tmp_path / "rows.libfm")
    made = {name: csv.read_csv(folder / f"{name}.csv") for name in data.PARTS}
    assert [made[name].num_rows for name in data.PARTS] == [40, 5, 5]
    assert made["train"].column_names == ["label", *(f"f{k}" for k in range(10))]
    rows = [row for table in made.values() for row in zip(*table.to_pydict().values(), strict=True)]
    assert sorted(rows) == sorted((int(k % 3 > 0), *(100 * f + k % 7 for f in range(10))) for k in range(50))
    (tmp_path / "rows.libfm").unlink()
    assert data.write_rows("frappe", tmp_path / "made") == folder  # the CSV files are enough


@pytest.mark.parametrize("text", ["", "1 3:1 4:1\n", "not rows\n"])
def test_a_file_that_is_not_frappe_is_refused(tmp_path, text):
    (tmp_path / "rows.libfm").write_text(text)
    with pytest.raises(AssertionError, match="label and 10 ids"):
        part("first_hour_data").write_rows("frappe", tmp_path / "made", tmp_path / "rows.libfm")


def benchmark(name):
    part("report")
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def first_hour():
    return benchmark("first_hour")


def test_the_rate_of_the_lowest_entropy_is_taken():
    """And not one whose training ended in NaN."""
    models = benchmark("models")
    rows = [
        {"model": name, "lr": lr, "ne": ne}
        for name, lr, ne in (("a", 1, 0.9), ("a", 2, 0.8), ("b", 1, math.nan), ("b", 2, 0.9))
    ]
    assert models.best_rates(rows) == {"a": 2, "b": 2}


def test_runs_of_models_are_kept_for_the_next_time(tmp_path):
    models = benchmark("models")
    job = models.Job("movielens-100k", "dcn", 0.002, 0, tuning=False)
    row = job._asdict() | {"ne": 0.8, "auc": 0.7, "parameters": 10, "flops": 20}
    (tmp_path / "runs.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = models.Runs(tmp_path / "runs.jsonl", tmp_path, 1).of([job], "again")
    assert found == row
    (line,) = models.summary([found])
    assert (line["ne"], line["spread"], line["model"]) == (0.8, 0, "dcn")


def quality(side, model, *values, name="frappe"):
    """A row for each seed."""
    same = {"section": "quality", "set": name, "side": side, "model": model}
    return [{**same, "seed": seed, "auc": auc} for seed, auc in enumerate(values)]


def test_floors_are_against_trees_and_the_best_peer(first_hour):
    ours = quality("rowwise", "starter", 0.93, 0.95) + quality("rowwise", "ensemble", 0.99)
    peers = quality("RecBole", "deepfm", 0.96, 0.97) + quality("RecBole", "defaults", 0.80, 0.81)
    trees, best = first_hour.quality_floors(ours + quality("LightGBM", "trees", 0.945, 0.945) + peers)
    assert (trees["value"], trees["floor"], trees["ok"]) == (pytest.approx(-0.005), -0.01, True)
    assert (best["value"], best["floor"], best["ok"]) == (pytest.approx(-0.025), pytest.approx(-0.02), False)
    assert first_hour.quality_floors(peers) == []


def test_rows_that_are_not_measured_again_stay(first_hour, tmp_path):
    old = quality("rowwise", "starter", 0.7, 0.8) + quality("RecBole", "deepfm", 0.6)
    (tmp_path / "r.json").write_text(json.dumps({"rows": old, "environment": {"commit": "abc"}}))
    found = first_hour.saved_rows(
        quality("rowwise", "starter", 0.9), argparse.Namespace(save=tmp_path / "r.json", smoke=False)
    )
    assert [(row["side"], row["seed"], row["auc"]) for row in found] == [
        ("rowwise", 1, 0.8),
        ("RecBole", 0, 0.6),
        ("rowwise", 0, 0.9),
    ]
    assert [row["commit"] for row in found[:2]] == ["abc", "abc"]
