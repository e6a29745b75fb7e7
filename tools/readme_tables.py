"""Write docs/benchmarks/, docs/recipes.md and README's numbers from saved results, or check that they say the same.

python tools/readme_tables.py [--check]

Each subject has a page, with a section for each processor whose results are saved. A page is a function of the
results that yields its tables and facts. README has three numbers, of the first processor that has them.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import saved_results
from saved_results import NotSaved

from rowwise.ingest.datasets.catalog import catalog
from rowwise.recipes.find import load, names

ROOT = Path(__file__).parents[1]
Parts = Iterator[str | list[str]]  # tables, and facts
OURS, BESIDE = "rowwise fp32", "TorchRec fp32"
OPTIMIZERS = {"sgd": "SGD", "rowwise_adagrad": "row-wise Adagrad", "adagrad": "Adagrad", "adam": "Adam", "lamb": "LAMB"}


def table(head: str, cells: str | Callable[[Any], str], rows: Iterable[Any]) -> str:
    """Rows by a format of their fields, or by a function of each."""
    form = cells.format_map if isinstance(cells, str) else cells
    titles, lines = head.split(" | "), [f"| {form(row)} |" for row in rows]
    if not lines:
        return f"The benchmark has changed since this was measured. Not measured: {'; '.join(titles)}."
    return "\n".join([f"| {head} |", "|" + "---|" * len(titles), *lines])


def section(result: dict, parts: Parts) -> str:
    """Tables and lists of facts, each of which ends with where all is from."""
    made = result["environment"]
    machine = f"Processor {result['processor']} ({made['cpu']}, {made['cores']} cores)"
    # Sections may have been measured at different commits; then each row names its own.
    rows = result["rows"] if isinstance(result["rows"], list) else []
    commits = ", ".join(dict.fromkeys(row.get("commit", made["commit"]) for row in rows)) or made["commit"]
    last = f"{machine}, torch {made['versions']['torch']}, commit {commits}."
    shown = (part if isinstance(part, str) else "\n".join(f"- {fact}" for fact in (*part, last)) for part in parts)
    return "\n\n".join(shown)


@dataclass(frozen=True)
class Page:
    """A page of docs/benchmarks, made of the results of some benchmarks."""

    name: str
    title: str
    benchmarks: tuple[str, ...]
    any_of_them: bool  # the first result that is there is enough
    parts: Callable[..., Parts]

    @property
    def question(self) -> str:
        return str(self.parts.__doc__)

    def sections(self) -> dict[str, str]:
        """Of each processor that has the results; none before the first measurement."""
        found = {}
        for processor in saved_results.processors():
            results = []
            for benchmark in self.benchmarks:
                with suppress(NotSaved):
                    results.append(saved_results.read(benchmark, processor))
            if self.any_of_them and results:
                found[processor] = section(results[0], self.parts(results[0]))
            elif len(results) == len(self.benchmarks):
                found[processor] = section(results[0], self.parts(*results))
        return found

    def text(self, sections: dict[str, str]) -> str:
        commands = "\n".join(f"    rowwise bench {name}" for name in self.benchmarks)
        parts = [f"{WRITTEN}# {self.title}\n\n{self.question}\n\n{commands}\n"]
        return "\n".join([*parts, *(f"## {processor}\n\n{said}\n" for processor, said in sections.items())])


PAGES: list[Page] = []  # in the order of the index


def page(name: str, title: str, *benchmarks: str, any_of_them: bool = False) -> Callable:
    """Of a function: its docstring is the question that the page answers."""

    def add(parts: Callable[..., Parts]) -> Callable[..., Parts]:
        PAGES.append(Page(name, title, benchmarks, any_of_them, parts))
        return parts

    return add


def by(rows: Iterable[dict], *keys: str) -> dict[Any, list[dict]]:
    """Rows with the same value of a key, or values of several, in the order of the first ones; of others none."""
    found: dict[Any, list[dict]] = defaultdict(list)
    for row in rows:
        found[itemgetter(*keys)(row)].append(row)
    return found


def mean(rows: Iterable[dict], field: str) -> float:
    return fmean(row[field] for row in rows)


def with_spread(values: list[float]) -> str:
    """The mean, and half the range of several."""
    spread = f" ± {(max(values) - min(values)) / 2:.4f}" if len(values) > 1 else ""
    return f"{fmean(values):.4f}{spread}"


def missed(result: dict, form: str = "{name}") -> str:
    floors = [form.format_map(floor) for floor in result["floors"] if not floor["ok"]]
    return f"Floors that are missed: {'; '.join(floors) or 'none'}."


def by_threads(rows: list[dict]) -> str:
    """Geometric means on one thread and on two, and the slowest configuration."""
    of_threads = by(rows, "threads")
    cells = [f"{geometric_mean(r['ratio'] for r in of_threads[n]):.1f}x" if n in of_threads else "-" for n in (1, 2)]
    return " | ".join([*cells, f"{min(r['ratio'] for r in rows):.2f}x"])


@page("training-step", "Training step", "train_step")
def training_step(result: dict) -> Parts:
    """How fast is a DLRM training step beside TorchRec and plain torch?"""
    speed = {(r["side"], r["threads"]): r["samples_s"] for r in result["rows"] if r.get("optimizer") == "adam"}
    memory = {r["side"]: r["peak_bytes"] for r in result["rows"] if r["kind"] == "memory"}

    def cells(side: str) -> str:
        speeds = [f"{speed[side, n]:,.0f} ({speed[side, n] / speed[BESIDE, n]:.1f}x)" for n in (1, 2)]
        return f"{side} | {' | '.join(speeds)} | {memory[side] / 1e9:.1f} GB"

    sides = dict.fromkeys(side for side, _ in speed)
    yield table("samples/s | 1 thread | 2 threads | peak memory", cells, sides)
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
    yield facts


@page("torchrec-door", "Steps through the door", "torchrec_door")
def torchrec_door(result: dict) -> Parts:
    """How fast is a step of TorchRec's own model through `rowwise.torchrec`, beside TorchRec?"""
    yield table(
        "model | threads | rowwise.torchrec | TorchRec | speed",
        lambda r: f"{r['shape']} | {r['threads']} | {r['ms']:.1f} ms | {r['torchrec_ms']:.1f} ms | {r['ratio']:.1f}x",
        result["rows"],
    )
    yield [
        "Model: DLRMTrain of TorchRec 1.8.0 with 26 tables of dim 64, batch 2,048, row-wise Adagrad in the backward. "
        "Both sides run the same script but for one import, in turn in one process.",
        f"Largest difference of the losses of the first steps: {max(r['off'] for r in result['rows']):.1e}.",
        missed(result),
    ]


@page("operators", "Lookup and update", "ops")
def operators(result: dict) -> Parts:
    """How fast are lookup, backward and update of 26 tables of 1,000 to 4,000,000 rows, inputs checked?"""
    rows = [r for r in result["rows"] if r["peer"] != "rowwise fp16"]
    limited = (r for r in rows if "gather_share" in r and r["row_type"] == "fp32")
    shares = [r["gather_share"] for r in limited if r["pooling"] == 20 and r["dim"] >= 64]
    yield table(
        "against | rows | optimizer | 1 thread | 2 threads | slowest configuration",
        lambda kind: f"{kind[0][0]} | {kind[0][1]} | {OPTIMIZERS[kind[0][2]]} | {by_threads(kind[1])}",
        by(rows, "peer", "row_type", "optimizer").items(),
    )
    yield [
        "Cells: time of the peer over that of rowwise, for lookup, backward and update together. Each is a geometric "
        "mean over dims, batch sizes, poolings and id distributions; the last column is the slowest of these.",
        f"Lookups of fp32 rows with pooling 20 and dim >= 64 run at {min(shares):.0%} to {min(1.0, max(shares)):.0%} "
        "of the speed at which this machine reads the same rows without pooling.",
        "FBGEMM's CPU wheels from 1.6 on run on one thread. 1.5.0 is the last CPU wheel with multithreading.",
    ]


@page("batches-and-dense", "Batches and dense layers", "dense_cpu", "jagged")
def batches_and_dense(dense: dict, jagged: dict) -> Parts:
    """How fast are jagged-tensor operators, the interaction and linear layers?"""
    kinds = {"interaction": "interaction", "linears": "linear layers", "step": "DLRM step"}
    rows = [{**r, "kind": r["op"]} for r in jagged["rows"]]
    rows += [{**r, "kind": f"{kinds[r['kind']]}, {r['dtype']}", "peer": "torch"} for r in dense["rows"]]
    library = dense["environment"]["library"]
    yield table(
        "what | against | 1 thread | 2 threads | slowest configuration",
        lambda kind: f"{kind[0][0]} | {kind[0][1]} | {by_threads(kind[1])}",
        by(rows, "kind", "peer").items(),
    )
    yield [
        "Cells: time of the other library over that of rowwise.",
        f"Dense layers: forward and backward through autograd. `Linear` uses {library} on this processor family.",
    ]


