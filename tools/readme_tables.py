"""Write docs/benchmarks/, docs/recipes.md and README's numbers from saved results, or check that they say the same.

python tools/readme_tables.py [--check]

Each subject has a page, with a section for each processor whose results are saved. README has three numbers, of the
first processor that has them.
"""

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import saved_results
from saved_results import NotSaved

from rowwise.ingest.datasets.catalog import catalog
from rowwise.recipes.find import load, names

ROOT = Path(__file__).parents[1]
OURS, BESIDE = "rowwise fp32", "TorchRec fp32"
Read = Callable[[str], dict]  # the result of a benchmark, on one processor
OPTIMIZERS = {"sgd": "SGD", "rowwise_adagrad": "row-wise Adagrad", "adagrad": "Adagrad", "adam": "Adam", "lamb": "LAMB"}


def ratio(values: list[float]) -> str:
    return f"{math.exp(sum(map(math.log, values)) / len(values)):.1f}x" if values else "-"


def by_threads(rows: list[dict]) -> str:
    """Geometric means on one thread and on two, and the slowest configuration."""
    cells = [ratio([r["ratio"] for r in rows if r["threads"] == n]) for n in (1, 2)]
    return " | ".join([*cells, f"{min(r['ratio'] for r in rows):.2f}x"])


def with_facts(lines: list[str], facts: list[str], result: dict) -> str:
    return "\n".join([*lines, "", *(f"- {fact}" for fact in facts), f"- {made_on(result)}"])


def made_on(result: dict) -> str:
    made = result["environment"]
    machine = f"Processor {result['processor']} ({made['cpu']}, {made['cores']} cores)"
    # Sections may have been measured at different commits; then each row names its own.
    rows = result["rows"] if isinstance(result["rows"], list) else []
    commits = ", ".join(dict.fromkeys(row.get("commit", made["commit"]) for row in rows)) or made["commit"]
    return f"{machine}, torch {made['versions']['torch']}, commit {commits}."


def ops(read: Read) -> str:
    result = read("ops")
    rows = [r for r in result["rows"] if r["peer"] != "rowwise fp16"]
    head = "| against | rows | optimizer | 1 thread | 2 threads | slowest configuration |"
    lines = [head, "|---|---|---|---|---|---|"]
    for kind in dict.fromkeys((r["peer"], r["row_type"], r["optimizer"]) for r in rows):
        mine = [r for r in rows if (r["peer"], r["row_type"], r["optimizer"]) == kind]
        lines.append(f"| {kind[0]} | {kind[1]} | {OPTIMIZERS[kind[2]]} | {by_threads(mine)} |")
    limited = (r for r in rows if "gather_share" in r and r["row_type"] == "fp32")
    shares = [r["gather_share"] for r in limited if r["pooling"] == 20 and r["dim"] >= 64]
    facts = [
        "Cells: time of the peer over that of rowwise, for lookup, backward and update together. Each is a geometric "
        "mean over dims, batch sizes, poolings and id distributions; the last column is the slowest of these.",
        f"Lookups of fp32 rows with pooling 20 and dim >= 64 run at {min(shares):.0%} to {min(1.0, max(shares)):.0%} "
        "of the speed at which this machine reads the same rows without pooling.",
        "FBGEMM's CPU wheels from 1.6 on run on one thread. 1.5.0 is the last CPU wheel with multithreading.",
    ]
    return with_facts(lines, facts, result)


def around(read: Read) -> str:
    """Everything but the tables: rearranging batches, and the dense side."""
    dense, jagged = read("dense_cpu"), read("jagged")
    kinds = {"interaction": "interaction", "linears": "linear layers", "step": "DLRM step"}
    rows = [{**r, "kind": r["op"]} for r in jagged["rows"]]
    rows += [{**r, "kind": f"{kinds[r['kind']]}, {r['dtype']}", "peer": "torch"} for r in dense["rows"]]
    lines = ["| what | against | 1 thread | 2 threads | slowest configuration |", "|---|---|---|---|---|"]
    for kind in dict.fromkeys((r["kind"], r["peer"]) for r in rows):
        mine = [r for r in rows if (r["kind"], r["peer"]) == kind]
        lines.append(f"| {kind[0]} | {kind[1]} | {by_threads(mine)} |")
    library = dense["environment"]["library"]
    facts = [
        "Cells: time of the other library over that of rowwise.",
        f"Dense layers: forward and backward through autograd. `Linear` uses {library} on this processor family.",
    ]
    return with_facts(lines, facts, dense)


def compress(read: Read) -> str:
    result = read("compress")
    rows, films = result["rows"]["quality"], result["rows"]["films"]
    full, ratios = rows[0], list(dict.fromkeys(row["ratio"] for row in rows[1:]))
    head = " | ".join(f"1/{ratio:g}: AUC, NE, bytes (maps), built in" for ratio in ratios)
    lines = [f"| method | {head} |", "|---" * (1 + len(ratios)) + "|"]
    for name in dict.fromkeys(row["method"] for row in rows[1:]):
        at = {row["ratio"]: row for row in rows if row["method"] == name}
        lines.append(f"| {name} | " + " | ".join(compressed(at.get(ratio)) for ratio in ratios) + " |")
    scale, advice = result["rows"]["scale"], result["rows"]["advice"]
    auc = {row["method"]: center(row["auc"]) for row in films}
    half = {row["method"]: center(row["auc"]) for row in result["rows"]["half"]}
    chosen = ", ".join(f"{name} by {one['method'] or 'rows of their own'}" for name, one in advice["tables"].items())
    facts = [
        f"Data: sales in stores, ids numbered at random, {len(full['auc'])} seeds. Full tables reach AUC "
        f"{center(full['auc']):.4f} ± {(max(full['auc']) - min(full['auc'])) / 2:.4f} and "
        f"NE {center(full['ne']):.4f} in {full['bytes'] / 1e6:.1f} MB. ± is half the range over seeds.",
        "Bytes are those of all tables, id maps included. Small tables that quotient-remainder cannot shrink that far "
        "keep their size.",
        f"`rowwise compress` with one budget of 1/{advice['ratio']:g} for all tables, which never sees test rows, "
        f"chooses {chosen}: AUC {center(advice['auc']):.4f} in {advice['bytes'] / 1e6:.2f} MB.",
        f"Age of a map, at 1/100, trained on the second half of the weeks: AUC {half['full']:.4f} with full tables, "
        f"{half['learned, second half']:.4f} with a map learned from that half, {half['learned, first half']:.4f} "
        f"with one learned from the first half, {half['hash']:.4f} with a hash.",
        f"MovieLens-100k, users and films in 1/8: AUC {auc['full']:.4f} with full tables, {auc['hash']:.4f} hash, "
        f"{auc['mixed']:.4f} mixed, {auc['learned']:.4f} learned.",
        f"A map of {scale['ids'] / 1e6:g} million ids into {scale['rows']:,} rows takes {scale['wall_s']:.0f} s and "
        f"{scale['peak_gb']:.1f} GB to build.",
    ]
    return with_facts(lines, facts, result)


def compressed(row: dict | None) -> str:
    if row is None:
        return "cannot be that small"
    half = (max(row["auc"]) - min(row["auc"])) / 2
    size = f"{row['bytes'] / 1e6:.2f} MB ({row['map_bytes'] / 1e6:.2f})"
    return f"{center(row['auc']):.4f} ± {half:.4f}, {center(row['ne']):.4f}, {size}, {row['build_s']:.1f} s"


def center(values: list[float]) -> float:
    return sum(values) / len(values)


def quality(read: Read) -> str:
    result = read("quality")
    lines = ["| rows | NE | above fp32 | AUC |", "|---|---|---|---|"]
    exact = mean(result, "fp32", "ne")
    for name in dict.fromkeys(r["row_type"] for r in result["rows"]):
        ne, auc = mean(result, name, "ne"), mean(result, name, "auc")
        lines.append(f"| {name} | {ne:.4f} | {ne - exact:+.5f} | {auc:.4f} |")
    seeds = len({r["seed"] for r in result["rows"]})
    facts = [
        f"Means of {seeds} seeds; 2 million samples each, each seen once.",
        "Labels are drawn from a teacher with known probabilities; the last row is what the teacher itself scores.",
    ]
    return with_facts(lines, facts, result)


def managed(read: Read) -> str:
    result = read("managed")
    head = "| table | rows | AUC | admitted | evicted, expired | a step | memory grown since a quarter |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for row in result["rows"]:
        if "auc" in row:
            lost = f"{row['evicted'] + row['expired']:,}" if "evicted" in row else ""
            cells = [
                row["table"],
                f"{row['rows']:,}",
                f"{row['auc']:.4f}",
                f"{row.get('admitted', ''):,}" if lost else "",
                lost,
            ]
            growth = f"{row['memory_growth_bytes'] / row['memory_quarter_bytes']:.1%}"
            lines.append(f"| {' | '.join(cells)} | {row['step_ms']:.1f} ms | {growth} |")
    moved = result["rows"][-1]
    facts = [
        f"{result['distinct']:,} distinct ids, of a Zipf distribution whose head moves; batches of 8,192 samples.",
        "Each sample is scored before it is trained on; AUC is that of the second half.",
        f"Four ranks, then three: {moved['differ']} of {moved['tensors']} tensors differ from those of one rank.",
    ]
    return with_facts(lines, facts, result)


