"""Write README's benchmark table from the saved results, or check that it is what they say.

python tools/readme_tables.py [--check]
"""

import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- table: ops -->", "<!-- end -->"


def geomean(values: list[float]) -> str:
    return f"{math.exp(sum(map(math.log, values)) / len(values)):.1f}x" if values else "-"


def table() -> str:
    result = json.loads((ROOT / "benchmarks" / "results" / "ops.json").read_text())
    rows, made = result["rows"], result["environment"]
    lines = ["| against | optimizer | 1 thread | 2 threads | worst cell |", "|---|---|---|---|---|"]
    names = {"sgd": "SGD", "rowwise_adagrad": "row-wise Adagrad", "adagrad": "Adagrad"}
    for peer, optimizer in dict.fromkeys((r["peer"], r["optimizer"]) for r in rows):
        mine = [r for r in rows if (r["peer"], r["optimizer"]) == (peer, optimizer)]
        by_threads = [geomean([r["ratio"] for r in mine if r["threads"] == n]) for n in (1, 2)]
        worst = min(r["ratio"] for r in mine)
        lines.append(f"| {peer} | {names[optimizer]} | {' | '.join(by_threads)} | {worst:.1f}x |")
    shares = [r["gather_share"] for r in rows if "gather_share" in r and r["pooling"] == 20 and r["dim"] >= 64]
    note = (
        f"Time of the peer over ours for lookup, backward and update together (geometric means over dims, batch "
        f"sizes, poolings and id distributions). The lookup alone, pooling 20 and dim >= 64, runs at "
        f"{min(shares):.0%} to "
        f"{min(1.0, max(shares)):.0%} of the speed at which this machine can read the same rows at all. "
        f"{made['cpu']}, {made['cores']} cores, {made['isa']}, torch {made['versions']['torch']}, "
        f"commit {made['commit']}."
    )
    return "\n".join([*lines, "", note])


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END, 1)
    wanted = f"{head}{BEGIN}\n{table()}\n{END}{tail}"
    if "--check" not in sys.argv:
        readme.write_text(wanted)
    elif wanted != text:
        sys.exit("README.md is not what benchmarks/results/ops.json says: run python tools/readme_tables.py")


if __name__ == "__main__":
    main()
