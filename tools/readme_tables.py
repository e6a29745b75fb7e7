"""Write the numbers of README, docs/recipes.md and docs/benchmarks/ from saved results, or check them.

python tools/readme_tables.py [--check]

README has three numbers, of the first processor that has all results; docs/benchmarks/ has a page for each subject,
with the tables of every processor.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import saved_results
from saved_results import NotSaved

from rowwise.recipes.find import load, names

ROOT = Path(__file__).parents[1]
OURS, BESIDE = "rowwise fp32", "TorchRec fp32"
Read = Callable[[str], dict]  # the result of a benchmark, on one processor
OPTIMIZERS = {"sgd": "SGD", "rowwise_adagrad": "row-wise Adagrad", "adagrad": "Adagrad", "adam": "Adam", "lamb": "LAMB"}


def ratio(values: list[float]) -> str:
    return f"{math.exp(sum(map(math.log, values)) / len(values)):.1f}x" if values else "-"


def by_threads(rows: list[dict]) -> str:
    """Geometric means on one thread and on two, and the worst."""
    cells = [ratio([r["ratio"] for r in rows if r["threads"] == n]) for n in (1, 2)]
    return " | ".join([*cells, f"{min(r['ratio'] for r in rows):.2f}x"])


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
    lines = ["| against | rows | optimizer | 1 thread | 2 threads | worst cell |", "|---|---|---|---|---|---|"]
    for kind in dict.fromkeys((r["peer"], r["row_type"], r["optimizer"]) for r in rows):
        mine = [r for r in rows if (r["peer"], r["row_type"], r["optimizer"]) == kind]
        lines.append(f"| {kind[0]} | {kind[1]} | {OPTIMIZERS[kind[2]]} | {by_threads(mine)} |")
    limited = (r for r in rows if "gather_share" in r and r["row_type"] == "fp32")
    shares = [r["gather_share"] for r in limited if r["pooling"] == 20 and r["dim"] >= 64]
    note = (
        "Time of the peer over ours for lookup, backward and update together (geometric means over dims, batch sizes, "
        "poolings and id distributions). The lookup of fp32 rows alone, pooling 20 and dim >= 64, runs at "
        f"{min(shares):.0%} to {min(1.0, max(shares)):.0%} of the speed at which this machine can read the same rows "
        f"at all. {made_on(result)}"
    )
    return "\n".join([*lines, "", note])


def around(read: Read) -> str:
    """Everything but the tables: rearranging batches, and the dense side."""
    dense, jagged = read("dense_cpu"), read("jagged")
    kinds = {"interaction": "interaction", "linears": "linear layers", "step": "DLRM step"}
    rows = [{**r, "kind": r["op"]} for r in jagged["rows"]]
    rows += [{**r, "kind": f"{kinds[r['kind']]}, {r['dtype']}", "peer": "torch"} for r in dense["rows"]]
    lines = ["| what | against | 1 thread | 2 threads | worst cell |", "|---|---|---|---|---|"]
    for kind in dict.fromkeys((r["kind"], r["peer"]) for r in rows):
        mine = [r for r in rows if (r["kind"], r["peer"]) == kind]
        lines.append(f"| {kind[0]} | {kind[1]} | {by_threads(mine)} |")
    library = dense["environment"]["library"]
    chosen = f"`Linear` uses {library} here, as the table of processor families says."
    note = f"Dense: forward and backward through autograd; {chosen}"
    return "\n".join([*lines, "", f"{note} {made_on(dense)}"])


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
    note = (
        f"Sales in stores, ids numbered at random, {len(full['auc'])} seeds; full tables: AUC "
        f"{center(full['auc']):.4f} ± {(max(full['auc']) - min(full['auc'])) / 2:.4f}, "
        f"NE {center(full['ne']):.4f}, {full['bytes'] / 1e6:.1f} MB. "
        "Behind ±: half of what seeds differ by. Bytes are those of all tables, maps included; quotient-remainder "
        "cannot make small tables that small, which stay as they are there. "
        f"The advisor, under one budget of 1/{advice['ratio']:g} for all tables and without a look at the test: "
        f"{chosen}; AUC {center(advice['auc']):.4f} in {advice['bytes'] / 1e6:.2f} MB. "
        f"Trained on the second half of the weeks: full {half['full']:.4f}, learned from that half "
        f"{half['learned, second half']:.4f}, from the first half {half['learned, first half']:.4f}, hash "
        f"{half['hash']:.4f}, at 1/100. MovieLens-100k, users and films in 1/8: full {auc['full']:.4f}, hash "
        f"{auc['hash']:.4f}, mixed {auc['mixed']:.4f}, learned {auc['learned']:.4f}. A map of {scale['ids'] / 1e6:g} "
        f"million ids into {scale['rows']:,} rows takes {scale['wall_s']:.0f} s and {scale['peak_gb']:.1f} GB. "
        f"{made_on(result)}"
    )
    return "\n".join([*lines, "", note])


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
    return "\n".join([*lines, "", f"Means of {seeds} seeds, 2 million samples each, seen once. {made_on(result)}"])


def recipes() -> str:
    """What the recipes that ship say of themselves."""
    lines = ["| recipe | what | test metrics | takes |", "|---|---|---|---|"]
    for name in names():
        about = load(name).about
        spread = {metric: f" \u00b1 {about.spread[metric]:.2g}" for metric in about.spread}
        metrics = ", ".join(
            f"{m.upper() if m in ('auc', 'ne') else m} {value:.4g}{spread.get(m, '')}"
            for m, value in about.expect.items()
        )
        takes = [f"{about.time_s:.0f} s"] if about.time_s else []
        takes += [f"{about.memory_gb:.1f} GB"] if about.memory_gb else []
        lines.append(f"| `{name}` | {about.what} | {metrics or 'not measured'} | {', '.join(takes)} |")
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
    note = (
        f"In brackets: over {BESIDE}. torch is nn.EmbeddingBag with Adagrad, TorchRec 1.8.0 has FBGEMM's fused tables; "
        "all sides use torch's fused Adam for the dense layers. Matrix products are most of a step, and both of "
        "torch's libraries for them reach more than 80% of this processor's speed."
    )
    shares = [f"{r['limit_share']:.2f}" for r in result["rows"] if r["side"] == OURS and "limit_share" in r]
    if shares:
        note += f" Share of the machine's limit, {OURS}, by optimizer and threads: {', '.join(shares)}."
    return "\n".join([*lines, "", f"{note} {made_on(result)}"])


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
    note = (
        "TorchRec: the faster of plain and pipelined, always over gloo. Our ranks use shared memory unless told "
        "otherwise. Of a whole step most is matrix products, in which both sides reach this processor's limits."
    )
    return "\n".join([*lines, "", f"{note} {made_on(result)}"])


def differences(result: dict) -> dict[tuple[str, str], dict[str, float]]:
    """By layout and wire: the largest difference of a weight, for each side."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for r in result["rows"]:
        if r["kind"] == "plans":
            column = r["side"] if r["determinism"] == "run" else "elastic"
            layout = "replicated" if r["layout"] == "data-parallel" else r["layout"]
            cells = found.setdefault((layout, r["wire"]), {})
            cells[column] = max(cells.get(column, 0.0), r["difference"])
    return found