def recipes() -> str:
    """What the recipes that ship say of themselves."""
    lines = ["| recipe | what | test metrics | published | takes |", "|---|---|---|---|---|"]
    for name in names():
        about = load(name).about
        spread = {metric: f" \u00b1 {about.spread[metric]:.2g}" for metric in about.spread}
        metrics = ", ".join(
            f"{m.upper() if m in ('auc', 'ne') else m} {value:.4g}{spread.get(m, '')}"
            for m, value in about.expect.items()
        )
        takes = [f"{about.time_s:.0f} s"] if about.time_s else []
        takes += [f"{about.memory_gb:.1f} GB"] if about.memory_gb else []
        published = ", ".join(f"{m} {value:.4g}" for m, value in about.published.items())
        cells = (metrics or "not run", f"{published} ({about.published_by})" if published else "", ", ".join(takes))
        lines.append(f"| `{name}` | {about.what} | {' | '.join(cells)} |")
    return "\n".join(
        [*lines, "", "Means of 3 seeds and the widest difference between them, on 2 cores of an AMD EPYC."]
    )


def step(read: Read) -> str:
    result = read("train_step")
    speed = {(r["side"], r["threads"]): r["samples_s"] for r in result["rows"] if r.get("optimizer") == "adam"}
    memory = {r["side"]: r["peak_bytes"] for r in result["rows"] if r["kind"] == "memory"}
    lines = ["| samples/s | 1 thread | 2 threads | peak memory |", "|---|---|---|---|"]
    for side in dict.fromkeys(side for side, _ in speed):
        cells = [f"{speed[side, n]:,.0f} ({speed[side, n] / speed[BESIDE, n]:.1f}x)" for n in (1, 2)]
        lines.append(f"| {side} | {' | '.join(cells)} | {memory[side] / 1e9:.1f} GB |")
    facts = [
        "Model: DLRM with 13 dense numbers, 26 tables of dim 64, MLPs 512-256-64 and 512-512-256-1, batch 2,048.",
        f"In brackets: speed relative to {BESIDE}. TorchRec 1.8.0 has FBGEMM's fused tables; torch is nn.EmbeddingBag "
        "with Adagrad. All use torch's fused Adam for the dense layers.",
        "Matrix products are most of a step. Both of torch's libraries for them reach more than 80 % of this "
        "processor's peak.",
    ]
    shares = [f"{r['limit_share']:.2f}" for r in result["rows"] if r["side"] == OURS and "limit_share" in r]
    if shares:
        facts.append(f"Share of the machine's limit, {OURS}, by optimizer and threads: {', '.join(shares)}.")
    return with_facts(lines, facts, result)


def shard(read: Read) -> str:
    """Two processes beside TorchRec's."""
    result = read("shard_step")
    speed = {
        (r["kind"], r["layout"], r["batch"], r["pooling"], r["transport"], r["side"]): r["samples_s"]
        for r in result["rows"]
        if r["kind"] in ("step", "tables")
    }
    names = {"step": "whole step", "tables": "tables alone"}
    lines = [
        "| what | plan, global batch, ids | TorchRec, samples/s | over gloo | shared memory |",
        "|---|---|---|---|---|",
    ]
    for kind, layout, batch, ids in dict.fromkeys(key[:4] for key in speed):
        ways = ("gloo", "shared memory")
        theirs = {
            w: max(
                (v for k, v in speed.items() if k[:5] == (kind, layout, batch, ids, w) and k[5] != "rowwise"), default=0
            )
            for w in ways
        }
        ours = {w: speed.get((kind, layout, batch, ids, w, "rowwise")) for w in ways}
        if None in ours.values():  # measured over gloo only
            continue
        cells = [f"{ours[w] / theirs[w]:.2f}x" for w in ways]
        lines.append(
            f"| {names[kind]} | {layout}, {batch:,}, {ids} | {max(theirs.values()):,.0f} | {' | '.join(cells)} |"
        )
    facts = [
        "Two processes of one thread each, with the same model, tables and plan as TorchRec's "
        "`DistributedModelParallel`.",
        "TorchRec: the faster of its plain and its pipelined step, over gloo. The last columns: speed of rowwise over "
        "that of TorchRec. Ranks of rowwise on one host use shared memory by default.",
        "Most of a whole step is matrix products, in which both sides reach this processor's limits.",
    ]
    return with_facts(lines, facts, result)


def plans(read: Read) -> str:
    """How far weights end from those of one process."""
    result = read("shard_step")
    lines = ["| plan | TorchRec | rowwise | rowwise, elastic |", "|---|---|---|---|"]
    found: dict[tuple[str, str], dict[str, float]] = {}
    for r in result["rows"]:
        if r["kind"] == "plans":
            column = r["side"] if r["determinism"] == "run" else "elastic"
            layout = "replicated" if r["layout"] == "data-parallel" else r["layout"]
            cells = found.setdefault((layout, r["wire"]), {})
            cells[column] = max(cells.get(column, 0.0), r["difference"])
    for (layout, wire), cells in found.items():
        shown = [f"{cells[c]:.2g}" if c in cells else "-" for c in ("TorchRec", "rowwise", "elastic")]
        lines.append(f"| {layout}{'' if wire == 'fp32' else f', {wire} wire'} | {' | '.join(shown)} |")
    facts = [
        "Cells: largest absolute difference of a weight to a run on one process, after the same 20 steps. Weights "
        "moved by up to about 1.4. `-`: not measured, or refused.",
        "Runs: 2 processes, and 4 threads as 2 simulated hosts. TorchRec 1.8.0.",
    ]
    return with_facts(lines, facts, result)


def checkpoints(read: Read) -> str:
    """Writing and reading beside plain copies, and what smaller checkpoints save."""
    files, less = read("checkpoint"), read("checkpoint_delta")
    seconds = {r["name"]: r["median_s"] for r in files["rows"]}
    size_gb = files["rows"][0]["bytes"] / 1e9
    lines = ["| what | rowwise | a plain copy | ratio |", "|---|---|---|---|"]
    pairs = (("write", "copy"), ("write, no fsync", "copy, no fsync"), ("read", "copy to read"))
    for ours, theirs in pairs:
        speeds = [size_gb / seconds[name] for name in (ours, theirs)]
        lines.append(f"| {ours} | {speeds[0]:.1f} GB/s | {speeds[1]:.1f} GB/s | {speeds[0] / speeds[1]:.2f}x |")
    blocked = seconds["blocked"] / seconds["whole save"]
    lines += [
        "",
        "| ten checkpoints, samples between them | rows touched | exact | 8 bits | 4 bits |",
        "|---|---|---|---|---|",
    ]
    rows = [r for r in less["rows"] if r["kind"] == "bytes" and r["optimizer"] == "row-wise adagrad"]
    for samples in dict.fromkeys(r["samples"] for r in rows):
        found = {r["way"]: r for r in rows if r["samples"] == samples}
        cells = [f"{found[way]['less']:.1f}x" for way in ("incremental", "incremental, 8 bits", "incremental, 4 bits")]
        lines.append(f"| {samples:,} | {found['full']['touched']:.0%} | {' | '.join(cells)} |")
    facts = [
        f"First table: {size_gb:.1f} GB. rowwise computes checksums, the copy does not.",
        f"A save in the background blocks training for {blocked:.0%} of the time of a whole save, once its memory "
        "is allocated.",
        "Second table: bytes of ten full checkpoints over bytes of ten incremental ones. Ids follow a Zipf law with "
        "exponent 1.05.",
        "Runs that resumed from 8 or 4 bits reached the same NE within the noise of seeds.",
    ]
    return with_facts(lines, facts, files)


def planner(read: Read) -> str:
    """Plans beside published methods, and beside what no plan can beat."""
    result = read("planner")
    suites = {"ns4": "4 devices", "ns8": "8 devices"}
    rows = {suite: [r for r in result["rows"] if r["suite"] == suite] for suite in suites}
    lines = [
        "| method | " + " | ".join(f"{title}: fits, cost, seconds" for title in suites.values()) + " |",
        "|---|" + "---|" * len(suites),
    ]
    mine = [
        f"{sum(r['fits'] for r in found)}/{len(found)}, 1.000, {sum(r['took_s'] for r in found) / len(found):.2f}"
        for found in rows.values()
    ]
    lines.append(f"| rowwise | {' | '.join(mine)} |")
    for name in ("neuroshard", "neuroshard-grid", "ldm", "size-lookup", "lookup", "dim", "size", "random"):
        cells = []
        for suite in suites:
            found = result["baselines"][suite][name]
            over = f"{found['over_ours']:.3f}" if "over_ours" in found else "-"
            cells.append(f"{found['fit']}/{found['tasks']}, {over}, {found['mean_s']:.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| task | above the bound | seconds |", "|---|---|---|"]
    for r in result["rows"]:
        if r["suite"] in ("pool", "lists", "giant") and not r["task"].endswith("short"):
            lines.append(f"| {r['task']} | {r['cost_s'] / r['bound_s'] - 1:.2%} | {r['took_s']:.1f} |")
    facts = [
        "First table: tasks of NeuroShard's protocol, all under one cost model. Cost: geometric mean relative to "
        "rowwise, over the tasks for which the method found a plan that fits.",
        "Second table: cost of the plan over a lower bound that no plan can beat.",
        "`856x16 70 %`: 856 synthetic tables after published statistics, which fill 70 % of the memory of 16 devices. "
        "Other names are published lists of tables, with all layouts allowed.",
        "12 T parameters: on 128 devices with host memory. Rows on the host of several GPUs never ran.",
    ]
    return with_facts(lines, facts, result)


