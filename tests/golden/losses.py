"""The losses of 20 steps of three recipes, and how far from them another processor may be.

Float rounding differs between processors in torch's dense products. Weights that were changed by one in the last place
at the start, and products of other instruction sets, moved no loss by more than 1e-7 of it; a learning rate that is 1 %
larger moves them by 5e-4 to 8e-2. `dcn` rounds rows stochastically, where a last bit may become a whole step of fp16 or
int8: a few such steps are below 1e-3.
"""

import csv
from pathlib import Path

from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import read

RECIPES = Path(__file__).parent / "recipes"
CLOSE = {"dlrm": 1e-5, "dcn": 1e-3, "two-tower": 1e-5}  # relative


def losses_of(name: str, folder: Path) -> list[float]:
    """Of each step; `folder` has the warehouse."""
    recipe = read(RECIPES / f"{name}.yaml", [f"data.dataset=parquet:{folder / 'warehouse'}"])
    run = TrainingRun.start(recipe, folder / "losses")
    run.trainer.run()
    with (run.folder.path / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    return [float(line["value"]) for line in lines if (line["split"], line["metric"]) == ("train", "loss")]