@page("several-processes", "Several processes", "shard_step")
def several_processes(result: dict) -> Parts:
    """How fast are training steps on two processes beside TorchRec?"""
    names, ways = {"step": "whole step", "tables": "tables alone"}, ("gloo", "shared memory")

    def compared(found: tuple[tuple, list[dict]]) -> dict:
        (kind, layout, batch, ids), rows = found
        row = {"what": names[kind], "layout": layout, "batch": batch, "ids": ids, "theirs": 0}
        for way in ways:
            speed = {r["side"]: r["samples_s"] for r in rows if r["transport"] == way}
            ours = speed.pop("rowwise", None)
            theirs = max(speed.values(), default=0)
            row["theirs"] = max(row["theirs"], theirs)
            row[way] = None if ours is None else ours / theirs
        return row

    timed = by((r for r in result["rows"] if r["kind"] in names), "kind", "layout", "batch", "pooling")
    yield table(
        "what | plan, global batch, ids | TorchRec, samples/s | over gloo | shared memory",
        "{what} | {layout}, {batch:,}, {ids} | {theirs:,.0f} | {gloo:.2f}x | {shared memory:.2f}x",
        (row for row in map(compared, timed.items()) if None not in row.values()),  # else measured over gloo only
    )
    yield [
        "Two processes of one thread each, with the same model, tables and plan as TorchRec's "
        "`DistributedModelParallel`.",
        "TorchRec: the faster of its plain and its pipelined step, over gloo. The last columns: speed of rowwise over "
        "that of TorchRec. Ranks of rowwise on one host use shared memory by default.",
        "Most of a whole step is matrix products, in which both sides reach this processor's limits.",
    ]


@page("pipelined-steps", "Pipelined steps", "pipeline")
def pipelined_steps(result: dict) -> Parts:
    """What do steps hide of communication, disk reads and waiting?"""
    of, sides = by(result["rows"], "section"), ("depth 1", "depth 2", "depth 3", "depth 2, stale")
    peers = ("TorchRec", "TorchRec pipelined")

    def times(rows: list[dict], sides: Iterable[str]) -> str:
        ms = {row["side"]: row["ms"] for row in rows}
        return " | ".join(f"{ms[side]:.1f} ms" for side in sides)

    def beside_peers(found: tuple[str, list[dict]]) -> str:
        link, rows = found
        ms = {row["side"]: row["ms"] for row in rows}
        return f"{link} | {times(rows, sides + peers)} | {min(ms[peer] for peer in peers) / ms['depth 2']:.2f}x"

    (disk, *_), (stale, *_) = of["disk"], of["staleness"]
    yield table(
        f"transport | link | {' | '.join(sides)}",
        lambda found: f"{' | '.join(found[0])} | {times(found[1], sides)}",
        by(of["busy"] + of["delay"], "transport", "link").items(),
    )
    yield table(
        f"latency | {' | '.join(sides + peers)} | against the faster TorchRec",
        beside_peers,
        by(of["torchrec"], "link").items(),
    )
    yield table(
        "tables on disk | step | waits for the disk",
        lambda row: f"{row['side']} | {row['ms']:.1f} ms | {row['exposed_ms'] / row['ms']:.1%}",
        of["disk"],
    )
    yield table(
        "`train.staleness` | test AUC | spread over seeds", "{staleness} | {auc:.4f} | {spread:.4f}", of["staleness"]
    )
    yield table(
        "model of the timeline | predicted | measured | off by",
        "{side} | {predicted_ms:.1f} ms | {ms:.1f} ms | {off:+.1%}",
        ({**row, "off": row["predicted_ms"] / row["ms"] - 1} for row in of["timeline"]),
    )
    yield [
        "First table: two processes of one thread. `none` is the link of this machine. `latency`: every collective "
        "begins late, by so much that waiting takes as long as all else of a sequential step. `bandwidth`: its bytes "
        "take that long. An exact step has to wait for the bytes of its vectors and gradients; a stale one does not.",
        "Second table: over gloo. The latency, before every collective of both libraries, is a share of our "
        "sequential step. Plan, weights and batches are the same. TorchRec pipelined is its TrainPipelineSparseDist.",
        f"Third table: one process. The disk's random reads alone take {disk['limit_ms']:.1f} ms a step.",
        f"Fourth table: {stale['recipe']}, {stale['seeds']} seeds. 0 has the bits of a run without the key.",
        "Fifth table: a step with two in flight, as `planning/perf/timeline.py` makes it from a sequential recording.",
    ]


@page("sharded-dense", "Sharded dense parameters", "dense_parallel")
def sharded_dense(result: dict) -> Parts:
    """What do FSDP2's ways to shard dense parameters send, hold and take?"""
    ways = [row for row in result["rows"] if "kind" in row]
    overlaps = [row for row in result["rows"] if "transport" in row]

    def cells(row: dict) -> str:
        sizes = f"{row['sent_bytes'] / 1e6:.2f} MB | {row['predicted_bytes'] / 1e6:.2f} MB"
        torch = f"{row['torch_ms']:.1f} ms" if "torch_ms" in row else ""
        return f"{row['kind']} | {sizes} | {row['shared_memory_ms']:.1f} ms | {row['gloo_ms']:.1f} ms | {torch}"

    facts: list[str] = []
    if ways:
        yield table("kind | sent in a step | formula | shared memory | gloo | torch over gloo", cells, ways)
        exact = [row for row in ways if "bf16" not in row["kind"]]
        off = max(row[key] for row in exact for key in ("off_replicated", "off_torch") if key in row)
        facts += [
            "Four processes share the cores of this machine, so times are of its memory rather than of links.",
            "torch: DDP, FSDP2, and FSDP2 on a mesh of 2 x 2.",
            f"Losses of fp32 agree with replicated ones, and with torch's, to {off:.1f} millionths over all steps.",
        ]
    for built in (row for row in result["rows"] if "parameters" in row):
        numbers = {name: built[f"{name}_bytes"] / 1e6 for name in ("whole", "peak", "bound")}
        facts.append(
            f"Construction of {built['parameters'] / 1e6:.0f} million parameters, {numbers['whole']:.0f} MB, on four "
            f"ranks takes at most {numbers['peak']:.0f} MB of each. A quarter and the largest layer, and 15 % more, "
            f"are {numbers['bound']:.0f} MB."
        )
    if overlaps:
        yield table(
            "hybrid 2 x 2 over a simulated link | sums in turn | sums overlap | gain",
            "{transport} | {in_turn_ms:.1f} ms | {together_ms:.1f} ms | {gain:.2f}x",
            ({**row, "gain": row["in_turn_ms"] / row["together_ms"]} for row in overlaps),
        )
        yield table(
            "unit of a backward | reduce-scatter | all-reduce between groups",
            "{unit} | {reduce_scatter_begin_ms:.1f} to {reduce_scatter_end_ms:.1f} ms | "
            "{all_reduce_begin_ms:.1f} to {all_reduce_end_ms:.1f} ms",
            ({**event, "unit": k} for k, event in enumerate(overlaps[0]["events"], 1)),
        )
        facts += [
            "The simulated link has 2 ms and 100 MB/s for each rank, and takes no processor. Both sides are of one "
            "run, step by step in turn, and their losses have the same bits.",
            "Units of a backward: the last overlapped step of rank 0 over shared memory, from the begin of its "
            "backward. A unit is a layer; the last one is all parameters outside of layers.",
            "Not measured: GPUs, where `train.dense_parallel` shards nothing.",
        ]
    yield facts


@page("all-reduces", "All-reduces between hosts", "host_sums")
def all_reduces(result: dict) -> Parts:
    """What does an order of hosts gain, by algorithm and size of the all-reduce?"""
    algorithms = {"ring": "ring", "halving_doubling": "halving and doubling", "tree": "tree"}

    def cells(row: dict) -> str:
        gains = [
            f"{1e3 * row[name]['given']:.1f} / {1e3 * row[name]['found']:.1f} ms = "
            f"{row[name]['given'] / row[name]['found']:.1f}x"
            for name in algorithms
        ]
        return f"{row['size']:,} | {' | '.join(gains)} | {algorithms[row['chosen']]} | {row['off_fastest']:.2f}"

    names = " | ".join(algorithms.values())
    yield table(f"bytes | {names} | chosen by size | over the fastest", cells, result["rows"])
    yield [
        "Real all-reduces of eight hosts in two racks behind uplinks of the rate of one host: network namespaces of "
        "this machine. Medians of the slowest rank.",
        "given / found: hosts of the two racks in turn, and the order found on the probed network, for each algorithm "
        "its own.",
        "Over the fastest: the algorithm chosen by size, over the fastest of the three in one run. The "
        "choice knows the network, not that eight hosts share two cores here, which decides small sizes.",
        "Not measured: real clouds, NCCL, more than eight hosts, pairs of trees.",
    ]


@page("compiled-layers", "Compiled layers", "compiled")
def compiled_layers(result: dict) -> Parts:
    """What does `train.compile` gain, by kind of model?"""
    first, off = result["rows"][0], max(row["off"] for row in result["rows"])
    yield table(
        "model | without | compiled | ratio | compilation",
        "{model} | {plain_samples_s:,.0f} samples/s | {compiled_samples_s:,.0f} samples/s | {ratio:.2f} | "
        "{compile_s:.0f} s",
        result["rows"],
    )
    yield [
        f"Whole steps of 26 tables of dim 32, batches of {first['batch']:,}, on {first['threads']} threads.",
        f"Losses of the first two steps agree to {1e6 * off:.1f} millionths.",
        "Matrix products take most of a step, and are those of the same library on both sides. What compilation saves "
        "is memory traffic between them.",
    ]


MODEL_DATA = {"movielens-100k": "MovieLens-100k", "complete-journey": "Complete Journey", "stream": "stream"}