def plans(read: Read) -> str:
    """How far weights end from those of one process."""
    result = read("shard_step")
    lines = ["| plan | TorchRec | rowwise | rowwise, elastic |", "|---|---|---|---|"]
    for (layout, wire), cells in differences(result).items():
        shown = [f"{cells[c]:.2g}" if c in cells else "-" for c in ("TorchRec", "rowwise", "elastic")]
        lines.append(f"| {layout}{'' if wire == 'fp32' else f', {wire} wire'} | {' | '.join(shown)} |")
    note = "Largest difference of a weight, on 2 processes and on 4 threads of 2 pretended hosts."
    return "\n".join([*lines, "", f"{note} {made_on(result)}"])


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
    note = (
        f"Above: {size_gb:.1f} GB, ours with checksums; a save in the background stops training for {blocked:.0%} of a "
        "whole one, once its memory is there. Below: bytes of ten full checkpoints over those of incremental ones; ids "
        "by a Zipf law of 1.05. Trained on from 8 or 4 bits, NE stayed within the noise of seeds."
    )
    return "\n".join([*lines, "", f"{note} {made_on(files)}"])


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
    note = (
        "Above: tasks by NeuroShard's protocol; over those that a method fits into memory, the cost of its plans over "
        "ours (geometric mean), all under one model of costs. Below: a plan is at most so far from the best there is; "
        "856 tables are made up, after published statistics, and fill the devices' memory to a share; lists are "
        "published ones in all layouts; 12 T parameters are on 128 devices with host memory."
    )
    return "\n".join([*lines, "", f"{note} {made_on(result)}"])


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
    note = (
        f"Above: {sets['sets']:,} sets of 1 to 15 tables, measured in ten minutes on two ranks, {sets['held_out']:,} "
        "of them never learned from. Two measurements of one set differ so that a perfect prediction would be "
        f"{sets['noise']:.1%} off, with the drift of this shared machine's speed {sets['raw_noise']:.1%}. "
        f"{len(chosen)} plans that the search chose by it, run on two processes, took what was predicted to within "
        f"{off:.0%} (median). Below: cost over that of our search, and tasks that fit into memory; whole tables, which "
        "the shipped DreamShard policy never saw."
    )
    return "\n".join([*lines, "", f"{note} {made_on(result)}"])


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
    note = (
        "13 numbers filled, clamped, log1p; 26 ids and the first 20 of 4 lists hashed; a label. All do the same on "
        f"one thread, per second of a processor. Kernels, million elements a second: {per_second}. "
        f"A batch of 5.9 MB to another process: {slots:.1f} GB a processor's second, {slots / few:.1f} times torch's "
        f"queue with 3 tensors and {slots / many:.0f} times with 60. A tenth of 500 features takes {less:.0f}x less "
        f"processor than a map of them; on a disk of 8 ms and 150 MB/s, of the map's speed: {disk}. A trainer that "
        f"needs three workers gets {scaling['workers']}, and waits {scaling['waits']:.1%} of the time."
    )
    return "\n".join([*lines, "", f"{note} {made_on(result)}"])


