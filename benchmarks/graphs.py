"""How fast are sums over neighbours beside torch.sparse, and what do sampled edges cost in recall?

    python benchmarks/graphs.py [--quick | --smoke] [--only speed quality] [--data data] [--save]

Speed: one product of a power-law graph of 1 million nodes and 20 million edges with 64 numbers a node, beside
torch.sparse's CSR product and PyTorch Geometric; exact, and with at most so many edges into a node, which the kernel
chooses while it reads. Medians of runs that take turns. `reads` is the product without sums: it reads the row of each
edge, from huge pages.
Quality: LightGCN on MovieLens-100k, in the protocol of the benchmark of Recommenders
(github.com/recommenders-team/recommenders): all 100,000 ratings are pairs, a quarter of each user's tests, films of the
training pairs are not ranked. One model is trained exactly and evaluated on sampled graphs, whose weights grow or stay
as they are. `--quick` has a twentieth of the graph and one seed. The last printed line is one JSON object.

Takes: 10 minutes; --quick 2 minutes
Needs: `rowwise data get movielens-100k`; the extra `peers`, without which PyTorch Geometric is left out
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import statistics
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from parts.graph_peers import pyg_ways
from parts.graph_work import evaluate, power_law, split_ratings, train
from parts.report import at_least, exactly, finish, options, parsed, show
from parts.timer import in_turns
from parts.tiny_data import make_tiny

from rowwise.tables.ops.graph import Graph, SampledBy, aggregate
from rowwise.tables.ops.layout import TYPES, FeatureDescriptor, Mode
from rowwise.tables.ops.output_cache import empty_cached
from rowwise.tables.spec import RowType

DIM = 64
EXACT, SPARSE, READS = "exact", "torch.sparse", "reads"
PUBLISHED = {"ndcg@10": 0.4198, "recall@10": 0.1443, "precision@10": 0.3796}  # of LightGCN, see above
SEEDS = 3
MOST = (8, 16, 32, 64, 128, 256)  # edges into a node
HOWS = get_args(SampledBy)
AS_THEY_ARE = ", as they are"  # the weights of sampled edges
BACKWARD = ", backward"
FASTER = {EXACT: 2, **{f"{how}, 8": 3 for how in HOWS}}  # floors of speeds


def speed(nodes: int, edges: int, repeats: int) -> list[dict]:
    """Seconds of one product, each way."""
    graph, vectors_ND = power_law(nodes, edges), torch.randn(nodes, DIM)
    near_ND = empty_cached(vectors_ND.shape, vectors_ND).copy_(vectors_ND)
    graphs = {EXACT: graph, **{f"{how}, {most}": graph.sampled(most, how) for how in HOWS for most in MOST}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its CSR support beta
        sparse = torch.sparse_csr_tensor(graph.starts_T1.int(), graph.sources_E, graph.weights_E, (nodes, nodes))
    ways: dict[str, Callable[[], torch.Tensor]] = {SPARSE: partial(torch.mm, sparse, vectors_ND)}
    ways |= {name: partial(aggregate, one, vectors_ND) for name, one in graphs.items()}
    ways |= {READS: partial(read_rows, graph, near_ND), **pyg_ways(graph, sparse, vectors_ND)}
    for name in (EXACT, "spread, 32"):
        ways[name + BACKWARD] = partial(aggregate, graphs[name].transposed, vectors_ND)
    seconds = in_turns(ways, repeats)
    exact_ND = ways[EXACT]()
    rows = []
    for name, one in graphs.items():
        out_ND = ways[name]()
        few_N = graph.degrees_T <= (one.sampling.most if one.sampling else edges)
        rows.append(
            {
                "way": name,
                "edges": one.edges_read,
                "seconds": statistics.median(seconds[name]),
                "same_bits": int(torch.equal(out_ND[few_N], exact_ND[few_N])),
                "difference": float((exact_ND - ways[SPARSE]()).abs().max()) if name == EXACT else None,
            }
        )
    rows += [
        {"way": name, "edges": edges, "seconds": statistics.median(seconds[name])}
        for name in ways
        if name not in graphs
    ]
    return [{"section": "speed", **row} for row in rows]


def read_rows(graph: Graph, vectors_ND: torch.Tensor) -> torch.Tensor:
    """Read the row of each edge's source, and do nothing else: the limit of a product that reads rows in this order."""
    rows, dim = vectors_ND.shape
    feature = FeatureDescriptor(
        source=0, table=0, base=0, rows=rows, dim=dim, column=0, mode=Mode.SUM, type=TYPES.index(RowType.FP32),
        scale_group=0,
    )  # fmt: skip
    table, bag = vectors_ND.view(torch.uint8).flatten(), torch.tensor([0, len(graph.sources_E)])
    torch.ops.rowwise.touch(table, torch.tensor([feature]), graph.sources_E, bag, 1)
    return vectors_ND