def calibrate(read: Read) -> str:
    """What was learned beside what was measured, and what plans by it are worth."""
    result = read("calibrate")
    sections: dict[str, list[dict]] = {}
    for row in result["rows"]:
        sections.setdefault(row["section"], []).append(row)
    (sets,), chosen = sections["sets"], sections["chosen"]
    lines = ["| predicted by | error | with drift | rank correlation |", "|---|---|---|---|"]
    for one in sets["errors"]:
        lines.append(f"| {one['model']} | {one['error']:.1%} | {one['raw_error']:.1%} | {one['tau']:.3f} |")
    lines += ["", "| method | " + " | ".join(f"{t} tables, {d} devices" for t, d in _counts(sections)) + " |"]
    lines.append("|---|" + "---|" * len(_counts(sections)))
    for method in dict.fromkeys(row["method"] for row in sections["dreamshard"]):
        cells = []
        for counts in _counts(sections):
            mine = (counts, method)
            found = [r for r in sections["dreamshard"] if ((r["tables"], r["devices"]), r["method"]) == mine]
            over = found[0]["over_search"]
            cells.append(f"{'-' if over is None else f'{over:.3f}'}, {found[0]['fit']}/{found[0]['tasks']}")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    off = sorted(row["off"] for row in chosen)[len(chosen) // 2]
    facts = [
        f"First table: {sets['sets']:,} sets of 1 to 15 tables, measured in ten minutes on two ranks. Errors are on "
        f"{sets['held_out']:,} sets that were not used to fit.",
        f"Noise floor: a perfect prediction would be {sets['noise']:.1%} off, or {sets['raw_noise']:.1%} with the "
        "drift of this shared machine's speed.",
        f"{len(chosen)} plans that the search chose by these costs were run on two processes. Their times were "
        f"predicted to within {off:.0%} (median).",
        "Second table: cost relative to the search of rowwise, and number of tasks for which the method found a plan "
        "that fits. Tables are not cut. The DreamShard policy that ships never saw these tables.",
    ]
    return with_facts(lines, facts, result)


def _counts(sections: dict[str, list[dict]]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((row["tables"], row["devices"]) for row in sections["dreamshard"]))


def ingest(read: Read) -> str:
    """What a worker makes of the time of decoding, and what is around it."""
    result = read("ingest")
    sections: dict[str, list[dict]] = {}
    for row in result["rows"]:
        sections.setdefault(row["section"], []).append(row)
    worker = {(r["file"], r["way"]): r for r in sections["worker"] if "of_decode" in r}
    ours = worker["zstd", "rowwise"]["rows_s"]
    lines = ["| from Parquet to tensors, one core | rows/s | of decoding alone | ours over it |", "|---|---|---|---|"]
    for (file, way), row in worker.items():
        if file == "zstd" and way != "decode only" and "columns" not in way and "transforms" not in way:
            over = "" if way.startswith("rowwise") else f"{ours / row['rows_s']:.1f}x"
            lines.append(f"| {way} | {row['rows_s']:,.0f} | {row['of_decode']:.0%} | {over} |")
    kernels = {r["kernel"]: r["million_s"] for r in sections["kernels"] if r["side"] == "rowwise"}
    slots, few, many = (r["gb_cpu_s"] for r in sections["handoff"])
    store, scaling = sections["store"][0], sections["scaling"][0]
    disk = ", ".join(f"{one['step']} {one['speed']:.2f}" for one in store["disk"][1:])
    less = store["cpu_s"]["map"] / store["cpu_s"]["large groups"]
    per_second = ", ".join(f"{name} {rate:,.0f}" for name, rate in kernels.items())
    facts = [
        "Work: 13 numbers filled, clamped and log1p; 26 ids and the first 20 ids of 4 lists hashed; a label. All "
        "libraries do the same work on one thread. Rows are per second of processor time.",
        f"Kernels, million elements a second: {per_second}.",
        f"A batch of 5.9 MB to another process: {slots:.1f} GB per second of processor time. That is "
        f"{slots / few:.1f} times torch's queue with 3 tensors, and {slots / many:.0f} times with 60.",
        f"Reading a tenth of 500 features takes {less:.0f}x less processor time from one column a feature than from a "
        f"map column. On a disk with 8 ms and 150 MB/s, speed relative to the map: {disk}.",
        f"Autoscaling: a trainer that needs three workers gets {scaling['workers']}, and waits for data "
        f"{scaling['waits']:.1%} of the time.",
    ]
    return with_facts(lines, facts, result)


def tiers(read: Read) -> str:
    """Training with tables on disk, and rows alone beside other ways to keep them there."""
    result = read("tiers")
    (step,) = (row for row in result["rows"] if row["section"] == "step")
    lines = ["| step | samples/s |", "|---|---|"]
    speeds = (("tables on disk", "samples_s"), ("tables in memory", "memory_samples_s"))
    speeds = (*speeds, ("the disk's random reads alone", "limit_samples_s"))
    lines += [f"| {name} | {step[key]:,.0f} |" for name, key in speeds]
    lines += ["", "| rows on disk | lookup and update | making room | ratio |", "|---|---|---|---|"]
    for row in (row for row in result["rows"] if row["section"] == "peers"):
        lines.append(f"| {row['side']} | {row['rows_ms']:.0f} ms | {row['end_ms']:.0f} ms | {row['times']:.1f}x |")
    lines += ["", "| policy | batch | hit rate | simulated |", "|---|---|---|---|"]
    for row in (row for row in result["rows"] if row["section"] == "policy"):
        lines.append(f"| {row['policy'].upper()} | {row['batch']:,} | {row['live']:.3f} | {row['simulated']:.3f} |")
    stored_gb = step["tables"] * step["rows"] * 4 * (step["dim"] + 1) / 1e9
    facts = [
        f"{step['tables']} tables of dim {step['dim']}, {stored_gb:.0f} GB of rows and row-wise Adagrad's state, "
        f"{step['budget_bytes'] / 1e9:.1f} GB of memory for them; batch {step['batch']:,}, one Zipf(1.05) id a "
        f"feature, {step['threads']} threads.",
        f"First table: DLRM steps. {step['hit_rate']:.1%} of lookups hit; a step misses {step['misses']:,.0f} rows, "
        f"and the disk does {step['reads_s']:,.0f} random reads of 4 KiB a second. Reads and writes are direct.",
        "Second table: the same ids without dense layers, and without reading ahead. Memory-mapped files "
        "(nn.EmbeddingBag) and RocksDB have as much memory. Making room is writing and dropping pages that do not fit.",
        "Third table: 1 % of 100,000 rows cached, in sets of 32.",
    ]
    return with_facts(lines, facts, result)


def pipelined(read: Read) -> str:
    """Steps with others in flight: beside sequential ones and TorchRec, on disk, stale, and as the model has them."""
    result = read("pipeline")
    by_section: dict[str, list[dict]] = {}
    for row in result["rows"]:
        by_section.setdefault(row["section"], []).append(row)
    sides = ("depth 1", "depth 2", "depth 3", "depth 2, stale")
    lines = ["| transport | link | depth 1 | depth 2 | depth 3 | depth 2, stale |", "|---|---|---|---|---|---|"]
    for key in dict.fromkeys((r["transport"], r["link"]) for r in by_section["busy"] + by_section["delay"]):
        of_key = [r for r in by_section["busy"] + by_section["delay"] if (r["transport"], r["link"]) == key]
        times = {row["side"]: row["ms"] for row in of_key}
        lines.append(f"| {key[0]} | {key[1]} | {' | '.join(f'{times[side]:.1f} ms' for side in sides)} |")
    peers = ("TorchRec", "TorchRec pipelined")
    lines += ["", f"| latency | {' | '.join((*sides, *peers))} | against the faster TorchRec |"]
    lines.append("|---" * (len(sides) + len(peers) + 2) + "|")
    for link in dict.fromkeys(row["link"] for row in by_section["torchrec"]):
        times = {row["side"]: row["ms"] for row in by_section["torchrec"] if row["link"] == link}
        cells = " | ".join(f"{times[side]:.1f} ms" for side in (*sides, *peers))
        lines.append(f"| {link} | {cells} | {min(times[peer] for peer in peers) / times['depth 2']:.2f}x |")
    lines += ["", "| tables on disk | step | waits for the disk |", "|---|---|---|"]
    for row in by_section["disk"]:
        lines.append(f"| {row['side']} | {row['ms']:.1f} ms | {row['exposed_ms'] / row['ms']:.1%} |")
    lines += ["", "| `train.staleness` | test AUC | spread over seeds |", "|---|---|---|"]
    lines += [f"| {row['staleness']} | {row['auc']:.4f} | {row['spread']:.4f} |" for row in by_section["staleness"]]
    lines += ["", "| model of the timeline | predicted | measured | off by |", "|---|---|---|---|"]
    for row in by_section["timeline"]:
        off = f"{row['predicted_ms'] / row['ms'] - 1:+.1%}"
        lines.append(f"| {row['side']} | {row['predicted_ms']:.1f} ms | {row['ms']:.1f} ms | {off} |")
    (disk, *_), (stale, *_) = by_section["disk"], by_section["staleness"]
    facts = [
        "First table: two processes of one thread. `none` is the link of this machine. `latency`: every collective "
        "begins late, by so much that waiting takes as long as all else of a sequential step. `bandwidth`: its bytes "
        "take that long. An exact step has to wait for the bytes of its vectors and gradients; a stale one does not.",
        "Second table: over gloo. The latency, before every collective of both libraries, is a share of our "
        "sequential step. Plan, weights and batches are the same. TorchRec pipelined is its TrainPipelineSparseDist.",
        f"Third table: one process. The disk's random reads alone take {disk['limit_ms']:.1f} ms a step.",
        f"Fourth table: {stale['recipe']}, {stale['seeds']} seeds. 0 has the bits of a run without the key.",
        "Fifth table: a step with two in flight, as `rowwise.perf.timeline` makes it from a sequential recording.",
    ]
    return with_facts(lines, facts, result)


SETS = {"frappe": "Frappe", "movielens": "MovieLens-100k", "adult": "adult", "reviews": "women's clothing reviews",
        "flights": "nycflights13"}  # fmt: skip
MODELS = {
    ("rowwise", "starter"): "starter recipe", ("rowwise", "ensemble"): "three seeds", ("LightGBM", "trees"): "trees",
    ("FuxiCTR, npz", "defaults"): "DeepFM, its template", ("RecBole", "defaults"): "DeepFM, its defaults",
}  # fmt: skip


def first_hour(read: Read) -> str:
    result = read("first_hour")
    rows = [row for row in result["rows"] if row["section"] == "quality"]
    lines = ["| data | side | model | test AUC | log loss | seconds | MB on disk |", "|---|---|---|---|---|---|---|"]
    for name in (name for name in SETS if any(row["set"] == name for row in rows)):
        groups: dict[tuple[str, str], list[dict]] = {}
        for row in rows:
            if row["set"] == name:
                groups.setdefault((row["side"], row["model"]), []).append(row)
        best = max(center([row["auc"] for row in mine]) for mine in groups.values())
        for (side, model), mine in sorted(groups.items(), key=lambda group: -center([r["auc"] for r in group[1]])):
            auc = with_spread([row["auc"] for row in mine])
            auc = f"**{auc}**" if center([row["auc"] for row in mine]) == best else auc
            disk = f"{center([row['disk_bytes'] for row in mine]) / 1e6:.1f}" if "disk_bytes" in mine[0] else ""
            what = MODELS.get((side, model), f"{'DeepFM' if model == 'deepfm' else 'DCN-v2'}, sizes of the starter")
            cells = with_spread([row["log_loss"] for row in mine]), f"{center([row['seconds'] for row in mine]):.0f}"
            lines.append(f"| {SETS[name]} | {side.partition(',')[0]} | {what} | {auc} | {' | '.join(cells)} | {disk} |")
    effort = [
        f"{row['side']} {row['commands']} commands, {row['files']} files of {row['lines']} lines"
        for row in result["rows"]
        if row["section"] == "effort"
    ]
    missed = [f"{floor['name']} is {floor['value']:+.4f}" for floor in result["floors"] if not floor["ok"]]
    facts = [
        "Means of three seeds on the same test rows ± half the range, the best AUC in bold. All sides have the columns "
        "and roles that `rowwise data inspect` finds. LightGBM draws nothing, so its seeds agree. "
        "Numbers that are read as ids, as all of adult are, are categories to it; "
        "[as numbers](../decisions/0018-starter.md#trees-as-features-and-beside) they make it better there.",
        "Starter recipe: as `rowwise data inspect` writes it. Three seeds: the mean probability of its three runs, as "
        "`rowwise train --seeds 3` prints it. Trees: `rowwise baseline`. Peers have Adam at .001, and stop by the log "
        "loss on the validation rows. `Sizes of the starter`: its dim, layers, dropout, batch and most epochs.",
        "Seconds are those of the whole command, on a machine that others used, too: only their order of magnitude "
        "counts. Those of three seeds are of all trainings. On disk: all that a side leaves, so also prepared rows, "
        "checkpoints and reports; `rowwise baseline` keeps no trees.",
        f"What a user types and writes: {'; '.join(effort)}.",
        f"Floors that are missed: {'; '.join(missed) or 'none'}.",
    ]
    return with_facts(lines, facts, result)


def gpu(read: Read) -> str:
    """Times of a GPU, or where there was none what needs none."""
    try:
        result = read("gpu")
    except NotSaved:
        return gpu_code(read("gpu_static"))
    sections = {row["section"] for row in result["rows"]}
    parts = [gpu_times(result)] if "grid" in sections else []
    return "\n\n".join([*parts, gpu_cache(result)] if "cached" in sections else parts)


def gpu_times(result: dict) -> str:
    rows = {
        name: [row for row in result["rows"] if row["section"] == name] for name in ("bits", "grid", "torch", "train")
    }
    machine = next(row for row in result["rows"] if row["section"] == "machine")
    sides = "lookup | share of copy speed | update | share | FBGEMM over rowwise, both | without its checks of ids"
    head = f"| dim | batch | ids | {sides} |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    for row in rows["grid"]:
        ours_ms = row["lookup_ms"] + row["update_ms"]
        cells = [
            f"{row['dim']} | {row['batch']:,} | {row['pooling']}, {row['ids']}",
            *(f"{row[f'{name}_ms']:.3f} ms | {row[f'{name}_share']:.0%}" for name in ("lookup", "update")),
            *(f"{row[f'fbgemm_{mode}ms'] / ours_ms:.2f}x" for mode in ("", "unchecked_")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| torch's EmbeddingBag and | batch | ids | torch over rowwise |", "|---|---|---|---|"]
    for row in rows["torch"]:
        over = row["torch_ms"] / (row["lookup_ms"] + row["update_ms"])
        lines.append(f"| {OPTIMIZERS[row['optimizer']]} | {row['batch']:,} | {row['pooling']} | {over:.1f}x |")
    lines += ["", "| DLRM | samples/s | step | kernels of a step |", "|---|---|---|---|"]
    for row in rows["train"]:
        kernels_ms = sum(ms for name, ms in row["kernels_ms"].items() if "Memcpy HtoD" not in name)
        what = f"dim {row['dim']}, batch {row['batch']:,}, dense products in {row['precision']}"
        lines.append(f"| {what} | {row['samples_s']:,.0f} | {row['step_ms']:.1f} ms | {kernels_ms:.1f} ms |")
    host_ms = [row["update_host_ms"] for row in rows["grid"]]
    runs, differ = (sum(row[key] for row in rows["bits"]) for key in ("runs", "differ"))
    missed = [floor["name"] for floor in result["floors"] if not floor["ok"]]
    facts = [
        f"{machine['device']}: a copy moves {machine['copy_Bps'] / 1e12:.2f} TB/s, read and written, a copy from "
        f"pinned memory {machine['from_host_Bps'] / 1e9:.0f} GB/s, a product in fp32 {machine['flops'] / 1e12:.0f} "
        "TFLOP/s. Shares are bytes that the work needs / time / that copy speed; an id that comes twice is read from "
        "a cache, so Zipf's lookups exceed it.",
        "26 tables of 100,000 to 4,000,000 rows of fp32, row-wise Adagrad; of 1,000,000 at most beside torch and in "
        "the DLRM. An update sorts its ids. Times are events behind other work, so that the host is ahead. Launching "
        f"an update takes the host {min(host_ms):.2f} to {max(host_ms):.2f} ms, at the smaller batch more than "
        "the GPU needs; the host's time of FBGEMM was not measured. torch's sparse optimizers wait for the device in "
        "each table, so torch's times include its host.",
        f"FBGEMM {result['environment']['versions']['fbgemm-gpu']}, int64 ids, tables of the same sizes; its wheel was "
        "cut to the machine code of this GPU and the kernels used. Its checks of ids are those that TorchRec has on.",
        f"Rows and states after updates of 3 optimizers and 4 row types: the bits of the CPU in {runs - differ} of "
        f"{runs} runs. Steps of the DLRM: wall time of 60. With batches that were on the GPU before, a step in bf16 "
        f"takes {rows['train'][-1]['resident_ms']:.1f} ms: the host, which launches a step in "
        f"{rows['train'][-1]['host_ms']:.1f} ms, holds the GPU up.",
        f"Floors that are missed: {'; '.join(missed) or 'none'}.",
    ]
    return with_facts(lines, facts, result)


def gpu_cache(result: dict) -> str:
    """Tables in host memory, of which a GPU caches rows."""
    rows = [row for row in result["rows"] if row["section"] == "cached"]
    machine = next(row for row in result["rows"] if row["section"] == "machine")
    lines = [
        "| rows on the GPU | ids | found there | step | over the bus | of its speed |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        found = f"{row['hit_rate']:.0%} | {row['step_ms']:.1f} ms | {row['moved_bytes'] / 1e6:,.0f} MB"
        cells = f"{found} | {row['bus_share']:.0%}" if row["cached"] < 1 else f"all | {row['step_ms']:.1f} ms | 0 | "
        lines.append(f"| {row['cached']:.0%} | {row['ids']} | {cells} |")
    differ = sum(row["differ"] for row in rows)
    facts = [
        f"{machine['device']}; 26 tables, {rows[0]['rows']:,} rows of {rows[0]['dim']} numbers in fp32, row-wise "
        f"Adagrad; batches of {rows[0]['batch']:,} samples, one id for each table. A step is a lookup and its update, "
        "without dense layers; wall time of 24 steps over as many batches, each of which was met once before.",
        "Over the bus: rows and their optimizer state that a step reads from host memory and writes back, without what "
        "rows behind the sets write. Of its speed: of "
        f"{machine['from_host_Bps'] / 1e9:.0f} GB/s, which a copy from pinned memory reaches in one direction; reads "
        "and writes come one after the other.",
        f"Tables with other bits than without a cache: {differ}.",
    ]
    return with_facts(lines, facts, result)


def gpu_code(result: dict) -> str:
    """Of machine code and of the interpreter: nothing of it is a time."""
    code = [row for row in result["rows"] if row["section"] == "code"]
    lines = [
        "| GPU | variants | most registers of an update | spills | atomics | inexact | 16-byte loads at dim 128 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in code:
        most = max(n for kernel, n in row["registers"].items() if kernel.startswith("apply"))
        counts = [str(row[key]) for key in ("spills", "atomics", "inexact")]
        wide = f"{row['wide_16_bytes']} of {row['wide']}"
        lines.append(f"| {row['arch']} | {row['variants']} | {most} | {' | '.join(counts)} | {wide} |")
    lines += ["", "| bags | lookup | update |", "|---|---|---|"]
    traffic = {(row["case"], row["operator"]): row["ratio"] for row in result["rows"] if row["section"] == "traffic"}
    for case in dict.fromkeys(case for case, _ in traffic):
        lines.append(f"| {case} | {traffic[case, 'lookup']:.3f} | {traffic[case, 'update']:.3f} |")
    facts = [
        "Nothing of this section ran on a GPU: it is what compiler and interpreter say without one.",
        "First table: every variant of every kernel for dims of 4 to 256, all row types and optimizers, as the "
        "compiler made it. Spills: variants whose machine code moves registers to memory. Inexact: variants with a "
        "division, root or exponent that is not correctly rounded. A multiprocessor of NVIDIA holds 32 programs of "
        "64 registers, 25 of 80.",
        "Second table: bytes that kernels move in Triton's interpreter, over the least that the work needs: for a "
        "lookup ids, offsets, the row of each id and the output; for an update the gradient of each id, and each "
        "distinct row and its state read and written. A program keeps 8 KB, its share of a multiprocessor's cache, "
        "so the ids of a bag share its gradient, and a ratio below 1 is possible. Sectors have 32 bytes.",
    ]
    return with_facts(lines, facts, result)


def dense_parallel(read: Read) -> str:
    """Ways to shard dense parameters: bytes, times beside torch's, and the memory of a construction."""
    result = read("dense_parallel")
    *ways, built = result["rows"]
    lines = [
        "| kind | sent in a step | formula | shared memory | gloo | torch over gloo |",
        "|---|---|---|---|---|---|",
    ]
    for row in ways:
        torch = f"{row['torch_ms']:.1f} ms" if "torch_ms" in row else ""
        sizes = f"{row['sent_bytes'] / 1e6:.2f} MB | {row['predicted_bytes'] / 1e6:.2f} MB"
        lines.append(
            f"| {row['kind']} | {sizes} | {row['shared_memory_ms']:.1f} ms | {row['gloo_ms']:.1f} ms | {torch} |"
        )
    off = max(
        row[key] for row in ways for key in ("off_replicated", "off_torch") if key in row and "bf16" not in row["kind"]
    )
    numbers = {name: built[f"{name}_bytes"] / 1e6 for name in ("whole", "peak", "bound")}
    facts = [
        "Four processes share the cores of this machine, so times are of its memory rather than of links.",
        "torch: DDP, FSDP2, and FSDP2 on a mesh of 2 x 2.",
        f"Losses of fp32 agree with replicated ones, and with torch's, to {off:.1f} millionths over all steps.",
        f"Construction of {built['parameters'] / 1e6:.0f} million parameters, {numbers['whole']:.0f} MB, on four ranks "
        f"takes at most {numbers['peak']:.0f} MB of each. A quarter and the largest layer, and 15 % more, are "
        f"{numbers['bound']:.0f} MB.",
    ]
    return with_facts(lines, facts, result)


def compiled(read: Read) -> str:
    """`train.compile` by kind of model."""
    result = read("compiled")
    lines = ["| model | without | compiled | ratio | compilation |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        speeds = f"{row['plain_samples_s']:,.0f} samples/s | {row['compiled_samples_s']:,.0f} samples/s"
        lines.append(f"| {row['model']} | {speeds} | {row['ratio']:.2f} | {row['compile_s']:.0f} s |")
    first, off = result["rows"][0], max(row["off"] for row in result["rows"])
    facts = [
        f"Whole steps of 26 tables of dim 32, batches of {first['batch']:,}, on {first['threads']} threads.",
        f"Losses of the first two steps agree to {1e6 * off:.1f} millionths.",
        "Matrix products take most of a step, and are those of the same library on both sides. What compilation saves "
        "is memory traffic between them.",
    ]
    return with_facts(lines, facts, result)


MODEL_DATA = {"movielens-100k": "MovieLens-100k", "complete-journey": "Complete Journey", "stream": "stream"}


def models(read: Read) -> str:
    """Quality of all models by dataset, then that of stacks of DHEN by their depth."""
    result = read("models")
    by_model: dict[str, dict[str, dict]] = {}
    for line in sorted(result["lines"], key=lambda line: line["ne"]):
        by_model.setdefault(line["model"], {})[line["data"]] = line
    zoo = {name: mine for name, mine in by_model.items() if len(mine) == len(MODEL_DATA)}
    ranked = sorted(zoo, key=lambda name: zoo[name]["stream"]["ne"])
    head = " | ".join(f"NE, {title}" for title in MODEL_DATA.values())
    head += " | operations of a sample, stream | samples/s, stream"
    lines = [f"| model | {head} |", "|---" * (3 + len(MODEL_DATA)) + "|"]
    for name in ranked:
        cells = " | ".join(ne_with_spread(zoo[name][data]) for data in MODEL_DATA)
        last = zoo[name]["stream"]
        lines.append(f"| {name} | {cells} | {last['flops']:,} | {last['samples_s']:,} |")
    stacks = [name for name in by_model if name not in zoo]
    depths = sorted({int(name.rsplit(", ", 1)[1].split()[0]) for name in stacks})
    kinds = sorted({name.split(", ")[0] for name in stacks})
    titles = " | ".join(f"{depth} layer{'s' * (depth > 1)}" for depth in depths)
    lines += ["", f"| stack, on the stream | {titles} |", "|---" * (1 + len(depths)) + "|"]
    for kind in kinds:
        cells = " | ".join(ne_with_spread(by_model[f"{kind}, {depth} layers"]["stream"]) for depth in depths)
        lines.append(f"| {kind} | {cells} |")
    rows, lowest = result["rows"], min(line["lr"] for line in result["lines"])
    sizes = {data: [line["parameters"] for line in result["lines"] if line["data"] == data] for data in MODEL_DATA}
    at_edge = sum(line["lr"] == lowest for line in result["lines"])
    facts = [
        f"Means over {len({row['seed'] for row in rows})} seeds, ± half the range; lower is better. "
        "Differences within the ranges mean nothing.",
        "Parameters beside the tables: "
        + ", ".join(f"{min(of):,} to {max(of):,} on {MODEL_DATA[data]}" for data, of in sizes.items())
        + ". Tables are the same for all models, but for weights of single ids.",
        "Each model has the best of three learning rates by validation rows; for "
        f"{at_edge} of {len(result['lines'])} that is the lowest tried. "
        "All else is that of one recipe, which is DCN's on the first two datasets.",
        "The stream is 5 million made-up clicks, each seen once. Its operations count multiplications and additions. "
        "Samples/s are whole steps on all threads.",
    ]
    return with_facts(lines, facts, result)


WORLDS = {"movielens": "MovieLens-100k", "complete-journey": "Complete Journey", "digits": "digits, ten labels"}


def noise(read: Read) -> str:
    """The metric at the end of training, by loss and share of wrong labels."""
    result = read("noise")
    rows, lines = result["rows"], []
    shares = sorted({row["wrong"] for row in rows})
    for world in dict.fromkeys(row["world"] for row in rows):
        metric = "accuracy" if world == "digits" else "AUC"
        titles = " | ".join(f"{share:.0%} wrong" for share in shares)
        lines += ["", f"| {WORLDS[world]}: {metric} at the end | {titles} |", "|---" * (1 + len(shares)) + "|"]
        for loss in dict.fromkeys(row["loss"] for row in rows):
            cells = [
                statistics.mean(
                    row[metric.lower()]
                    for row in rows
                    if (row["world"], row["wrong"], row["loss"]) == (world, share, loss)
                )
                for share in shares
            ]
            lines.append(f"| {loss} | {' | '.join(f'{cell:.4f}' for cell in cells)} |")
    facts = [
        f"Means over {len({row['seed'] for row in rows})} seeds, after the last epoch and without early stopping; "
        "test labels are right.",
        "gce does not learn ten labels that are predicted apart: with nine of ten right, all near 0 costs it little.",
        *(f"{floor['name']}: {floor['value']:+.4f}." for floor in result["floors"]),
    ]
    return with_facts(lines[1:], facts, result)


PRODUCT_FACTS = (
    "The exact product copies the vectors to huge pages first, as rows that are read at random from pages of 4 kB miss "
    "the translation cache. Reads is the product without sums: the row of each edge's source is read, from such pages.",
    "PyG is PyTorch Geometric: its spmm is that of torch.sparse, and along edges it writes a message of 64 numbers for "
    "each.",
    "DGL is not compared: its newest package on PyPI, 2.1.0, has libraries for torch 2.0 to 2.2. Neither is "
    "torch_sparse, which has no wheel; PyTorch Geometric 2.8 multiplies its matrices by torch.sparse on CPUs.",
)


def graphs(read: Read) -> str:
    """Products beside torch.sparse, then LightGCN on sampled graphs."""
    result = read("graphs")
    timed = [row for row in result["rows"] if row["section"] == "speed"]
    sparse = next(row for row in timed if row["way"] == "torch.sparse")
    lines = ["| product | edges | seconds | times the speed of torch.sparse |", "|---|---|---|---|"]
    for row in timed:
        ratio = sparse["seconds"] / row["seconds"]
        lines.append(f"| {row['way']} | {row['edges']:,} | {row['seconds']:.3f} | {ratio:.1f} |")
    learned = [row for row in result["rows"] if row["section"] == "quality"]
    metrics = ("ndcg@10", "recall@10", "precision@10", "recall@20")
    lines += ["", f"| LightGCN, edges into a node | kept | {' | '.join(metrics)} |", "|---" * (2 + len(metrics)) + "|"]
    for way, most in dict.fromkeys((row["way"], row["most"]) for row in learned):
        mine = [row for row in learned if (row["way"], row["most"]) == (way, most)]
        means = [statistics.mean(row[metric] for row in mine) for metric in metrics]
        kept = statistics.mean(row["kept"] for row in mine)
        name = "all" if most is None else f"{most}, {way}"
        lines.append(f"| {name} | {kept:.0%} | {' | '.join(f'{mean:.4f}' for mean in means)} |")
    facts = [
        "A power-law graph of 1 million nodes and 20 million edges, 64 numbers a node; medians of runs that alternate.",
        *(PRODUCT_FACTS if any(row["way"] == "reads" for row in timed) else ()),
        "LightGCN on MovieLens-100k in the protocol of the benchmark of Recommenders, whose table has an NDCG@10 of "
        f".4198 and a recall@10 of .1443; means over {len({row['seed'] for row in learned})} seeds. One model is "
        "trained on all edges, and evaluated on sampled ones.",
    ]
    return with_facts(lines, facts, result)


def pictures(read: Read) -> str:
    """Prefixes of photographs, then one size for all scenes beside chosen ones."""
    result = read("images")
    photos = [row for row in result["rows"] if row["part"] == "photographs"]
    lines = ["| photographs | of the bytes, SSIM .95 | SSIM .98 | decoding | of whole files |", "|---|---|---|---|---|"]
    for size in dict.fromkeys(row["size"] for row in photos):
        first, second = (next(row for row in photos if (row["size"], row["ssim"]) == (size, s)) for s in (0.95, 0.98))
        times = f"{first['prefix_ms']:.2f} ms | {first['whole_ms']:.2f} ms"
        lines.append(f"| {size} pixels | {first['share']:.0%} | {second['share']:.0%} | {times} |")
    scenes = [row for row in result["rows"] if row["part"] == "scenes"]
    lines += ["", "| scenes, pixels | accuracy | million products | bytes |", "|---|---|---|---|"]
    kinds = {
        **{row["policy"]: row["policy"] for row in scenes if row["policy"].isdecimal()},
        "most probable": "dynamic, price 0.00",
        "chosen price": None,
    }
    for title, policy in kinds.items():
        mine = [row for row in scenes if (row.get("chosen") if policy is None else row["policy"] == policy)]
        mine = [row for row in mine if policy is None or not row.get("chosen")]
        means = [statistics.mean(row[what] for row in mine) for what in ("accuracy", "products", "bytes")]
        lines.append(f"| {title} | {means[0]:.3f} | {means[1] / 1e6:.2f} | {means[2]:,.0f} |")
    missed = [floor["name"] for floor in result["floors"] if not floor["ok"]]
    facts = [
        "Photographs: 16 squares of 160 pixels; shares are means over files.",
        "Scenes of 128 pixels: a digit of 16 to 100 pixels on a noisy ground; "
        f"{len({row['seed'] for row in scenes})} seeds. A backbone is trained at all sizes, and tested on digits that "
        "it has not seen. Bytes are those of the prefixes; products include the scale model's.",
        f"Floors that are missed: {'; '.join(missed) or 'none'}.",
    ]
    return with_facts(lines, facts, result)


def retrieval(read: Read) -> str:
    """Searches in one process, then behind a server."""
    result = read("retrieval")
    rows = result["rows"]
    lines = ["| search, one thread | recall@100 | p50 | p99 | processor |", "|---|---|---|---|---|"]
    here = [row for row in rows if row["section"] == "vectors"]
    for row in here:
        how = f"{row['probes']} of {row['lists']:,} lists" if "probes" in row else "exact"
        times = " | ".join(f"{row[name]:.2f} ms" for name in ("p50_ms", "p99_ms", "processor_ms"))
        lines.append(f"| {row['items']:,} vectors, {how} | {row.get('recall', 1):.4f} | {times} |")
    lines += [
        "",
        "| server, 2 workers | search | clients | requests a second | p50 | p99 | processor of a request |",
        "|---" * 7 + "|",
    ]
    for row in (row for row in rows if row["section"] != "vectors"):
        what = f"{row['items']:,} {'films' if row['section'] == 'movielens' else 'items'}"
        times = " | ".join(f"{row[name]:.1f} ms" for name in ("p50_ms", "p99_ms", "server_cpu_ms"))
        how = "exact" if row["exact"] else "index"
        lines.append(f"| {what} | {how} | {row['clients']} | {row['requests_s']:,.0f} | {times} |")
    near = here[0]
    served = next(row for row in rows if row["section"] == "served")
    wrong = sum(row.get("wrong_answers", 0) + row.get("wrong_scores", 0) for row in rows)
    missed = [floor["name"] for floor in result["floors"] if not floor["ok"]]
    facts = [
        "Vectors: made up, 64 numbers in 2,000 clusters. Lists were chosen for a recall of .99 by other queries than "
        f"those that are shown; on them it was {near['printed_recall']:.4f}. Built in {near['build_s']:.1f} s, "
        f"measured in {near['measure_s']:.1f} s.",
        f"Items of the server: two towers trained on 200,000 made-up rows; {served['probes']} lists for a printed "
        f"recall of {served['printed_recall']:.4f}, {served['recall']:.4f} on other users. The export took "
        f"{served['export_s']:.0f} s. Films: the recipe movielens-two-tower. Clients are a process on the same two "
        "cores, and ask for 100 items.",
        "Measured beside other work on the machine, which lengthens p50 and p99 and lowers rates. The time of the "
        "processor hardly changes by it.",
        f"Answers that are not those of the same search in one process, and scores with other bits than an item has "
        f"alone: {wrong}.",
        f"Floors that are missed: {'; '.join(missed) or 'none'}.",
    ]
    return with_facts(lines, facts, result)


REQUESTS = {"one row": "one row", "1 x 100": "a context and 100 candidates"}
PEER_TITLES = {"litserve": "LitServe 0.2.19", "bentoml": "BentoML 1.4.40"}


def serving(read: Read) -> str:
    """Latencies by load, then rates beside other servers."""
    result = read("serve")
    rows = result["rows"]
    lines = [
        "| request | workers | requests | a second | p50 | p99 | p99.9 | processor of a request |",
        "|---" * 8 + "|",
    ]
    for row in (row for row in rows if "peer" not in row and "overload" not in row):
        arriving = f"{row['clients']} client{'s' * (row['clients'] > 1)}"
        if row["rate"]:
            arriving = f"at random times, {row['share']:.0%} of that"
            arriving += ", a version each second" if "versions" in row else ""
            arriving += f", of which {row['answered']} of {row['versions']} answered" if "answered" in row else ""
        times = " | ".join(f"{row[name]:.1f} ms" for name in ("p50_ms", "p99_ms", "p99.9_ms"))
        cells = (
            f"{row.get('workers', 2)} | {arriving} | {row['requests_s']:,.0f} | {times} | {row['server_cpu_ms']:.2f} ms"
        )
        lines.append(f"| {REQUESTS[row['request']]} | {cells} |")
    full = {r["request"]: r for r in rows if r["clients"] == 16 and "workers" not in r and "peer" not in r}
    lines += ["", "| 16 clients, both cores | rowwise | others | rowwise over them |", "|---|---|---|---|"]
    for row in (row for row in rows if "peer" in row):
        mine = full[row["request"]]
        cells = [
            f"{one['requests_s']:,.0f} requests/s, p99 {one['p99_ms']:.0f} ms, processor {one['server_cpu_ms']:.2f} ms"
            for one in (mine, row)
        ]
        title = f"{REQUESTS[row['request']]}: {PEER_TITLES[row['peer']]}"
        lines.append(f"| {title} | {' | '.join(cells)} | {mine['requests_s'] / row['requests_s']:.1f}x |")
    lookups, soaked = read("serve_lookups"), read("serve_soak")
    soak, grown = soaked["rows"], soaked["floors"][1]["value"]
    lines += ["", "| lookups of 26 tables, one thread | TorchRec's quantised tables over rowwise |", "|---|---|"]
    for kind in ("int8", "int4"):
        for low, high in ((1, 128), (129, 10_000)):
            ratios = [r["ratio"] for r in lookups["rows"] if r["row_type"] == kind and low <= r["batch"] <= high]
            title = f"{kind}, batches {'up to' if low == 1 else 'of more than'} {128}"
            lines.append(f"| {title} | {statistics.geometric_mean(ratios):.2f}x, at least {min(ratios):.2f}x |")
    wrong = sum(row["wrong_logits"] for row in rows if "peer" not in row)
    crowd = next(row for row in rows if "overload" in row)
    memory = [row["memory_bytes"] / 1e6 for row in soak[10:]]
    missed = [floor["name"] for floor in result["floors"] if not floor["ok"]]
    facts = [
        "A DLRM of 13 numbers and 26 tables of 100,000 rows of dim 64, layers of 512 and 256. Clients are a process on "
        "the same two cores. Latencies of random arrivals count from the arrival, not from the sending.",
        f"Logits with other bits than those of `rowwise predict` for the version that the answer names: {wrong}.",
        "Versions that change are checkpoints of a run, each an increment of the one before; after the last the first "
        "becomes current again.",
        f"Overload: {crowd['overload']:g} times the requests of a context and 100 candidates that a worker answers for "
        f"16 clients, each with 100 ms. It answers {crowd['overload'] * crowd['requests_s'] / crowd['rate']:.0%} of "
        f"what it answers for 16 clients, and refuses others within {crowd['refused_p99_ms']:.0f} ms at p99. Memory "
        f"grows by {crowd['memory_growth']:.1%}.",
        f"A soak of {soak[-1]['after_s'] / 60:.0f} minutes beside other work on the machine: "
        f"{sum(row['requests'] for row in soak):,} requests, {soak[-1]['versions']} changes of the version, "
        f"{sum(row['wrong_logits'] for row in soak)} wrong logits. All processes together had {min(memory):,.0f} to "
        f"{max(memory):,.0f} MB; the most of the second half over that of the first: {grown:+.1%}.",
        "Others: plain torch with the same weights, a worker for each core. LitServe puts up to 64 requests into "
        "a batch within 2 ms; BentoML answers each alone. Their logits are within 1e-4.",
        f"Floors that are missed: {'; '.join(missed) or 'none'}.",
    ]
    return with_facts(lines, facts, result)


def rows_beyond_memory(read: Read) -> str:
    """Lookups by where their rows are, what zeros cost, and the forecast of a fleet."""
    result = read("serve_rows")
    rows = result["rows"]
    lines = [
        "| lookups of 26 tables | ids a second | p50 | p99 | rows from the cache, Redis, files |",
        "|---|---|---|---|---|",
    ]
    for row in (row for row in rows if "rows_s" in row):
        origins = ", ".join(f"{row[name]:,}" for name in ("cache", "redis", "files"))
        lines.append(
            f"| {row['case']} | {row['rows_s']:,.0f} | {row['p50_ms']:.2f} ms | {row['p99_ms']:.2f} ms | {origins} |"
        )
    lines += ["", "| rows replaced | AUC with zeros | with the mean row of the table |", "|---|---|---|"]
    for row in (row for row in rows if row["case"] == "accuracy"):
        lines.append(f"| {row['share']:.0%} | {row['zeros']:.4f} | {row['mean row']:.4f} |")
    defaults = [row for row in rows if row["case"] == "default rows"]
    if defaults:
        lines += ["", "| hit rate | AUC, NE with zeros | with mean rows | with means by access |", "|---|---|---|---|"]
    for row in defaults:
        cells = [f"{row[f'{kind} auc']:.4f}, {row[f'{kind} ne']:.4f}" for kind in ("zero", "plain mean", "mean")]
        lines.append(f"| {row['hit_rate']:.0%} | {' | '.join(cells)} |")
    lines += [
        "",
        "| one worker, rows of a request | requests a second | p50, forecast | p99, forecast |",
        "|---|---|---|---|",
    ]
    for row in (row for row in rows if row["case"] == "fleet"):
        cells = [f"{row[f'{q}_ms']:.1f} ms, {row[f'forecast_{q}_ms']:.1f} ms" for q in ("p50", "p99")]
        lines.append(f"| {row['rows']} | {row['rate']:,.0f} | {cells[0]} | {cells[1]} |")
    hits, faults = (next(row for row in rows if row["case"] == case) for case in ("hit rate", "faults"))
    wrong = sum(row["wrong"] for row in rows if "rows_s" in row and "hit rate" not in row["case"])
    missed = [floor["name"] for floor in result["floors"] if not floor["ok"]]
    facts = [
        "26 tables of 40,000 rows of 256 bytes behind a cache of a tenth of their bytes, in one thread. Batches of 32 "
        "samples with one id a table, by Zipf's law with exponent 1.05. Files are in the system's page cache.",
        f"Vectors with other bits than those of tables in memory: {wrong}. Hit rate of the warm cache "
        f"{hits['found']:.4f}, of the simulator for the same ids {hits['simulated']:.4f}.",
        f"Redis was killed {faults['kill']} times, emptied {faults['flush']} times and stopped {faults['stop']} times "
        f"under a server whose versions changed {faults['versions']} times: {faults['answers']:,} answers, "
        f"{faults['wrong']} wrong logits.",
        "AUC is that of a small DLRM on rows of a known model. Rows are replaced at random, popular ones as well.",
        f"Floors that are missed: {'; '.join(missed) or 'none'}.",
    ]
    return with_facts(lines, facts, result)


def ne_with_spread(line: dict) -> str:
    return f"{line['ne']:.4f} ± {line['spread'] / 2:.4f}"


def with_spread(values: list[float]) -> str:
    """The mean, and half the range of several."""
    spread = f" ± {(max(values) - min(values)) / 2:.4f}" if len(values) > 1 else ""
    return f"{center(values):.4f}{spread}"


def mean(result: dict, row_type: str, field: str) -> float:
    values = [r[field] for r in result["rows"] if r["row_type"] == row_type]
    return sum(values) / len(values)


@dataclass(frozen=True)
class Subject:
    """A page of docs/benchmarks."""

    table: Callable[[Read], str]
    title: str
    question: str
    commands: tuple[str, ...]  # benchmarks


SUBJECTS = {
    "training-step": Subject(
        step, "Training step", "How fast is a DLRM training step beside TorchRec and plain torch?", ("train_step",)
    ),
    "operators": Subject(
        ops,
        "Lookup and update",
        "How fast are lookup, backward and update of 26 tables of 1,000 to 4,000,000 rows, inputs checked?",
        ("ops",),
    ),
    "batches-and-dense": Subject(
        around,
        "Batches and dense layers",
        "How fast are jagged-tensor operators, the interaction and linear layers?",
        ("dense_cpu", "jagged"),
    ),
    "several-processes": Subject(
        shard, "Several processes", "How fast are training steps on two processes beside TorchRec?", ("shard_step",)
    ),
    "pipelined-steps": Subject(
        pipelined, "Pipelined steps", "What do steps hide of communication, disk reads and waiting?", ("pipeline",)
    ),
    "sharded-dense": Subject(
        dense_parallel,
        "Sharded dense parameters",
        "What do FSDP2's ways to shard dense parameters send, hold and take?",
        ("dense_parallel",),
    ),
    "compiled-layers": Subject(
        compiled, "Compiled layers", "What does `train.compile` gain, by kind of model?", ("compiled",)
    ),
    "models": Subject(
        models,
        "Models",
        "Which model is best, with equally many parameters and a learning rate of its own?",
        ("models",),
    ),
    "serving": Subject(
        serving,
        "Serving",
        "What does a score over HTTP cost, does a new version delay it, and how fast are other servers?",
        ("serve", "serve_lookups", "serve_soak"),
    ),
    "rows-beyond-memory": Subject(
        rows_beyond_memory,
        "Rows beyond memory",
        "What do served lookups take whose tables are ten times the memory?",
        ("serve_rows",),
    ),
    "noisy-labels": Subject(
        noise, "Noisy labels", "How much do losses for noisy labels save, when labels are wrong?", ("noise",)
    ),
    "retrieval": Subject(
        retrieval,
        "Retrieval",
        "How fast are the best items of two towers found, and how many of them does an index find?",
        ("retrieval",),
    ),
    "graph-towers": Subject(
        graphs,
        "Graph towers",
        "How fast are sums over neighbours, and what do sampled edges cost in recall?",
        ("graphs",),
    ),
    "pictures": Subject(pictures, "Pictures", "What do pictures cost at the size that each is worth?", ("images",)),
    "plan-invariance": Subject(
        plans,
        "Does the result depend on the plan?",
        "How far do weights end from those of a run on one process, by plan?",
        ("shard_step",),
    ),
    "planning": Subject(
        planner, "Planning", "How good are plans beside published methods, and beside a lower bound?", ("planner",)
    ),
    "learned-costs": Subject(
        calibrate, "Learned costs", "How well do learned costs predict measured ones?", ("calibrate",)
    ),
    "checkpoints": Subject(
        checkpoints,
        "Checkpoints",
        "How fast are checkpoints beside plain copies, and what do incremental ones save?",
        ("checkpoint", "checkpoint_delta"),
    ),
    "tables-on-disk": Subject(
        tiers, "Tables on disk", "How fast do tables train that are larger than memory?", ("tiers",)
    ),
    "ingestion": Subject(
        ingest,
        "Reading data",
        "How fast do files become tensors, beside decoding alone and beside other libraries?",
        ("ingest",),
    ),
    "first-hour": Subject(
        first_hour,
        "The first hour",
        "What does a newcomer get from rowwise, FuxiCTR, RecBole and LightGBM on the same small rows?",
        ("first_hour",),
    ),
    "compression": Subject(
        compress,
        "Compressed tables",
        "What does it cost in quality to let ids share rows, byte for byte?",
        ("compress",),
    ),
    "managed": Subject(
        managed, "Managed tables", "What does a fixed number of rows cost where ids never stop coming?", ("managed",)
    ),
    "gpu": Subject(
        gpu,
        "Kernels for GPUs",
        "How fast are the kernels for GPUs, what do they compile to, and how many bytes do they move?",
        ("gpu", "gpu_static"),
    ),
    "narrow-rows": Subject(
        quality, "Narrow rows", "What do rows and products of 16 and 8 bits cost in quality?", ("quality",)
    ),
}
ABOUT = """# Benchmarks

Every speed that this documentation claims comes from a saved result of `benchmarks/`. `rowwise bench --list` says what
each benchmark answers, takes and needs. `rowwise bench NAME` runs it. `rowwise bench NAME -- --save` keeps the result
with those of this processor.

Results are kept by processor, and nothing is compared between processors. What can be compared is a step's share of its
own machine's limit, which `benchmarks/parts/limits.py` defines. Peers run interleaved with rowwise in one process or
run, on the same inputs, and their results are checked to be equal.

| subject | question | processors |
|---|---|---|
"""
RECIPES = """# Recipes that ship

A recipe is one YAML file with everything that a run is made of. `rowwise ls` lists them, `rowwise train NAME` runs one,
`rowwise cp NAME my.yaml` copies one to edit. Every key is in the [recipe reference](reference/recipe.md).

Test metrics are of rows that the model did not train on. `rowwise bench zoo` measures them.

"""
WRITTEN = "<!-- written by tools/readme_tables.py -->\n\n"


def sections(subject: Subject) -> dict[str, str]:
    """The table of each processor that has all of its results."""
    found = {}
    for processor in saved_results.processors():
        try:
            found[processor] = subject.table(partial(saved_results.read, processor=processor))
        except NotSaved:
            continue
    if not found:
        sys.exit(f"no processor has all results of {subject.title!r}: see benchmarks/results")
    return found


def page(subject: Subject, tables: dict[str, str]) -> str:
    commands = "\n".join(f"    rowwise bench {name}" for name in subject.commands)
    parts = [f"{WRITTEN}# {subject.title}\n\n{subject.question}\n\n{commands}\n"]
    parts += [f"## {processor}\n\n{table}\n" for processor, table in tables.items()]
    return "\n".join(parts)


def three_numbers(read: Read) -> str:
    """For README: one of speed, one of the tables alone, one of correctness."""
    training, operators, sharded = read("train_step"), read("ops"), read("shard_step")
    speed = {(r["side"], r["threads"]): r["samples_s"] for r in training["rows"] if r.get("optimizer") == "adam"}
    cells = [r["ratio"] for r in operators["rows"] if r["peer"] == "fbgemm-gpu-cpu 1.5.0" and r["threads"] == 2]
    off = {
        side: max(
            r["difference"]
            for r in sharded["rows"]
            if r["kind"] == "plans"
            and (r["layout"], r["wire"], r["determinism"], r["side"]) == ("column-wise", "fp32", "run", side)
        )
        for side in ("rowwise", "TorchRec")
    }
    made = training["environment"]
    return "\n".join(
        [
            "| what | rowwise | peer | command |",
            "|---|---|---|---|",
            f"| [DLRM training step](docs/benchmarks/training-step.md), fp32, 2 threads | {speed[OURS, 2]:,.0f} "
            f"samples/s | TorchRec 1.8.0: {speed[BESIDE, 2]:,.0f} samples/s | `rowwise bench train_step` |",
            "| [lookup + backward + update](docs/benchmarks/operators.md), row-wise Adagrad, fp32, 2 threads, "
            f"geometric mean | {ratio(cells)} as fast (slowest configuration {min(cells):.2f}x) | fbgemm-gpu-cpu "
            "1.5.0, the last CPU wheel with multithreading | `rowwise bench ops` |",
            "| [largest absolute weight difference](docs/benchmarks/plan-invariance.md) between 2 processes, "
            f"column-wise, and 1 process after 20 steps | {off['rowwise']:.1e} | TorchRec 1.8.0: {off['TorchRec']:.2g} "
            "| `rowwise bench shard_step` |",
            "",
            f"Processor: {made['cpu']} ({training['processor']}), {made['cores']} cores; torch "
            f"{made['versions']['torch']}.",
        ]
    )


def fill(file: Path, what: str, table: str) -> str:
    """A page with a table between its marks."""
    page, begin, end = file.read_text(), f"<!-- {what} -->\n", "<!-- end -->"
    if page.count(begin) != 1:
        sys.exit(f"{file.name} has {page.count(begin)} places for the {what}, expected one: {begin.strip()} ... {end}")
    head, rest = page.split(begin)
    return f"{head}{begin}{table}\n{end}{rest.split(end, 1)[1]}"


def datasets() -> str:
    """What is known of the datasets by name."""
    lines = ["| dataset | rows and label | split | files, size, terms |", "|---|---|---|---|"]
    for entry in catalog(ROOT / "no folder"):
        files = (
            f"{', '.join(entry.files)}; {entry.size}; {entry.terms}; [page]({entry.page})"
            if entry.files
            else entry.size
        )
        lines.append(f"| `{entry.name}` | {entry.what} | {entry.split} | {files} |")
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    """Every file that this tool writes, with what is to be in it."""
    docs = ROOT / "docs"
    first = saved_results.first_with("train_step", "ops", "shard_step")
    numbers = three_numbers(partial(saved_results.read, processor=first))
    found = {
        ROOT / "README.md": fill(ROOT / "README.md", "numbers", numbers),
        docs / "datasets.md": fill(docs / "datasets.md", "datasets", datasets()),
    }
    found[docs / "recipes.md"] = f"{WRITTEN}{RECIPES}{recipes()}\n"
    index = WRITTEN + ABOUT
    for name, subject in SUBJECTS.items():
        tables = sections(subject)
        found[docs / "benchmarks" / f"{name}.md"] = page(subject, tables)
        index += f"| [{subject.title}]({name}.md) | {subject.question} | {', '.join(tables)} |\n"
    return found | {docs / "benchmarks" / "index.md": index}


def main() -> None:
    for path, wanted in pages().items():
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted)
        elif not path.exists() or wanted != path.read_text():
            sys.exit(f"{path} is not what benchmarks/results say: run python tools/readme_tables.py")


if __name__ == "__main__":
    main()