@page("models", "Models", "models")
def models(result: dict) -> Parts:
    """Which model is best, with equally many parameters and a learning rate of its own?"""
    by_model: dict[str, dict[str, dict]] = {}
    for line in sorted(result["lines"], key=lambda line: line["ne"]):
        by_model.setdefault(line["model"], {})[line["data"]] = line
    zoo = {name: mine for name, mine in by_model.items() if len(mine) == len(MODEL_DATA)}
    stacks = [name for name in by_model if name not in zoo]
    depths = sorted({int(name.rsplit(", ", 1)[1].split()[0]) for name in stacks})

    def ne(line: dict) -> str:
        return f"{line['ne']:.4f} ± {line['spread'] / 2:.4f}"

    def of_model(name: str) -> str:
        last = zoo[name]["stream"]
        cells = " | ".join(ne(zoo[name][data]) for data in MODEL_DATA)
        return f"{name} | {cells} | {last['flops']:,} | {last['samples_s']:,}"

    def of_stack(kind: str) -> str:
        return " | ".join([kind, *(ne(by_model[f"{kind}, {depth} layers"]["stream"]) for depth in depths)])

    rows, lowest = result["rows"], min(line["lr"] for line in result["lines"])
    sizes = {data: [line["parameters"] for line in lines] for data, lines in by(result["lines"], "data").items()}
    at_edge = sum(line["lr"] == lowest for line in result["lines"])
    datasets = " | ".join(f"NE, {title}" for title in MODEL_DATA.values())
    layers = " | ".join(f"{depth} layer{'s' * (depth > 1)}" for depth in depths)
    yield table(
        f"model | {datasets} | operations of a sample, stream | samples/s, stream",
        of_model,
        sorted(zoo, key=lambda name: zoo[name]["stream"]["ne"]),
    )
    yield table(f"stack, on the stream | {layers}", of_stack, sorted({name.split(", ")[0] for name in stacks}))
    yield [
        f"Means over {len(by(rows, 'seed'))} seeds, ± half the range; lower is better. "
        "Differences within the ranges mean nothing.",
        "Parameters beside the tables: "
        + ", ".join(f"{min(sizes[d]):,} to {max(sizes[d]):,} on {title}" for d, title in MODEL_DATA.items())
        + ". Tables are the same for all models, but for weights of single ids.",
        "Each model has the best of three learning rates by validation rows; for "
        f"{at_edge} of {len(result['lines'])} that is the lowest tried. "
        "All else is that of one recipe, which is DCN's on the first two datasets.",
        "The stream is 5 million made-up clicks, each seen once. Its operations count multiplications and additions. "
        "Samples/s are whole steps on all threads.",
    ]


REQUESTS = {"one row": "one row", "1 x 100": "a context and 100 candidates"}
PEER_TITLES = {"litserve": "LitServe 0.2.19", "bentoml": "BentoML 1.4.40"}


@page("serving", "Serving", "serve", "serve_lookups", "serve_soak")
def serving(result: dict, lookups: dict, soaked: dict) -> Parts:
    """What does a score over HTTP cost, does a new version delay it, and how fast are other servers?"""
    rows = result["rows"]
    full = {r["request"]: r for r in rows if r["clients"] == 16 and "workers" not in r and "peer" not in r}

    def load(row: dict) -> str:
        arriving = f"{row['clients']} client{'s' * (row['clients'] > 1)}"
        if row["rate"]:
            arriving = f"at random times, {row['share']:.0%} of that"
            arriving += ", a version each second" if "versions" in row else ""
            if "due" in row:
                arriving += f", of which {row['answered']} of {row['due']} current for two loads answered"
        times = " | ".join(f"{row[name]:.1f} ms" for name in ("p50_ms", "p99_ms", "p99.9_ms"))
        cells = f"{row.get('workers', 2)} | {arriving} | {row['requests_s']:,.0f} | {times}"
        return f"{REQUESTS[row['request']]} | {cells} | {row['server_cpu_ms']:.2f} ms"

    def peer(row: dict) -> str:
        mine = full[row["request"]]
        cells = "{requests_s:,.0f} requests/s, p99 {p99_ms:.0f} ms, processor {server_cpu_ms:.2f} ms"
        both = f"{cells.format_map(mine)} | {cells.format_map(row)}"
        title = f"{REQUESTS[row['request']]}: {PEER_TITLES[row['peer']]}"
        return f"{title} | {both} | {mine['requests_s'] / row['requests_s']:.1f}x"

    def looked_up(case: tuple[str, bool]) -> str:
        kind, large = case
        ratios = [r["ratio"] for r in lookups["rows"] if (r["row_type"], r["batch"] > 128) == case]
        title = f"{kind}, batches {'of more than' if large else 'up to'} 128"
        return f"{title} | {geometric_mean(ratios):.2f}x, at least {min(ratios):.2f}x"

    soak, grown = soaked["rows"], soaked["floors"][1]["value"]
    wrong = sum(row["wrong_logits"] for row in rows if "peer" not in row)
    crowd = next(row for row in rows if "overload" in row)
    memory = [row["memory_bytes"] / 1e6 for row in soak[10:]]
    yield table(
        "request | workers | requests | a second | p50 | p99 | p99.9 | processor of a request",
        load,
        (row for row in rows if "peer" not in row and "overload" not in row),
    )
    yield table(
        "16 clients, both cores | rowwise | others | rowwise over them", peer, (row for row in rows if "peer" in row)
    )
    yield table(
        "lookups of 26 tables, one thread | TorchRec's quantised tables over rowwise",
        looked_up,
        ((kind, large) for kind in ("int8", "int4") for large in (False, True)),
    )
    yield [
        "A DLRM of 13 numbers and 26 tables of 100,000 rows of dim 64, layers of 512 and 256. Clients are a process on "
        "the same two cores. Latencies of random arrivals count from the arrival, not from the sending.",
        f"Logits with other bits than those of `rowwise predict` for the version that the answer names: {wrong}.",
        "Versions that change are checkpoints of a run, each an increment of the one before; after the last the first "
        "becomes current again.",
        f"Overload: {crowd['overload']:g} times the requests of a context and 100 candidates that a worker answers for "
        f"16 clients, each with 100 ms. It answers {crowd['overload'] * crowd['requests_s'] / crowd['rate']:.0%} of "
        f"what it answers for 16 clients, and refuses others within {crowd['refused_p99_ms']:.0f} ms at p99"
        + (f", for {crowd['refused_cpu_share']:.0%} of its processor time" if "refused_cpu_share" in crowd else "")
        + f". Memory grows by {crowd['memory_growth']:.1%}.",
        f"A soak of {soak[-1]['after_s'] / 60:.0f} minutes beside other work on the machine: "
        f"{sum(row['requests'] for row in soak):,} requests, {soak[-1]['versions']} changes of the version, "
        f"{sum(row['wrong_logits'] for row in soak)} wrong logits. All processes together had {min(memory):,.0f} to "
        f"{max(memory):,.0f} MB; the most of the second half over that of the first: {grown:+.1%}.",
        "Others: plain torch with the same weights, a worker for each core. LitServe puts up to 64 requests into "
        "a batch within 2 ms; BentoML answers each alone. Their logits are within 1e-4.",
        missed(result),
    ]


@page("loadgen", "MLPerf LoadGen", "loadgen")
def loadgen(result: dict) -> Parts:
    """Does MLPerf LoadGen find `rowwise serve` VALID at a p99 of 60 ms, at which rate, and beside plain torch?"""
    rows = by(result["rows"], "scenario")
    systems = {
        "rowwise serve": "`rowwise serve`",
        "plain torch": "plain torch server",
        "in process": "library in process",
    }

    def searched(row: dict) -> str:
        figures = "{target_rate:,.1f} | {achieved_rate:,.1f} | {queries:,} | {p50_ms:.1f} ms | {p99_ms:.1f} ms"
        verdict = row["verdict"] if row["verdict"] == "VALID" else f"{row['verdict']}: {row['reason']}"
        return f"{systems[row['system']]} | {figures.format_map(row)} | {row['client_cpu_ms']:.2f} ms | {verdict}"

    def other(row: dict) -> str:
        p99 = f"{row['p99_ms']:.1f} ms" if row["scenario"] == "single-stream" else "-"
        return f"{systems[row['system']]}, {row['scenario']} | {row['achieved_rate']:,.1f} | {p99} | {row['verdict']}"

    def forecast(row: dict) -> str:
        rate = row.get("fleet_error") or f"{row['fleet_rate']:,.1f}"
        p99 = "-" if row["fleet_p99_ms"] is None else f"{row['fleet_p99_ms']:.1f} ms"
        return f"{row['target_rate']:,.1f} | {rate} | {row['p99_ms']:.1f} ms | {p99} | {row['verdict']}"

    loads, versions = [row["load"] for row in result["rows"]], result["environment"]["versions"]
    differ = {name: max(r["max_difference"] for r in of) for name, of in by(result["rows"], "system").items()}
    yield table(
        "server (Poisson arrivals) | target rate | completed a second | queries | p50 | p99 | client | verdict",
        searched,
        rows["server"],
    )
    yield table("other scenarios | queries a second | p99 | verdict", other, rows["offline"] + rows["single-stream"])
    yield table(
        "rate of LoadGen | largest rate by `rowwise fleet` | p99 of LoadGen | p99 by `rowwise fleet` | verdict",
        forecast,
        (row for row in rows["server"] if "fleet_rate" in row),
    )
    yield [
        "A query is a context of 29 columns and 100 to 700 candidates of 10 columns, in JSON. The model is that of "
        f"[Serving](serving.md). LoadGen {versions['mlcommons-loadgen']} decides when queries arrive, and measures.",
        "The target rate is the largest that was VALID in a search, in turn for each system. Servers have a worker for "
        "each core and share the cores with the client, whose processor time for a query is in the table. In process "
        "that is all of the work, on one thread.",
        "Plain torch is eager torch with the same weights behind uvicorn and Starlette, one request after the other.",
        f"Queries that failed: {sum(row['failed'] for row in result['rows'])}. Largest difference of a logit from the "
        f"library's: {differ['rowwise serve']:.1g} of `rowwise serve`, {differ['plain torch']:.1g} of plain torch.",
        "The forecast is for requests of 400 rows, which repeat the context in each row; it has no p99 where it "
        "wants more than this machine.",
        f"Load average of the machine before each system: {min(loads):.1f} to {max(loads):.1f}.",
        missed(result),
    ]