def quality(data: Path, seeds: int, epochs: int) -> list[dict]:
    """Metrics of LightGCN, exact and with sampled edges."""
    rows = []
    for seed in range(seeds):
        ratings = split_ratings(data, seed)
        model, seconds = train(ratings, seed, epochs)
        graphs: dict[tuple[str, int | None], Graph] = {(EXACT, None): model.graph}
        for how in HOWS:
            for most in MOST:
                graphs[how, most] = model.graph.sampled(most, how)
                graphs[how + AS_THEY_ARE, most] = model.graph.sampled(most, how, rescaled=False)
        for (how, most), graph in graphs.items():
            model.sampled = graph
            kept = graph.edges_read / model.graph.edges_read
            found = {"section": "quality", "seed": seed, "way": how, "most": most, "kept": kept}
            rows.append({**found, **evaluate(model, ratings), "train_s": seconds})
    return rows


def floors_of(rows: list[dict]) -> list[dict]:
    floors = []
    timed = {row["way"]: row for row in rows if row["section"] == "speed"}
    for way, row in timed.items():
        if "same_bits" in row:
            faster = timed[SPARSE]["seconds"] / row["seconds"]
            floors.append(at_least(f"product, {way}: times the speed of {SPARSE}", faster, FASTER.get(way)))
            floors.append(
                exactly(f"product, {way}: rows of few edges have the bits of the exact one", row["same_bits"], 1)
            )
    learned = [row for row in rows if row["section"] == "quality"]
    exact = [row for row in learned if row["way"] == EXACT]
    for metric, published in PUBLISHED.items() if exact else ():
        value = statistics.mean(row[metric] for row in exact)
        floors.append(at_least(f"LightGCN: {metric}; floor: as published", value, published))
    for how in HOWS if exact else ():
        for most in MOST:
            mine = [row["recall@20"] for row in learned if (row["way"], row["most"]) == (how, most)]
            share = sum(mine) / sum(row["recall@20"] for row in exact)
            floor = 0.98 if most == 128 else None
            floors.append(at_least(f"recall@20 with {how} {most} edges, of the exact one", share, floor))
    return floors


def smoke_floors(rows: list[dict]) -> list[dict]:
    timed = [row for row in rows if row["section"] == "speed"]
    learned = [row for row in rows if row["section"] == "quality"]
    return [
        *(exactly(f"{row['way']}: same bits", row["same_bits"], 1) for row in timed if "same_bits" in row),
        exactly("the exact product is torch's", int(timed[0]["difference"] < 1e-3), 1),
        exactly("recalls", len({row["most"] for row in learned}), len(MOST) + 1),
        exactly("with all edges as exact", learned[0]["recall@20"], learned[-1]["recall@20"]),
        exactly("ways to sample", len({row["way"] for row in learned}), 2 * len(HOWS) + 1),
    ]


def measure(args: argparse.Namespace) -> list[dict]:
    rows: list[dict] = []
    if "speed" in args.only:
        nodes = 2_000 if args.smoke else 50_000 if args.quick else 1_000_000
        rows += speed(nodes, 20 * nodes, 3 if args.quick else 7)
        for row in rows:
            show(row)
    if "quality" in args.only:
        learned = quality(args.data, 1 if args.quick else SEEDS, 2 if args.smoke else 60)
        for row in learned:
            show(row)
        rows += learned
    return rows


def main() -> None:
    args = parsed(options("graphs", __doc__, only=("speed", "quality"), data=True))
    with tempfile.TemporaryDirectory() as folder:
        if args.smoke:
            args.data = make_tiny(Path(folder))
        rows = measure(args)
    floors = smoke_floors(rows) if args.smoke else floors_of(rows)
    finish("graphs", rows, floors, args)


if __name__ == "__main__":
    main()