def mean(result: dict, row_type: str, field: str) -> float:
    values = [r[field] for r in result["rows"] if r["row_type"] == row_type]
    return sum(values) / len(values)


def three(read: Read) -> str:
    """The numbers of README: one of operators, one of steps, one of trust."""
    operators, steps, sharded = read("ops"), read("train_step"), read("shard_step")
    kind = ("fp16", "rowwise_adagrad", 1, FBGEMM)
    kernels = [
        r["ratio"] for r in operators["rows"] if (r["row_type"], r["optimizer"], r["threads"], r["peer"]) == kind
    ]
    speed = {(r["side"], r["threads"]): r["samples_s"] for r in steps["rows"] if r.get("optimizer") == "adam"}
    weights = differences(sharded)["column-wise", "fp32"]
    rows = (
        ("speed of lookup, backward and update, fp16 rows, one thread", ratio(kernels), "1.0x", "FBGEMM", "ops"),
        (
            "speed of a DLRM step in fp32, two threads",
            f"{speed[OURS, 2] / speed[BESIDE, 2]:.1f}x",
            "1.0x",
            "TorchRec",
            "step",
        ),
        (
            "column-wise sharding: change of a weight in 20 steps",
            *(f"{weights[x]:.2g}" for x in ("rowwise", "TorchRec")),
            "TorchRec",
            "plans",
        ),
    )
    lines = ["| what | rowwise | peer | measured by |", "|---|---|---|---|"]
    for what, ours, theirs, peer, where in rows:
        command = next(name for table, (_, name) in TITLES.items() if table.__name__ == where)
        page = f"[`rowwise bench {command}`](docs/benchmarks/{where}.md)"
        lines.append(f"| {what} | {ours} | {theirs} ({peer} 1.8.0) | {page} |")
    made = steps["environment"]
    note = f"Processor {steps['processor']} ({made['cpu']}, {made['cores']} cores), torch {made['versions']['torch']}."
    return "\n".join(
        [*lines, "", f"{note} The change of a weight is the largest, against one process. Pages name commits."]
    )