@page("rows-beyond-memory", "Rows beyond memory", "serve_rows")
def rows_beyond_memory(result: dict) -> Parts:
    """What do served lookups take whose tables are ten times the memory?"""
    rows, of = result["rows"], by(result["rows"], "case")
    looked_up = [row for row in rows if "rows_s" in row]
    yield table(
        "lookups of 26 tables | ids a second | p50 | p99 | rows from the cache, Redis, files",
        "{case} | {rows_s:,.0f} | {p50_ms:.2f} ms | {p99_ms:.2f} ms | {cache:,}, {redis:,}, {files:,}",
        looked_up,
    )
    yield table(
        "rows replaced | AUC with zeros | with the mean row of the table",
        "{share:.0%} | {zeros:.4f} | {mean row:.4f}",
        of["accuracy"],
    )
    yield table(
        "hit rate | AUC, NE with zeros | with mean rows | with means by access",
        "{hit_rate:.0%} | {zero auc:.4f}, {zero ne:.4f} | {plain mean auc:.4f}, {plain mean ne:.4f} | "
        "{mean auc:.4f}, {mean ne:.4f}",
        of["default rows"],
    )
    yield table(
        "one worker, rows of a request | requests a second | p50, forecast | p99, forecast",
        "{rows} | {rate:,.0f} | {p50_ms:.1f} ms, {forecast_p50_ms:.1f} ms | {p99_ms:.1f} ms, {forecast_p99_ms:.1f} ms",
        of["fleet"],
    )
    hits, faults = of["hit rate"][0], of["faults"][0]
    wrong = sum(row["wrong"] for row in looked_up if "hit rate" not in row["case"])
    yield [
        "26 tables of 40,000 rows of 256 bytes behind a cache of a tenth of their bytes, in one thread. Batches of 32 "
        "samples with one id a table, by Zipf's law with exponent 1.05. Files are in the system's page cache.",
        f"Vectors with other bits than those of tables in memory: {wrong}. Hit rate of the warm cache "
        f"{hits['found']:.4f}, of the simulator for the same ids {hits['simulated']:.4f}.",
        f"Redis was killed {faults['kill']} times, emptied {faults['flush']} times and stopped {faults['stop']} times "
        f"under a server whose versions changed {faults['versions']} times: {faults['answers']:,} answers, "
        f"{faults['wrong']} wrong logits.",
        "AUC is that of a small DLRM on rows of a known model. Rows are replaced at random, popular ones as well.",
        missed(result),
    ]


WORLDS = {"movielens": "MovieLens-100k", "complete-journey": "Complete Journey", "digits": "digits, ten labels"}


@page("noisy-labels", "Noisy labels", "noise")
def noisy_labels(result: dict) -> Parts:
    """How much do losses for noisy labels save, when labels are wrong?"""
    shares = sorted(by(result["rows"], "wrong"))
    for world, rows in by(result["rows"], "world").items():
        metric = "accuracy" if world == "digits" else "AUC"

        def cells(found: tuple[str, list[dict]], field: str = metric.lower()) -> str:
            of_share = by(found[1], "wrong")
            means = (f"{mean(of_share[share], field):.4f}" if share in of_share else "not run" for share in shares)
            return " | ".join([found[0], *means])

        titles = " | ".join(f"{share:.0%} wrong" for share in shares)
        yield table(f"{WORLDS[world]}: {metric} at the end | {titles}", cells, by(rows, "loss").items())
    losses, rows = by(result["rows"], "loss"), result["rows"]
    for loss, base in NOISE_PAIRS:
        if loss in losses and base in losses:
            titles = " | ".join(f"{share:.0%} wrong" for share in shares)
            head = f"gain of {loss} on {base}, of the same seed | {titles}"
            yield table(head, partial(_gains, (loss, base), shares), by(rows, "world").items())
    yield [
        f"Means over {_seeds(rows)}, after the last epoch and without early stopping; test labels are right. In "
        "brackets: the range over seeds.",
        *(LITTLE_OF_GCE if "gce" in losses else ()),
        *("{name}: {value:+.4f}.".format_map(floor) for floor in result["floors"]),
        *(() if "augmented" in losses else ("smc was that of versions whose second pass had the current parameters.",)),
    ]


NOISE_PAIRS = (("smc", "log loss"), ("augmented, smc", "augmented"))
LITTLE_OF_GCE = (
    "gce does not learn ten labels that are predicted apart: with nine of ten right, all near 0 costs little.",
)


def _seeds(rows: list[dict]) -> str:
    """The number of seeds, such as "1 to 3 seeds"."""
    counts = {
        len(of_loss)
        for cell in by(rows, "world").values()
        for of_share in by(cell, "wrong").values()
        for of_loss in by(of_share, "loss").values()
    }
    least, most = min(counts), max(counts)
    return f"{most} seeds" if least == most else f"{least} to {most} seeds"


def _gains(pair: tuple[str, str], shares: list[float], of_world: tuple[str, list[dict]]) -> str:
    """What the first loss of a pair gains on the second with the same data and seed, by share of wrong labels."""
    world, rows = of_world
    cells, metric = [WORLDS[world]], "accuracy" if world == "digits" else "auc"
    for share in shares:
        of_share = [row for row in rows if row["wrong"] == share]
        first, second = ({row["seed"]: row[metric] for row in of_share if row["loss"] == loss} for loss in pair)
        gains = [first[seed] - second[seed] for seed in first.keys() & second.keys()]
        between = f" ({min(gains):+.4f} to {max(gains):+.4f}, {len(gains)} seeds)" if len(gains) > 1 else ""
        cells.append(f"{fmean(gains):+.4f}{between}" if gains else "not run")
    return " | ".join(cells)


@page("retrieval", "Retrieval", "retrieval")
def retrieval(result: dict) -> Parts:
    """How fast are the best items of two towers found, and how many of them does an index find?"""
    of = by(result["rows"], "section")

    def searched(row: dict) -> str:
        how = f"{row['probes']} of {row['lists']:,} lists" if "probes" in row else "exact"
        times = " | ".join(f"{row[name]:.2f} ms" for name in ("p50_ms", "p99_ms", "processor_ms"))
        return f"{row['items']:,} vectors, {how} | {row.get('recall', 1):.4f} | {times}"

    def asked(row: dict) -> str:
        what = f"{row['items']:,} {'films' if row['section'] == 'movielens' else 'items'}"
        times = " | ".join(f"{row[name]:.1f} ms" for name in ("p50_ms", "p99_ms", "server_cpu_ms"))
        how = "exact" if row["exact"] else "index"
        return f"{what} | {how} | {row['clients']} | {row['requests_s']:,.0f} | {times}"

    near, served = of["vectors"][0], of["served"][0]
    wrong = sum(row.get("wrong_answers", 0) + row.get("wrong_scores", 0) for row in result["rows"])
    yield table("search, one thread | recall@100 | p50 | p99 | processor", searched, of["vectors"])
    yield table(
        "server, 2 workers | search | clients | requests a second | p50 | p99 | processor of a request",
        asked,
        (row for row in result["rows"] if row["section"] != "vectors"),
    )
    yield [
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
        missed(result),
    ]


PRODUCT_FACTS = (
    "The exact product copies the vectors to huge pages first, as rows that are read at random from pages of 4 kB miss "
    "the translation cache. Reads is the product without sums: the row of each edge's source is read, from such pages.",
    "PyG is PyTorch Geometric: its spmm is that of torch.sparse, and along edges it writes a message of 64 numbers for "
    "each.",
    "DGL is not compared: its newest package on PyPI, 2.1.0, has libraries for torch 2.0 to 2.2. Neither is "
    "torch_sparse, which has no wheel; PyTorch Geometric 2.8 multiplies its matrices by torch.sparse on CPUs.",
)

GRAPH_FACTS = (
    "A power-law graph of 1 million nodes and 20 million edges, 64 numbers a node; medians of runs that alternate.",
)
SAMPLED_FACTS = (
    "The kernel chooses edges while it reads, and no sampled graph is in memory.",
    "A backward reads the edges by source; of a sampled graph these are listed once, before the first backward.",
)


@page("graph-towers", "Graph towers", "graphs")
def graph_towers(result: dict) -> Parts:
    """How fast are sums over neighbours, and what do sampled edges cost in recall?"""
    of = by(result["rows"], "section")
    timed, learned = of["speed"], by(of["quality"], "way", "most")
    seconds = {row["way"]: row["seconds"] for row in timed}
    metrics = ("ndcg@10", "recall@10", "precision@10", "recall@20")

    def product(row: dict) -> str:
        ratios = " | ".join(f"{seconds[way] / row['seconds']:.1f}" for way in ("torch.sparse", "exact"))
        return f"{row['way']} | {row['edges']:,} | {row['seconds']:.3f} | {ratios}"

    def quality(found: tuple[tuple, list[dict]]) -> str:
        (way, most), rows = found
        name = "all" if most is None else f"{most}, {way}"
        means = " | ".join(f"{mean(rows, metric):.4f}" for metric in metrics)
        kept_weights = learned.get((f"{way}, as they are", most))
        as_they_are = f"{mean(kept_weights, 'ndcg@10'):.4f}" if kept_weights else ""
        return f"{name} | {mean(rows, 'kept'):.0%} | {means} | {as_they_are}"

    if timed:
        yield table("product | edges | seconds | times the speed of torch.sparse | of exact", product, timed)
    grown = ((key, rows) for key, rows in learned.items() if not key[0].endswith(", as they are"))
    head = f"LightGCN, edges into a node | kept | {' | '.join(metrics)} | ndcg@10, weights as they are"
    yield table(head, quality, grown)
    yield [
        *(GRAPH_FACTS if timed else ("Products were not timed on this processor.",)),
        *(PRODUCT_FACTS if "reads" in seconds else ()),
        *(SAMPLED_FACTS if ("stride", 8) in learned else ()),
        "LightGCN on MovieLens-100k in the protocol of the benchmark of Recommenders, whose table has an NDCG@10 of "
        f".4198 and a recall@10 of .1443; means over {len(by(of['quality'], 'seed'))} seeds. One model is "
        "trained on all edges, and evaluated on sampled ones.",
    ]


