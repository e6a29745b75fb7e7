"""Recipes: the YAML configuration of a run, and the code that builds data, model and trainer from it.

`recipe` defines its types, `text` reads and writes it, `find` knows the built-in ones; these need no torch. `compose`
builds the parts of a run, `runs` starts and resumes it, `trained` evaluates it and predicts. Names are loaded on first
use.
"""

from typing import TYPE_CHECKING

from rowwise.base.lazy import export_lazily

if TYPE_CHECKING:
    from rowwise.recipes.find import load as load
    from rowwise.recipes.recipe import Recipe as Recipe
    from rowwise.recipes.run_result import RunResult as RunResult
    from rowwise.recipes.runs import TrainingRun as TrainingRun
    from rowwise.recipes.trained import evaluate as evaluate
    from rowwise.recipes.trained import load_trained as load_trained
    from rowwise.recipes.trained import predict_rows as predict_rows

_HOMES = {
    "find": ("load",),
    "recipe": ("Recipe",),
    "run_result": ("RunResult",),
    "runs": ("TrainingRun",),
    "trained": ("evaluate", "load_trained", "predict_rows"),
}
__all__, __getattr__ = export_lazily(__name__, _HOMES)
