"""How fast are the best items of two towers found, by an index and exactly, and how many of them does the index find?

    python benchmarks/retrieval.py [--quick | --smoke] [--only vectors movielens served everyone] [--data data] [--save]

vectors: a million made-up vectors of 64 numbers in clusters. An index is built, and probes are chosen for a recall of
.99 on one set of queries; recall and times are those of another set. One thread.
movielens: the recipe movielens-two-tower behind a server, whose items are all searched.
served: two towers with a million items behind a server, by index and exactly.
everyone: the best 100 of 100,000 items for each of many users, as `rowwise recommend` searches them, beside matrix
products alone, products with topk over all items (as full-sort evaluations do), and faiss's exact index.
`--quick` has a tenth of the items. The last printed line is one JSON object.

Takes: 16 minutes; --quick 2 minutes
Needs: the extras `serve` and `retrieval`, `rowwise data get movielens-100k`
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from parts.process_tree import processor_s
from parts.report import at_least, exactly, finish, options, parsed, show
from parts.serve_work import OK, serving
from parts.tiny_data import make_tiny

from rowwise.models.best_items import best_items
from rowwise.models.retrieval import nearest_items
from rowwise.recipes.export import export
from rowwise.recipes.export_items import ItemOptions, measure
from rowwise.recipes.find import load
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.served import open_version
from rowwise.recipes.text import decode
from rowwise.serve.item_index import ItemIndex, choose_lists
from rowwise.serve.item_scan import ItemFilter
from rowwise.serve.items import open_items, write_items, write_vectors
from rowwise.serve.load import quantiles_ms, seconds_of, send
from rowwise.serve.retrieval import Retriever

SECTIONS = ("vectors", "movielens", "served", "everyone")
DIM, K, RECALL = 64, 100, 0.99
CLUSTERS, SPREAD = 2000, 0.7  # of made-up vectors; their distance from the middle, over that of the middles
USERS = 10_000
CLIENTS = (1, 16)
ROUNDS = 3
BLOCK = 256  # users of one matrix product
Row = dict[str, object]


def clustered(count: int, clusters: int, seed: int) -> torch.Tensor:
    """Vectors of length 1 around middles, which are the same for all seeds."""
    middles = np.random.default_rng(0).standard_normal((clusters, DIM), np.float32)
    draw = np.random.default_rng(seed)
    made = middles[draw.integers(0, clusters, count)] + SPREAD * draw.standard_normal((count, DIM), np.float32)
    return torch.from_numpy(made / np.linalg.norm(made, axis=1, keepdims=True))


def times_ms(call: Callable[[int], object], count: int) -> dict[str, float]:
    """Milliseconds of calls, and their median on the processor, which other work on the machine hardly changes."""
    seconds, processor = [], []
    for number in range(count):
        begin_s, began_s = time.perf_counter(), time.thread_time()
        call(number)
        seconds.append(time.perf_counter() - begin_s)
        processor.append(time.thread_time() - began_s)
    found = {f"p{q}_ms": 1e3 * float(np.quantile(seconds, q / 100)) for q in (50, 99)}
    return found | {"processor_ms": 1e3 * float(np.median(processor))}


def vectors(count: int, queries: int) -> list[Row]:
    """Searches in this process, of vectors in a file."""
    torch.set_num_threads(1)
    clusters = min(CLUSTERS, count // 100)
    items_ID, lists = clustered(count, clusters, 1), choose_lists(count)
    begin_s = time.perf_counter()
    index = ItemIndex.build(items_ID, lists)
    build_s = time.perf_counter() - begin_s
    facts = measure(index, items_ID, clustered(queries, clusters, 2), lists, RECALL)
    measure_s = time.perf_counter() - begin_s - build_s
    printed = {one.k: one.recall for one in facts.measured if one.probes == facts.probes_for(one.k)}
    asked_QD, nothing = clustered(queries, clusters, 3), ItemFilter()
    with tempfile.TemporaryDirectory() as folder:
        table = pa.table({"item": np.arange(count)})
        items_ID = write_vectors(Path(folder), [items_ID])
        items = open_items(Path(folder), write_items(Path(folder), "item", table, items_ID, (index, facts)))
        near = [items.find(query_D, K, nothing) for query_D in asked_QD]
        best = [items.find(query_D, K, nothing, exact=True) for query_D in asked_QD]
        found = sum(len(np.intersect1d(a.places_K, b.places_K)) for a, b in zip(near, best, strict=True))
        scores = torch.cat([one.dots_K for one in near]), torch.cat([one.places_K for one in near])
        rows: list[Row] = []
        for exact in (False, True):
            took = times_ms(lambda n, e=exact: items.find(asked_QD[n], K, nothing, exact=e), queries)
            rows.append({"section": "vectors", "items": count, "exact": exact, **took})
        alone = [
            torch.ops.rowwise.dots(asked_QD[n // K], items_ID[p : p + 1]) for n, p in enumerate(scores[1].tolist())
        ]
    rows[0] |= {
        "lists": lists,
        "probes": facts.probes_for(K),
        "printed_recall": printed.get(K),
        "recall": found / (K * queries),
        "build_s": build_s,
        "measure_s": measure_s,
        "by_index": sum(not one.exact for one in near),
        "wrong_scores": int((torch.cat(alone) != scores[0]).sum()),
    }
    return rows


def bodies_of(contexts: Sequence[dict], *, exact: bool) -> list[bytes]:
    return [json.dumps({"context": context, "k": K, "exact": exact}).encode() for context in contexts]


def asked(
    models: Path, name: str, retriever: Retriever, contexts: Sequence[dict], requests: int, *, exact: bool
) -> Iterator[Row]:
    """A server of two workers, asked by some clients; all answers are compared with those of this process."""
    wanted = [retriever.retrieve(context, K, exact=exact) for context in contexts]
    here = times_ms(lambda n: retriever.retrieve(contexts[n], K, exact=exact), len(contexts))
    with serving(models, {}) as server:
        server = server._replace(path=f"/v1/models/{name}/retrieve")
        for clients in CLIENTS:
            made = server.load(bodies_of(contexts, exact=exact), requests, clients)
            send(made._replace(requests=max(2 * clients, requests // 10)))
            begin_s = processor_s(server.pid)
            answers = send(made)
            took_s = seconds_of(answers)
            wrong = 0
            for one in answers:
                answer = json.loads(one.answer) if one.code == OK else {}
                right = wanted[one.body]
                wrong += int((answer.get("items"), answer.get("scores")) != (right.items, right.scores))
            yield {
                "items": retriever.items.facts.items,
                "exact": exact,
                "clients": clients,
                "requests": len(answers),
                "requests_s": len(answers) / took_s,
                **quantiles_ms(answers),
                "server_cpu_ms": 1e3 * (processor_s(server.pid) - begin_s) / len(answers),
                "here_p50_ms": here["p50_ms"],
                "here_p99_ms": here["p99_ms"],
                "here_processor_ms": here["processor_ms"],
                "wrong_answers": wrong,
            }


def movielens(data: Path, requests: int, folder: Path, *, epochs: int | None) -> Iterator[Row]:
    changes = [f"data.folder={data.absolute()}", *([] if epochs is None else [f"train.epochs={epochs}"])]
    recipe = load("movielens-two-tower", changes)
    run = TrainingRun.start(recipe, folder / "runs")
    result = run.go()
    written = export(run.folder.path, folder / "models")
    retriever = open_version(written.folder.path).retriever
    assert retriever is not None
    rows = pq.read_table(data / "movielens-100k" / "test.parquet").select(retriever.schema.names).slice(0, 200)
    contexts = rows.to_pylist()
    for row in asked(folder / "models", recipe.name, retriever, contexts, requests, exact=True):
        yield {"section": "movielens", **row, "recall@50": result.test[next(iter(result.test))]["recall@50"]}


def served(items: int, requests: int, folder: Path) -> Iterator[Row]:
    """Users meet items of the kind that they like, mostly."""
    draw, kinds, rows = np.random.default_rng(0), items // 1000, 200_000
    user, liked = draw.integers(0, USERS, rows), draw.random(rows) < 0.9
    kind = np.where(liked, user, draw.integers(0, kinds, rows)) % kinds
    item = draw.integers(0, items // kinds, rows) * kinds + kind
    met = {"user": user, "item": item, "kind": kind, "met": np.ones(rows, np.int64)}
    pq.write_table(pa.table(met), folder / "rows.parquet", row_group_size=20_000)
    numbers, sizes = np.arange(items), {"user": USERS, "item": items, "kind": kinds}
    pq.write_table(pa.table({"item": numbers, "kind": numbers % kinds}), folder / "items.parquet")
    table = {"dim": 32, "optimizer": {"kind": "rowwise_adagrad", "lr": 0.1}}
    recipe = {
        "name": "towers",
        "data": {"dataset": f"parquet:{folder / 'rows.parquet'}", "test_share": 0.2},
        "columns": {"labels": ["met"], "sparse": [{"column": name, "ids": "direct"} for name in sizes]},
        "tables": {"list": [{"name": name, "rows": count} | table for name, count in sizes.items()]},
        "model": {
            "kind": "two_tower",
            "item": "item",
            "user_features": ["user"],
            "item_features": ["kind"],
            "sizes": [DIM],
        },
        "train": {"batch": 2000, "epochs": 4, "optimizer": {"kind": "adam", "lr": 0.01}},
        "evaluate": {"metric": "recall@10"},
    }
    run = TrainingRun.start(decode(recipe, "towers.yaml"), folder / "runs")
    run.go(test=False)
    begin_s = time.perf_counter()
    written = export(run.folder.path, folder / "models", items=ItemOptions(str(folder / "items.parquet"), RECALL))
    export_s = time.perf_counter() - begin_s
    assert written.items is not None
    retriever = open_version(written.folder.path).retriever
    assert retriever is not None
    facts = written.items.index
    printed = [one for one in facts.measured if one.k == K and one.probes == facts.probes_for(K)] if facts else []
    contexts = [{"user": user} for user in range(0, USERS, USERS // 200)]
    near, best = ([retriever.retrieve(context, K, exact=e).items for context in contexts] for e in (False, True))
    found = sum(len(set(a) & set(b)) for a, b in zip(near, best, strict=True)) / (K * len(contexts))
    about = {"export_s": export_s, "recall": found, "printed_recall": printed[0].recall if printed else None}
    about["probes"] = printed[0].probes if printed else None
    for exact in (False, True):
        count = requests // 10 if exact else requests
        for row in asked(folder / "models", "towers", retriever, contexts, count, exact=exact):
            yield {"section": "served", **row, **about}


def everyone(users: int, items: int) -> list[Row]:
    """Users a second of each way, in the best of three rounds, and answers that are not those of a single search."""
    users_UD, items_ID = clustered(users, CLUSTERS, 2), clustered(items, CLUSTERS, 1)
    index = faiss.IndexFlatIP(DIM)
    index.add(items_ID.numpy())

    def blocks(search: Callable[[torch.Tensor], object]) -> Callable[[], object]:
        return lambda: [search(block_UD) for block_UD in users_UD.split(BLOCK)]

    ways = {
        "recommend": lambda: best_items(users_UD, items_ID, K),
        "products alone": blocks(lambda block_UD: block_UD @ items_ID.t()),
        "products and topk": blocks(lambda block_UD: (block_UD @ items_ID.t()).topk(K)),
        "faiss, exact": lambda: index.search(users_UD.numpy(), K),
    }
    rows: list[Row] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        faiss.omp_set_num_threads(threads)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                begin_s = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - begin_s)
        for name, each in seconds.items():
            rows.append(
                {"section": "everyone", "way": name, "threads": threads, "items": items, "users_s": users / min(each)}
            )
    best = best_items(users_UD, items_ID, K)
    checked = range(0, users, max(1, users // 64))
    rows[0]["wrong_answers"] = sum(
        not all(map(torch.equal, nearest_items(users_UD[u], items_ID, K), (best.dots_UK[u], best.places_UK[u])))
        for u in checked
    )
    return rows


def run_sections(args: argparse.Namespace) -> Iterator[Row]:
    items, requests = 1_000_000, 4000
    if args.quick:
        items, requests = (25_000, 60) if args.smoke else (100_000, 1000)
    if "vectors" in args.only:
        yield from vectors(items, 32 if args.smoke else 256)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = make_tiny(folder) if args.smoke else args.data
        if "movielens" in args.only:
            (folder / "films").mkdir()
            yield from movielens(data, requests, folder / "films", epochs=1 if args.smoke else None)
        if "served" in args.only:
            (folder / "many").mkdir()
            yield from served(items, requests, folder / "many")
    if "everyone" in args.only:
        yield from everyone(300 if args.smoke else 4096, 10_000 if args.smoke else 100_000)


def floors_of(rows: list[Row], *, smoke: bool) -> list[dict]:
    wrong = sum(int(str(row.get("wrong_scores", 0))) + int(str(row.get("wrong_answers", 0))) for row in rows)
    floors = [exactly("answers and scores that are not those of this process, or of an item alone", wrong, 0)]
    made = {(row["section"], row["exact"]): row for row in rows if row["section"] in ("vectors", "served")}
    for section in ("vectors", "served"):
        near, exact = made.get((section, False)), made.get((section, True))
        if near is None or exact is None:
            continue
        time_ms = "processor_ms" if section == "vectors" else "here_processor_ms"
        floors.append(at_least(f"{section}: recall@{K} as printed", near["printed_recall"] or 0, RECALL))
        floors.append(at_least(f"{section}: recall@{K} of other queries", near["recall"], 0.9 if smoke else 0.985))
        floor = None if smoke else 5
        floors.append(
            at_least(
                f"{section}: processor time of an exact search over that by index",
                exact[time_ms] / near[time_ms],
                floor,
            )
        )
    rates = {(row["way"], row["threads"]): row["users_s"] for row in rows if row["section"] == "everyone"}
    for threads in (1, 2) if rates else ():
        for way, floor in (("products alone", 0.6), ("products and topk", 2), ("faiss, exact", 1)):
            name = f"everyone: users a second over those of {way}, threads: {threads}"
            ratio = rates["recommend", threads] / rates[way, threads]
            floors.append(at_least(name, ratio, None if smoke else floor))
    return floors


def main() -> None:
    args = parsed(options("retrieval", __doc__, only=SECTIONS, data=True))
    rows: list[Row] = []
    for row in run_sections(args):
        rows.append(row)
        show(row)
    floors = floors_of(rows, smoke=args.smoke)
    finish("retrieval", rows, floors, args)


if __name__ == "__main__":
    main()