CALIBRATION_HEAD = (
    "scenes, pixels | calibrated SSIM | accuracy, SSIM .95 | calibrated | whole files | bytes, SSIM .95 | calibrated | "
    "whole files"
)
CALIBRATION_FACTS = (
    "SSIM is calibrated on scenes that are neither trained on nor tested: at the least SSIM of a size the backbone is "
    "as accurate as on whole files, less .05 points. A mixture draws one of two sizes and reads as many bytes.",
)


@page("pictures", "Pictures", "images")
def pictures(result: dict) -> Parts:
    """What do pictures cost at the size that each is worth?"""
    of = by(result["rows"], "part")

    def photographs(found: tuple[int, list[dict]]) -> str:
        size, rows = found
        first, second = (next(row for row in rows if row["ssim"] == wanted) for wanted in (0.95, 0.98))
        shares = f"{first['share']:.0%} | {second['share']:.0%}"
        return f"{size} pixels | {shares} | {first['prefix_ms']:.2f} ms | {first['whole_ms']:.2f} ms"

    def scenes(kind: tuple[str, list[dict]]) -> str:
        means = {name: mean(kind[1], name) for name in ("accuracy", "products", "bytes")}
        mixed = f"{mean(kind[1], 'mixture'):.3f}" if "mixture" in kind[1][0] else ""
        return f"{kind[0]} | {means['accuracy']:.3f} | {means['products'] / 1e6:.2f} | {means['bytes']:,.0f} | {mixed}"

    def calibration(at_size: tuple[int, list[dict]]) -> str:
        size, rows = at_size
        names = ("before", "after", "whole")
        cells = [f"{mean(rows, f'accuracy_{name}'):.3f}" for name in names]
        cells += [f"{mean(rows, f'bytes_{name}'):,.0f}" for name in names]
        return f"{size} | {mean(rows, 'ssim'):.3f} | {' | '.join(cells)}"

    policies = by((row for row in of["scenes"] if not row.get("chosen")), "policy")
    kinds = {policy: rows for policy, rows in policies.items() if policy.isdecimal()}
    kinds["most probable"] = policies["dynamic, price 0.00"]
    kinds["chosen price"] = [row for row in of["scenes"] if row.get("chosen")]
    yield table(
        "photographs | of the bytes, SSIM .95 | SSIM .98 | decoding | of whole files",
        photographs,
        by(of["photographs"], "size").items(),
    )
    yield table("scenes, pixels | accuracy | million products | bytes | mixture's accuracy", scenes, kinds.items())
    if "calibration" in of:
        yield table(CALIBRATION_HEAD, calibration, by(of["calibration"], "size").items())
    yield [
        "Photographs: 16 squares of 160 pixels; shares are means over files.",
        "Scenes of 128 pixels: a digit of 16 to 100 pixels on a noisy ground; "
        f"{len(by(of['scenes'], 'seed'))} seeds. A backbone is trained at all sizes, and tested on digits that "
        "it has not seen. Bytes are those of the prefixes; products include the scale model's.",
        *(CALIBRATION_FACTS if "calibration" in of else ()),
        missed(result),
    ]


@page("plan-invariance", "Does the result depend on the plan?", "shard_step")
def plan_invariance(result: dict) -> Parts:
    """How far do weights end from those of a run on one process, by plan?"""
    found: dict[str, dict[str, float]] = {}
    for row in result["rows"]:
        if row["kind"] == "plans":
            plan = "replicated" if row["layout"] == "data-parallel" else row["layout"]
            plan += "" if row["wire"] == "fp32" else f", {row['wire']} wire"
            side = row["side"] if row["determinism"] == "run" else "elastic"
            cells = found.setdefault(plan, {})
            cells[side] = max(cells.get(side, 0.0), row["difference"])

    def cells_of(plan: str) -> str:
        cells = found[plan]
        return " | ".join(
            [plan, *(f"{cells[s]:.2g}" if s in cells else "-" for s in ("TorchRec", "rowwise", "elastic"))]
        )

    yield table("plan | TorchRec | rowwise | rowwise, elastic", cells_of, found)
    yield [
        "Cells: largest absolute difference of a weight to a run on one process, after the same 20 steps. Weights "
        "moved by up to about 1.4. `-`: not measured, or refused.",
        "Runs: 2 processes, and 4 threads as 2 simulated hosts. TorchRec 1.8.0.",
    ]


@page("published-steps", "Published step times", "simulate")
def published_steps(result: dict) -> Parts:
    """Does `rowwise simulate` give the rates that were published for models on machines that are not here?"""
    rows = by(result["rows"], "section")
    by_model = by(rows["described"], "model", "task")
    kinds = list(dict.fromkeys(row["dense"] for row in rows["described"]))

    def described(key: tuple[str, str]) -> str:
        cells = [f"{row['simulated']:.3f} ({row['printed']:.3f})" for row in by_model[key]]
        return " | ".join([*key, *cells])

    ours = {row["model"]: row for row in rows["ours"]}
    counted = [key for key in next(iter(ours.values())) if key not in ("section", "model")]
    named = {"measured": "measured on 128 GPUs (arXiv 2104.05158)", "ours": "`rowwise simulate`"}

    def rung(what: str) -> str:
        return " | ".join(
            [named.get(what, what), *(f"{row[what]:.3g}" if what in row else "" for row in ours.values())]
        )

    yield table(f"model | task | {' | '.join(kinds)}", described, by_model)
    yield table(f"million samples/s | {' | '.join(ours)}", rung, counted)
    moe = {task: {row["dense"]: row["simulated"] for row in by_model["dlrm-a-moe", task]} for _, task in by_model}
    gains = {task: max(rates.values()) / rates["full"] for task, rates in moe.items()}
    yield [
        "First table: million samples/s on 16 hosts of 8 GPUs, counted as arXiv 2310.02784 (MAD-Max) describes a step; "
        "in brackets what the public code of that paper prints. `rowwise simulate dlrm-a --vary counts=published "
        "--vary dense=replicated,full,tp:hosts --vary task=training,inference`. Memory is not limited there.",
        "Second table: from our step to that of the description; each line includes those above it. `rowwise simulate "
        "dlrm-a` prints it.",
        f"Best over fully sharded: {gains['training']:.2f}x in training and {gains['inference']:.2f}x in inference, of "
        "dlrm-a-moe. The paper's abstract has up to 2.24x and 5.2x.",
        "dlrm-a is far below the measured rate by our bytes. 4,096 pooled vectors of 94 numbers in 16 bits take 53 ms "
        "between hosts, each way, and the measured step takes 55 ms. Missing input: the number of tables of that "
        "model. Its parameters are published; the number is a round figure of the description.",
        "dlrm-i: by pooled vectors, without ids, the optimizer and latencies, the rate is the measured one. The "
        "difference to our step are ids on the same links, and what tables move beside rows.",
        "dlrm-f does not fit GPU memory, and most of its rows are in host memory. Missing inputs: the share of lookups "
        "that GPU memory serves, and the rate of the link to the host. The public code has no limits of memory.",
        "Not reproduced: 14 to 32 % of GPU hours in communication that nothing hides. It is measured over a fleet "
        "whose mix of jobs is not published.",
        "`tp:8` differs from the public code, which sums gradients of whole layers between hosts, and counts the bytes "
        "of a sum inside a host once: 1.20 against 1.03 for dlrm-a. Pipelines (`pp`) have no published rate.",
        missed(result),
    ]


@page("planning", "Planning", "planner")
def planning(result: dict) -> Parts:
    """How good are plans beside published methods, and beside a lower bound?"""
    of = by(result["rows"], "suite")
    suites = {suite: title for suite, title in (("ns4", "4 devices"), ("ns8", "8 devices")) if suite in of}
    published = ("neuroshard", "dreamshard", "neuroshard-grid", "ldm", "size-lookup", "lookup", "dim", "size", "random")
    others = [name for name in published if any(name in result["baselines"][suite] for suite in suites)]

    def method(name: str) -> str:
        cells = []
        for suite in suites:
            rows = of[suite]
            if name == "rowwise":
                cells.append(f"{sum(r['fits'] for r in rows)}/{len(rows)}, 1.000, {mean(rows, 'took_s'):.2f}")
                continue
            found = result["baselines"][suite][name]
            over = f"{found['over_ours']:.3f}" if "over_ours" in found else "-"
            cells.append(f"{found['fit']}/{found['tasks']}, {over}, {found['mean_s']:.2f}")
        return " | ".join([name, *cells])

    facts = []
    if suites:
        yield table(
            "method | " + " | ".join(f"{title}: fits, cost, seconds" for title in suites.values()),
            method,
            ("rowwise", *others),
        )
        facts.append(
            "Methods: tasks of NeuroShard's protocol, all under one cost model. Cost: geometric mean relative to "
            "rowwise, over the tasks for which the method found a plan that fits."
        )
    if "dreamshard" in others:
        facts.append(
            "NeuroShard and DreamShard cut columns. Half of the tables are among those that DreamShard's policy was "
            "trained on."
        )
    bounded = [
        r
        for r in result["rows"]
        if r["suite"] in ("pool", "lists", "giant", "wide") and not r["task"].endswith("short")
    ]
    if bounded:
        yield table(
            "task | above the bound | seconds",
            "{task} | {above:.2%} | {took_s:.1f}",
            ({**row, "above": row["cost_s"] / row["bound_s"] - 1} for row in bounded),
        )
        facts += [
            "Above the bound: cost of the plan over a lower bound that no plan can beat.",
            "`856x16 70 %`: 856 synthetic tables after published statistics, which fill 70 % of the memory of 16 "
            "devices. Other names are published lists of tables, with all layouts allowed.",
            "12 T parameters: with host memory. Where a row names its devices, its plan got 20 seconds. A row without "
            "devices is of an earlier version, on 128. Rows on the host of several GPUs never ran.",
        ]
    yield facts


