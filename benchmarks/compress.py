"""What does compressing tables cost in quality, byte for byte, by every method, on sales in stores and on films?

    python benchmarks/compress.py [--quick | --smoke] [--data DIR] [--only SECTION] [--save]

The ids of each table of `complete-journey` are numbered from 0 in a random order, so that no method gains by an order
that data happens to have. Trained on weeks 2 to 47, tested on 48 to 53, three seeds; tables of at least 1,000 ids are
compressed, each to the same share of its bytes, all bytes counted: rows, maps, projections. Learned maps come from one
probe of the training rows. `half`: the probe has seen the first half of the weeks only, and the model trains on the
second. `advice`: the advisor's allocation under one budget for all tables, chosen on training weeks alone. `scale`: ten
million ids into a million rows. The last printed line is one JSON object.

Takes: 2 hours; --quick 2 minutes (films)
Needs: `rowwise data get movielens-100k` and `rowwise data get complete-journey`
"""

import argparse
import json
import os
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from parts.compress_quality import FILMS_METHODS, advice, films, half_of_time, quality
from parts.compress_scale import scale
from parts.compress_work import permuted
from parts.report import at_least, at_most, exactly, finish, options, parsed
from parts.tiny_data import make_tiny

SECTIONS = ("quality", "half", "films", "advice", "scale")
RATIOS = (10.0, 100.0)
LEARNED = "learned"


def main() -> None:
    parser = options("compress", __doc__)
    parser.add_argument("--data", type=Path, default=Path("data"), help="where datasets are, or are put")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="these; of others what is saved is kept")
    parser.add_argument(
        "--method", action="append", help="of quality: these methods again; of others what is saved is kept"
    )
    args = parsed(parser)
    if args.smoke:
        wanted, args.method = args.only or ("quality", "films", "scale"), ["hash", LEARNED]
    else:
        wanted = args.only or (("films",) if args.quick else SECTIONS)
    rows = kept(args.save) if args.only else {}
    with TemporaryDirectory() as folder:
        if args.smoke:
            args.data = make_tiny(Path(folder) / "made")
        found = measured(set(wanted), args, Path(folder))
    if args.method and "quality" in found and not args.smoke:
        found["quality"] = [row for row in rows["quality"] if row["method"] not in args.method] + found["quality"]
    rows |= found
    floors = smoke_floors(rows) if args.smoke else floors_of(rows)
    finish("compress", rows, floors, args)


def measured(wanted: set[str], args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """The sections that are asked for."""
    rows: dict[str, object] = {}
    seeds = 1 if args.quick else 3
    ids = 4_000 if args.smoke else 10_000_000
    if wanted & {"quality", "half", "advice"}:
        sales = permuted(args.data, folder)
    if "quality" in wanted:
        rows["quality"] = quality(sales, RATIOS[:1] if args.smoke else RATIOS, seeds, tuple(args.method or ()))
    if "half" in wanted:
        rows["half"] = half_of_time(sales, seeds)
    if "advice" in wanted:
        rows["advice"] = advice(sales, RATIOS[0], seeds, folder / "advice")
    if "films" in wanted:
        rows["films"] = films(args.data, seeds, FILMS_METHODS[1:2] if args.smoke else FILMS_METHODS)
    if "scale" in wanted:
        rows["scale"] = scale(ids, ids // 10)
    return rows


def smoke_floors(rows: dict) -> list[dict]:
    """Every method keeps to its bytes."""
    kept_to = [row["bytes"] - row["map_bytes"] > 0 and row["map_bytes"] >= 0 for row in rows["quality"]]
    return [
        exactly("methods that were trained on sales", len(kept_to), 2),
        exactly("methods that leave rows", sum(kept_to), 2),
        exactly("methods that were trained on films", len(rows["films"]), 1),
        at_most("bytes of many ids in few rows", rows["scale"]["bytes"], rows["scale"]["budget_bytes"]),
    ]


def kept(path: Path | None) -> dict[str, object]:
    """What was measured before."""
    return json.loads(path.read_text())["rows"] if path and path.exists() else {}


def floors_of(rows: dict) -> list[dict]:
    found: list[dict] = []
    if "quality" in rows:
        found += of_quality(rows["quality"])
    if "films" in rows:
        auc = {row["method"]: statistics.mean(row["auc"]) for row in rows["films"]}
        found.append(at_least("films at 1/8: AUC of learned above hash", auc[LEARNED] - auc["hash"], 0.015))
    if "half" in rows:
        auc = {row["method"]: statistics.mean(row["auc"]) for row in rows["half"]}
        first, second = (auc[f"{LEARNED}, {part} half"] - auc["hash"] for part in ("first", "second"))
        found.append(at_least("a map of the first half keeps of its gain in the second", first / second, 0.5))
    if "advice" in rows and "quality" in rows:
        best = best_of(rows["quality"], 10.0)
        more = statistics.mean(rows["advice"]["auc"]) - statistics.mean(best["auc"])
        name = f"advice at 1/10: AUC above the best single method ({best['method']}), less what seeds differ by"
        found.append(at_least(name, more - spread(best), 0.0))
    if "scale" in rows:
        found.append(at_most("10M ids: seconds", rows["scale"]["wall_s"], 300))
        found.append(at_most("10M ids: GB", rows["scale"]["peak_gb"], 6))
    return found


def of_quality(rows: list[dict]) -> list[dict]:
    """Learned maps against the full tables and against every other method."""
    full = statistics.mean(rows[0]["auc"])
    found = []
    for ratio in RATIOS:
        at = {row["method"]: row for row in rows if row["ratio"] == ratio}
        learned = at[LEARNED]
        others = [row for name, row in at.items() if not name.startswith(LEARNED)]
        best = max(others, key=lambda row: statistics.mean(row["auc"]))
        more = statistics.mean(learned["auc"]) - statistics.mean(best["auc"])
        what = f"1/{ratio:g}: AUC of learned above the best other ({best['method']})"
        seeds = max(spread(learned), spread(best)) if ratio == RATIOS[0] else 0.0
        found.append(at_least(what + (", less what seeds differ by" if seeds else ""), more - seeds, 0.0))
        if ratio == RATIOS[0]:
            lost = full - statistics.mean(learned["auc"])
            found.append(at_most("1/10: AUC lost by learned", lost, 0.004))
        else:
            pairs = statistics.mean(at["quotient_remainder"]["auc"])
            more = statistics.mean(learned["auc"]) - pairs
            found.append(at_least("1/100: AUC of learned above quotient-remainder", more, 0.005))
    return found


def best_of(rows: list[dict], ratio: float) -> dict:
    return max((row for row in rows if row["ratio"] == ratio), key=lambda row: statistics.mean(row["auc"]))


def spread(row: dict) -> float:
    return max(row["auc"]) - min(row["auc"])


if __name__ == "__main__":
    main()