FBGEMM = "fbgemm-gpu-cpu 1.8.0"
TITLES = {  # and the benchmarks that measure it
    step: ("Training steps", "train_step"),
    ops: ("Lookup, backward and update", "ops"),
    around: ("Rearranging batches, and the dense side", "jagged dense_cpu"),
    shard: ("Steps over two processes", "shard_step"),
    plans: ("Do results depend on the plan?", "shard_step"),
    planner: ("Plans", "planner"),
    calibrate: ("Learned costs", "calibrate"),
    checkpoints: ("Checkpoints", "checkpoint checkpoint_delta"),
    ingest: ("Reading files", "ingest"),
    compress: ("Tables in fewer bytes", "compress"),
    quality: ("Narrow rows and products", "quality"),
}
ABOUT = """# Benchmarks

`rowwise bench --list` says what each benchmark answers, takes and needs. `rowwise bench NAME` runs it, and
`rowwise bench NAME -- --save` keeps its result with those of this processor. Numbers of two processors are not
compared: processors differ by more than their speed. A step's share of what its own machine can do at best is compared;
`benchmarks/parts/limits.py` defines it. `tools/readme_tables.py` writes these pages.

"""
RECIPES = """# Recipes that ship

`rowwise ls` lists them, `rowwise cp NAME` copies one to edit, `rowwise train NAME` trains it. The
metrics are those of rows that the model was not trained on.

"""


def table_on(table: Callable[[Read], str], processor: str) -> str | None:
    """None: some of its results are not saved for this processor."""
    try:
        return table(partial(saved_results.read, processor=processor))
    except NotSaved:
        return None


def fill(text: str) -> str:
    """README with its numbers."""
    begin, end = "<!-- table: three -->", "<!-- end -->"
    if text.count(begin) != 1:
        sys.exit(f"README.md has {text.count(begin)} places for its numbers, want one: {begin} ... {end}")
    found = (table_on(three, processor) for processor in saved_results.processors())
    shown = next((one for one in found if one), None)
    if shown is None:
        sys.exit("no processor has all results of README's numbers: see benchmarks/results")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{shown}\n{end}{rest.split(end, 1)[1]}"


def subject(table: Callable[[Read], str]) -> str:
    """The page of one subject: its tables on every processor."""
    title, benchmarks = TITLES[table]
    commands = " and ".join(f"`rowwise bench {name}`" for name in benchmarks.split())
    parts = [f"# {title}\n", f"Measured by {commands}.\n"]
    for processor in saved_results.processors():
        shown = table_on(table, processor)
        parts += [f"## {processor}\n", f"{shown}\n"] if shown else []
    return "\n".join(parts)


def pages() -> dict[Path, str]:
    """The contents of every generated file."""
    readme, folder = ROOT / "README.md", ROOT / "docs" / "benchmarks"
    index = ABOUT + "".join(f"- [{title}]({table.__name__}.md)\n" for table, (title, _) in TITLES.items())
    found = {readme: fill(readme.read_text()), folder / "index.md": index}
    found |= {folder / f"{table.__name__}.md": subject(table) for table in TITLES}
    found[ROOT / "docs" / "recipes.md"] = f"{RECIPES}{recipes()}\n"
    return found


def main() -> None:
    for path, wanted in pages().items():
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted)
        elif not path.exists() or wanted != path.read_text():
            sys.exit(f"{path} is not what benchmarks/results say: run python tools/readme_tables.py")


if __name__ == "__main__":
    main()