@page("learned-costs", "Learned costs", "calibrate")
def learned_costs(result: dict) -> Parts:
    """How well do learned costs predict measured ones?"""
    of = by(result["rows"], "section")
    (sets,), chosen = of["sets"], of["chosen"]
    counts = by(of["dreamshard"], "tables", "devices")

    def method(found: tuple[str, list[dict]]) -> str:
        cells, at = [found[0]], by(found[1], "tables", "devices")
        for row, *_ in (at[count] for count in counts):
            over = row["over_search"]
            cells.append(f"{'-' if over is None else f'{over:.3f}'}, {row['fit']}/{row['tasks']}")
        return " | ".join(cells)

    off = sorted(row["off"] for row in chosen)[len(chosen) // 2]
    titles = " | ".join(f"{tables} tables, {devices} devices" for tables, devices in counts)
    yield table(
        "predicted by | error | with drift | rank correlation",
        "{model} | {error:.1%} | {raw_error:.1%} | {tau:.3f}",
        sets["errors"],
    )
    yield table(f"method | {titles}", method, by(of["dreamshard"], "method").items())
    yield [
        f"First table: {sets['sets']:,} sets of 1 to 15 tables, measured in ten minutes on two ranks. Errors are on "
        f"{sets['held_out']:,} sets that were not used to fit.",
        f"Noise floor: a perfect prediction would be {sets['noise']:.1%} off, or {sets['raw_noise']:.1%} with the "
        "drift of this shared machine's speed.",
        f"{len(chosen)} plans that the search chose by these costs were run on two processes. Their times were "
        f"predicted to within {off:.0%} (median).",
        "Second table: cost relative to the search of rowwise, and number of tasks for which the method found a plan "
        "that fits. Tables are not cut. The DreamShard policy that ships never saw these tables.",
    ]


@page("checkpoints", "Checkpoints", "checkpoint", "checkpoint_delta")
def checkpoints(files: dict, less: dict) -> Parts:
    """How fast are checkpoints beside plain copies, and what do incremental ones save?"""
    seconds = {r["name"]: r["median_s"] for r in files["rows"]}
    size_gb = files["rows"][0]["bytes"] / 1e9

    def beside_copy(pair: tuple[str, str]) -> str:
        ours, theirs = (size_gb / seconds[name] for name in pair)
        return f"{pair[0]} | {ours:.1f} GB/s | {theirs:.1f} GB/s | {ours / theirs:.2f}x"

    def of_traffic(found: tuple[int, list[dict]]) -> str:
        way = {row["way"]: row for row in found[1]}
        cells = [f"{way[name]['less']:.1f}x" for name in ("incremental", "incremental, 8 bits", "incremental, 4 bits")]
        return f"{found[0]:,} | {way['full']['touched']:.0%} | {' | '.join(cells)}"

    written = (r for r in less["rows"] if r["kind"] == "bytes" and r["optimizer"] == "row-wise adagrad")
    yield table(
        "what | rowwise | a plain copy | ratio",
        beside_copy,
        (("write", "copy"), ("write, no fsync", "copy, no fsync"), ("read", "copy to read")),
    )
    yield table(
        "ten checkpoints, samples between them | rows touched | exact | 8 bits | 4 bits",
        of_traffic,
        by(written, "samples").items(),
    )
    yield [
        f"First table: {size_gb:.1f} GB. rowwise computes checksums, the copy does not.",
        f"A save in the background blocks training for {seconds['blocked'] / seconds['whole save']:.0%} of the time of "
        "a whole save, once its memory is allocated.",
        "Second table: bytes of ten full checkpoints over bytes of ten incremental ones. Ids follow a Zipf law with "
        "exponent 1.05.",
        "Runs that resumed from 8 or 4 bits reached the same NE within the noise of seeds.",
    ]


@page("tables-on-disk", "Tables on disk", "tiers")
def tables_on_disk(result: dict) -> Parts:
    """How fast do tables train that are larger than memory?"""
    of = by(result["rows"], "section")
    (step,) = of["step"]
    speeds = {
        "tables on disk": step["samples_s"],
        "tables in memory": step["memory_samples_s"],
        "the disk's random reads alone": step["limit_samples_s"],
    }
    stored_gb = step["tables"] * step["rows"] * 4 * (step["dim"] + 1) / 1e9
    yield table("step | samples/s", lambda one: f"{one[0]} | {one[1]:,.0f}", speeds.items())
    yield table(
        "rows on disk | lookup and update | making room | ratio",
        "{side} | {rows_ms:.0f} ms | {end_ms:.0f} ms | {times:.1f}x",
        of["peers"],
    )
    yield table(
        "policy | batch | hit rate | simulated",
        "{policy} | {batch:,} | {live:.3f} | {simulated:.3f}",
        ({**row, "policy": row["policy"].upper()} for row in of["policy"]),
    )
    yield [
        f"{step['tables']} tables of dim {step['dim']}, {stored_gb:.0f} GB of rows and row-wise Adagrad's state, "
        f"{step['budget_bytes'] / 1e9:.1f} GB of memory for them; batch {step['batch']:,}, one Zipf(1.05) id a "
        f"feature, {step['threads']} threads.",
        f"First table: DLRM steps. {step['hit_rate']:.1%} of lookups hit; a step misses {step['misses']:,.0f} rows, "
        f"and the disk does {step['reads_s']:,.0f} random reads of 4 KiB a second. Reads and writes are direct.",
        "Second table: the same ids without dense layers, and without reading ahead. Memory-mapped files "
        "(nn.EmbeddingBag) and RocksDB have as much memory. Making room is writing and dropping pages that do not fit.",
        "Third table: 1 % of 100,000 rows cached, in sets of 32.",
    ]


@page("pinned-rows", "Pinned rows", "pinned")
def pinned_rows(result: dict) -> Parts:
    """When do pinned rows beat a cache of the same memory, and what does RecShard's method read from slow memory?"""
    of = by(result["rows"], "section")
    yield table(
        "Zipf exponent | rows with a slot | rows whose rank changes | LRU | LFU | pinned",
        "{skew} | {cached:.0%} | {drift:.0%} | {lru:.3f} | {lfu:.3f} | {pinned:.3f}",
        of["hits"],
    )
    yield table(
        "ids | policy | hit rate | processor time of an id | blocks read a step | rows written a step",
        "{kind} | {policy} | {hit_rate:.3f} | {cpu_ns:.0f} ns | {reads:,.0f} | {writes:,.0f}",
        of["rows"],
    )
    yield table(
        "tables | devices | their memory | cuts | lookups below them | slowest device | over the mean device",
        "{tables} | {devices} | {fill:.0%} of the bytes | {cuts} | {slow:.1%} | {ms:.2f} ms | {balance:.2f}x",
        (
            row | {"cuts": words} | {name: row[f"{kind}_{name}"] for name in ("slow", "ms", "balance")}
            for row in of["plan"]
            for kind, words in (("split", "hot rows"), ("whole", "whole tables"))
        ),
    )
    ratios, rows = [row["ratio"] for row in of["program"]], of["rows"][0]
    yield [
        "First table: hit rates of the cache of a table of 100,000 rows on disk, in batches of 512. Rows are pinned by "
        "half a million accesses; half a million later ones are counted. With a drift, a share of all rows take each "
        "other's ranks while they are counted: a cache then follows, and pinned rows do not.",
        f"Second table: slots for a lookup and its update, {rows['rows']:,} rows of 256 bytes, {rows['cached']:,} "
        "slots, batches of 4,096 ids by Zipf's law with exponent 1.05. Processor time includes that of reading and "
        "writing, and no time in which a step waits for the disk.",
        "Third table: RecShard's method by the cost model of devices like an A100 with rows in host memory, with cuts "
        "of tables and without. Lookups follow each table's law. Nothing of it ran on GPUs.",
        f"The method's slowest device takes {fmean(ratios):.3f} times the seconds of the published program's optimum "
        f"on average, {max(ratios):.3f} times at most, on {len(ratios)} tasks of nine tables and two devices.",
        missed(result),
    ]


@page("ingestion", "Reading data", "ingest")
def ingestion(result: dict) -> Parts:
    """How fast do files become tensors, beside decoding alone and beside other libraries?"""
    of = by(result["rows"], "section")
    zstd = {row["way"]: row for row in of["worker"] if "of_decode" in row and row["file"] == "zstd"}

    def way(row: dict) -> str:
        over = "" if row["way"].startswith("rowwise") else f"{zstd['rowwise']['rows_s'] / row['rows_s']:.1f}x"
        return f"{row['way']} | {row['rows_s']:,.0f} | {row['of_decode']:.0%} | {over}"

    kernels = [f"{r['kernel']} {r['million_s']:,.0f}" for r in of["kernels"] if r["side"] == "rowwise"]
    slots, few, many = (r["gb_cpu_s"] for r in of["handoff"])
    store, scaling = of["store"][0], of["scaling"][0]
    disk = ", ".join(f"{one['step']} {one['speed']:.2f}" for one in store["disk"][1:])
    less = store["cpu_s"]["map"] / store["cpu_s"]["large groups"]
    left_out = ("decode only", "columns", "transforms")
    yield table(
        "from Parquet to tensors, one core | rows/s | of decoding alone | ours over it",
        way,
        (row for row in zstd.values() if not any(what in row["way"] for what in left_out)),
    )
    yield [
        "Work: 13 numbers filled, clamped and log1p; 26 ids and the first 20 ids of 4 lists hashed; a label. All "
        "libraries do the same work on one thread. Rows are per second of processor time.",
        f"Kernels, million elements a second: {', '.join(kernels)}.",
        f"A batch of 5.9 MB to another process: {slots:.1f} GB per second of processor time. That is "
        f"{slots / few:.1f} times torch's queue with 3 tensors, and {slots / many:.0f} times with 60.",
        f"Reading a tenth of 500 features takes {less:.0f}x less processor time from one column a feature than from a "
        f"map column. On a disk with 8 ms and 150 MB/s, speed relative to the map: {disk}.",
        f"Autoscaling: a trainer that needs three workers gets {scaling['workers']}, and waits for data "
        f"{scaling['waits']:.1%} of the time.",
    ]


SETS = {"frappe": "Frappe", "movielens": "MovieLens-100k", "adult": "adult", "reviews": "women's clothing reviews",
        "flights": "nycflights13"}  # fmt: skip
MODELS = {
    ("rowwise", "starter"): "starter recipe", ("rowwise", "ensemble"): "three seeds", ("LightGBM", "trees"): "trees",
    ("FuxiCTR, npz", "defaults"): "DeepFM, its template", ("RecBole", "defaults"): "DeepFM, its defaults",
}  # fmt: skip


@page("first-hour", "The first hour", "first_hour")
def first_hour(result: dict) -> Parts:
    """What does a newcomer get from rowwise, FuxiCTR, RecBole and LightGBM on the same small rows?"""
    of = by(result["rows"], "section")
    lines = []
    for name, rows in sorted(by(of["quality"], "set").items(), key=lambda one: list(SETS).index(one[0])):
        groups = sorted(by(rows, "side", "model").items(), key=lambda group: -mean(group[1], "auc"))
        best = mean(groups[0][1], "auc")
        for (side, model), mine in groups:
            auc = with_spread([row["auc"] for row in mine])
            auc = f"**{auc}**" if mean(mine, "auc") == best else auc
            disk = f"{mean(mine, 'disk_bytes') / 1e6:.1f}" if "disk_bytes" in mine[0] else ""
            what = MODELS.get((side, model), f"{'DeepFM' if model == 'deepfm' else 'DCN-v2'}, sizes of the starter")
            loss = with_spread([row["log_loss"] for row in mine])
            cells = [SETS[name], side.partition(",")[0], what, auc, loss, f"{mean(mine, 'seconds'):.0f}", disk]
            lines.append(" | ".join(cells))
    effort = ["{side} {commands} commands, {files} files of {lines} lines".format_map(row) for row in of["effort"]]
    yield table("data | side | model | test AUC | log loss | seconds | MB on disk", str, lines)
    yield [
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
        missed(result, "{name} is {value:+.4f}"),
    ]


@page("compression", "Compressed tables", "compress")
def compression(result: dict) -> Parts:
    """What does it cost in quality to let ids share rows, byte for byte?"""
    of = result["rows"]
    (full, *rows), scale, advice = of["quality"], of["scale"], of["advice"]
    ratios = by(rows, "ratio")
    films, half = ({row["method"]: fmean(row["auc"]) for row in of[name]} for name in ("films", "half"))

    def method(found: tuple[str, list[dict]]) -> str:
        cells, at = [found[0]], by(found[1], "ratio")
        for (row,) in (at.get(ratio, [None]) for ratio in ratios):
            if row is None:
                cells.append("cannot be that small")
                continue
            size = f"{row['bytes'] / 1e6:.2f} MB ({row['map_bytes'] / 1e6:.2f})"
            cells.append(f"{with_spread(row['auc'])}, {fmean(row['ne']):.4f}, {size}, {row['build_s']:.1f} s")
        return " | ".join(cells)

    chosen = ", ".join(f"{name} by {one['method'] or 'rows of their own'}" for name, one in advice["tables"].items())
    head = " | ".join(f"1/{ratio:g}: AUC, NE, bytes (maps), built in" for ratio in ratios)
    yield table(f"method | {head}", method, by(rows, "method").items())
    yield [
        f"Data: sales in stores, ids numbered at random, {len(full['auc'])} seeds. Full tables reach AUC "
        f"{with_spread(full['auc'])} and NE {fmean(full['ne']):.4f} in {full['bytes'] / 1e6:.1f} MB. ± is half the "
        "range over seeds.",
        "Bytes are those of all tables, id maps included. Small tables that quotient-remainder cannot shrink that far "
        "keep their size.",
        f"`rowwise compress` with one budget of 1/{advice['ratio']:g} for all tables, which never sees test rows, "
        f"chooses {chosen}: AUC {fmean(advice['auc']):.4f} in {advice['bytes'] / 1e6:.2f} MB.",
        f"Age of a map, at 1/100, trained on the second half of the weeks: AUC {half['full']:.4f} with full tables, "
        f"{half['learned, second half']:.4f} with a map learned from that half, {half['learned, first half']:.4f} "
        f"with one learned from the first half, {half['hash']:.4f} with a hash.",
        "MovieLens-100k, users and films in 1/8: AUC {full:.4f} with full tables, {hash:.4f} hash, {mixed:.4f} mixed, "
        "{learned:.4f} learned.".format_map(films),
        f"A map of {scale['ids'] / 1e6:g} million ids into {scale['rows']:,} rows takes {scale['wall_s']:.0f} s and "
        f"{scale['peak_gb']:.1f} GB to build.",
    ]


@page("managed", "Managed tables", "managed")
def managed_tables(result: dict) -> Parts:
    """What does a fixed number of rows cost where ids never stop coming?"""

    def cells(row: dict) -> str:
        changes = f"{row['admitted']:,} | {row['evicted'] + row['expired']:,}" if "evicted" in row else " | "
        growth = f"{row['memory_growth_bytes'] / row['memory_quarter_bytes']:.1%}"
        return f"{row['table']} | {row['rows']:,} | {row['auc']:.4f} | {changes} | {row['step_ms']:.1f} ms | {growth}"

    moved = result["rows"][-1]
    head = "table | rows | AUC | admitted | evicted, expired | a step | memory grown since a quarter"
    yield table(head, cells, (row for row in result["rows"] if "auc" in row))
    yield [
        f"{result['distinct']:,} distinct ids, of a Zipf distribution whose head moves; batches of 8,192 samples.",
        "Each sample is scored before it is trained on; AUC is that of the second half.",
        f"Four ranks, then three: {moved['differ']} of {moved['tensors']} tensors differ from those of one rank.",
    ]


@page("gpu", "Kernels for GPUs", "gpu", "gpu_static", any_of_them=True)
def gpu(result: dict) -> Parts:
    """How fast are the kernels for GPUs, what do they compile to, and how many bytes do they move?"""
    of = by(result["rows"], "section")
    kinds = {"grid": gpu_times, "cached": gpu_cache, "code": gpu_code}
    for name, parts in kinds.items():
        if name in of:
            yield from parts(result, of)


def gpu_times(result: dict, of: dict[str, list[dict]]) -> Parts:
    (machine,) = of["machine"]

    def cells(row: dict) -> str:
        ours_ms = row["lookup_ms"] + row["update_ms"]
        shares = [f"{row[f'{name}_ms']:.3f} ms | {row[f'{name}_share']:.0%}" for name in ("lookup", "update")]
        over = [f"{row[f'fbgemm_{mode}ms'] / ours_ms:.2f}x" for mode in ("", "unchecked_")]
        return " | ".join(["{dim} | {batch:,} | {pooling}, {ids}".format_map(row), *shares, *over])

    def beside_torch(row: dict) -> str:
        over = row["torch_ms"] / (row["lookup_ms"] + row["update_ms"])
        return f"{OPTIMIZERS[row['optimizer']]} | {row['batch']:,} | {row['pooling']} | {over:.1f}x"

    def steps(row: dict) -> str:
        kernels_ms = sum(ms for name, ms in row["kernels_ms"].items() if "Memcpy HtoD" not in name)
        what = "dim {dim}, batch {batch:,}, dense products in {precision} | {samples_s:,.0f} | {step_ms:.1f} ms"
        return f"{what.format_map(row)} | {kernels_ms:.1f} ms"

    host_ms = [row["update_host_ms"] for row in of["grid"]]
    runs, differ = (sum(row[key] for row in of["bits"]) for key in ("runs", "differ"))
    last = of["train"][-1]
    sides = "lookup | share of copy speed | update | share | FBGEMM over rowwise, both | without its checks of ids"
    yield table(f"dim | batch | ids | {sides}", cells, of["grid"])
    yield table("torch's EmbeddingBag and | batch | ids | torch over rowwise", beside_torch, of["torch"])
    yield table("DLRM | samples/s | step | kernels of a step", steps, of["train"])
    yield [
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
        f"takes {last['resident_ms']:.1f} ms: the host, which launches a step in {last['host_ms']:.1f} ms, holds the "
        "GPU up.",
        missed(result),
    ]


def gpu_cache(result: dict, of: dict[str, list[dict]]) -> Parts:
    """Tables in host memory, of which a GPU caches rows."""
    (machine,), rows = of["machine"], of["cached"]

    def cells(row: dict) -> str:
        moved = f"{row['moved_bytes'] / 1e6:,.0f} MB | {row['bus_share']:.0%}" if row["cached"] < 1 else "0 | "
        found = f"{row['hit_rate']:.0%}" if row["cached"] < 1 else "all"
        return f"{row['cached']:.0%} | {row['ids']} | {found} | {row['step_ms']:.1f} ms | {moved}"

    head = "rows on the GPU | ids | found there | step | over the bus | of its speed"
    yield table(head, cells, rows)
    yield [
        f"{machine['device']}; 26 tables, {rows[0]['rows']:,} rows of {rows[0]['dim']} numbers in fp32, row-wise "
        f"Adagrad; batches of {rows[0]['batch']:,} samples, one id for each table. A step is a lookup and its update, "
        "without dense layers; wall time of 24 steps over as many batches, each of which was met once before.",
        "Over the bus: rows and their optimizer state that a step reads from host memory and writes back, without what "
        "rows behind the sets write. Of its speed: of "
        f"{machine['from_host_Bps'] / 1e9:.0f} GB/s, which a copy from pinned memory reaches in one direction; reads "
        "and writes come one after the other.",
        f"Tables with other bits than without a cache: {sum(row['differ'] for row in rows)}.",
    ]


def gpu_code(result: dict, of: dict[str, list[dict]]) -> Parts:
    """Of machine code and of the interpreter: nothing of it is a time."""

    def most_registers(row: dict) -> int:
        return max(n for kernel, n in row["registers"].items() if kernel.startswith("apply"))

    traffic = {
        case: {row["operator"]: row["ratio"] for row in rows} for case, rows in by(of["traffic"], "case").items()
    }
    yield table(
        "GPU | variants | most registers of an update | spills | atomics | inexact | 16-byte loads at dim 128",
        "{arch} | {variants} | {most} | {spills} | {atomics} | {inexact} | {wide_16_bytes} of {wide}",
        ({**row, "most": most_registers(row)} for row in of["code"]),
    )
    yield table(
        "bags | lookup | update",
        "{case} | {lookup:.3f} | {update:.3f}",
        ({"case": case, **ratios} for case, ratios in traffic.items()),
    )
    yield [
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


@page("narrow-rows", "Narrow rows", "quality")
def narrow_rows(result: dict) -> Parts:
    """What do rows and products of 16 and 8 bits cost in quality?"""
    of = by(result["rows"], "row_type")
    exact = mean(of["fp32"], "ne")
    means = ((name, mean(rows, "ne"), mean(rows, "auc")) for name, rows in of.items())
    yield table(
        "rows | NE | above fp32 | AUC",
        lambda row: f"{row[0]} | {row[1]:.4f} | {row[1] - exact:+.5f} | {row[2]:.4f}",
        means,
    )
    yield [
        f"Means of {len(by(result['rows'], 'seed'))} seeds; 2 million samples each, each seen once.",
        "Labels are drawn from a teacher with known probabilities; the last row is what the teacher itself scores.",
    ]


ABOUT = """# Benchmarks

Every speed that this documentation claims comes from a saved result of `benchmarks/`. `rowwise bench --list` says what
each benchmark answers, takes and needs. `rowwise bench NAME` runs it. `rowwise bench NAME -- --save` keeps the result
with those of this processor.

Results are kept by processor, and nothing is compared between processors. What can be compared is a step's share of its
own machine's limit, which `benchmarks/parts/limits.py` defines. Peers run interleaved with rowwise in one process or
run, on the same inputs, and their results are checked to be equal.

"""
RECIPES = """# Recipes that ship

A recipe is one YAML file with everything that a run is made of. `rowwise ls` lists them, `rowwise train NAME` runs one,
`rowwise cp NAME my.yaml` copies one to edit. Every key is in the [recipe reference](reference/recipe.md).

Test metrics are of rows that the model did not train on. `rowwise bench zoo` measures them.

"""
WRITTEN = "<!-- written by tools/readme_tables.py -->\n\n"


def recipes() -> str:
    """What the recipes that ship say of themselves."""

    def cells(name: str) -> str:
        about = load(name).about
        spread = {metric: f" ± {about.spread[metric]:.2g}" for metric in about.spread}
        metrics = ", ".join(
            f"{m.upper() if m in ('auc', 'ne') else m} {value:.4g}{spread.get(m, '')}"
            for m, value in about.expect.items()
        )
        takes = [f"{about.time_s:.0f} s"] if about.time_s else []
        takes += [f"{about.memory_gb:.1f} GB"] if about.memory_gb else []
        published = ", ".join(f"{m} {value:.4g}" for m, value in about.published.items())
        by_whom = f"{published} ({about.published_by})" if published else ""
        words = about.run.removeprefix("rowwise train ")
        return f"`{words}` | {about.what} | {metrics or 'not run'} | {by_whom} | {', '.join(takes)}"

    measured = "Means of 3 seeds and the widest difference between them, on 2 cores of an AMD EPYC."
    return f"{table('recipe | what | test metrics | published | takes', cells, names())}\n\n{measured}"


def datasets() -> str:
    """What is known of the datasets by name."""

    def cells(entry: Any) -> str:
        files = f"{', '.join(entry.files)}; {entry.size}; {entry.terms}; [page]({entry.page})"
        return f"`{entry.name}` | {entry.what} | {entry.split} | {files if entry.files else entry.size}"

    return table("dataset | rows and label | split | files, size, terms", cells, catalog(ROOT / "no folder"))


def three_numbers(training: dict, operators: dict, sharded: dict) -> str:
    """For README: one of speed, one of the tables alone, one of correctness."""
    speed = {(r["side"], r["threads"]): r["samples_s"] for r in training["rows"] if r.get("optimizer") == "adam"}
    cells = [r["ratio"] for r in operators["rows"] if r["peer"] == "fbgemm-gpu-cpu 1.5.0" and r["threads"] == 2]
    plans = by((r for r in sharded["rows"] if r["kind"] == "plans"), "layout", "wire", "determinism", "side")
    ours, theirs = (
        max(r["difference"] for r in plans["column-wise", "fp32", "run", side]) for side in ("rowwise", "TorchRec")
    )
    made = training["environment"]
    lines = [
        f"[DLRM training step](docs/benchmarks/training-step.md), fp32, 2 threads | {speed[OURS, 2]:,.0f} "
        f"samples/s | TorchRec 1.8.0: {speed[BESIDE, 2]:,.0f} samples/s | `rowwise bench train_step`",
        "[lookup + backward + update](docs/benchmarks/operators.md), row-wise Adagrad, fp32, 2 threads, "
        f"geometric mean | {geometric_mean(cells):.1f}x as fast (slowest configuration {min(cells):.2f}x) | "
        "fbgemm-gpu-cpu 1.5.0, the last CPU wheel with multithreading | `rowwise bench ops`",
        "[largest absolute weight difference](docs/benchmarks/plan-invariance.md) between 2 processes, "
        f"column-wise, and 1 process after 20 steps | {ours:.1e} | TorchRec 1.8.0: {theirs:.2g} "
        "| `rowwise bench shard_step`",
    ]
    where = f"{made['cpu']} ({training['processor']}), {made['cores']} cores; torch {made['versions']['torch']}"
    return f"{table('what | rowwise | peer | command', str, lines)}\n\nProcessor: {where}."


def fill(file: Path, what: str, table: str) -> str:
    """A page with a table between its marks."""
    page, begin, end = file.read_text(), f"<!-- {what} -->\n", "<!-- end -->"
    if page.count(begin) != 1:
        sys.exit(f"{file.name} has {page.count(begin)} places for the {what}, expected one: {begin.strip()} ... {end}")
    head, rest = page.split(begin)
    return f"{head}{begin}{table}\n{end}{rest.split(end, 1)[1]}"


def files() -> dict[Path, str]:
    """Every file that this tool writes, with what is to be in it."""
    docs, needed = ROOT / "docs", ("train_step", "ops", "shard_step")
    first = saved_results.first_with(*needed)
    numbers = three_numbers(*(saved_results.read(benchmark, first) for benchmark in needed))
    found = {
        ROOT / "README.md": fill(ROOT / "README.md", "numbers", numbers),
        docs / "datasets.md": fill(docs / "datasets.md", "datasets", datasets()),
        docs / "recipes.md": f"{WRITTEN}{RECIPES}{recipes()}\n",
    }
    index = []
    for page in PAGES:
        if not (sections := page.sections()):
            print(f"left out: no processor has all results of {page.title!r}", file=sys.stderr)
            continue
        found[docs / "benchmarks" / f"{page.name}.md"] = page.text(sections)
        index.append(f"[{page.title}]({page.name}.md) | {page.question} | {', '.join(sections)}")
    listed = table("subject | question | processors", str, index)
    return found | {docs / "benchmarks" / "index.md": f"{WRITTEN}{ABOUT}{listed}\n"}


def main() -> None:
    for path, wanted in files().items():
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted)
        elif not path.exists() or wanted != path.read_text():
            sys.exit(f"{path} is not what benchmarks/results say: run python tools/readme_tables.py")


if __name__ == "__main__":
    main()
