"""Write what the recipes say of themselves from the saved results of benchmarks/zoo.py, or check that it is so.

python tools/recipe_numbers.py [--check]
"""

import re
import statistics
import sys
from pathlib import Path

from saved_results import first_with, read

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "src" / "rowwise" / "recipes" / "library"
OTHER = ("recipe", "seed", "steps", "wall_s", "memory_gb")


def about_of(rows: list[dict]) -> dict[str, str]:
    """The lines of `about` that are measured."""
    metrics = {m: [row[m] for row in rows] for m in rows[0] if m not in OTHER}
    means = ", ".join(f"{m}: {statistics.mean(values):.4f}" for m, values in metrics.items())
    spreads = ", ".join(f"{m}: {max(values) - min(values):.4f}" for m, values in metrics.items())
    return {
        "expect": f"{{{means}}}",
        "spread": f"{{{spreads}}}",
        "time_s": f"{statistics.median(row['wall_s'] for row in rows):.0f}",
        "memory_gb": f"{max(row['memory_gb'] for row in rows):.1f}",
    }


def fill(text: str, rows: list[dict]) -> str:
    head, tail = re.split(r"^data:$", text, maxsplit=1, flags=re.M)
    for key in ("expect", "spread", "time_s", "memory_gb"):
        head = re.sub(rf"^  {key}: .*\n", "", head, flags=re.M)
    measured = "".join(f"  {key}: {value}\n" for key, value in about_of(rows).items())
    head = re.sub(r"^(  run: .*\n)", lambda match: match[1] + measured, head, flags=re.M)
    return f"{head}data:{tail}"


def main() -> None:
    processor = first_with("zoo")
    results = read("zoo", processor)["rows"]
    for name in dict.fromkeys(row["recipe"] for row in results):
        path = LIBRARY / f"{name}.yaml"
        wanted = fill(path.read_text(), [row for row in results if row["recipe"] == name])
        if "--check" not in sys.argv:
            path.write_text(wanted)
        elif wanted != path.read_text():
            sys.exit(
                f"{path} is not what benchmarks/results/{processor}/zoo.json says: run python tools/recipe_numbers.py"
            )


if __name__ == "__main__":
    main()
