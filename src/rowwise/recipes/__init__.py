"""Recipes: everything that a run is made of, in one YAML file, and the only code that puts the parts together.

`recipe` says what a recipe holds, `text` reads and writes it, `find` knows those that ship; none of these needs torch.
`compose` makes data, model and trainer of one, `runs` are the verbs of the command line as functions. Names are loaded
when first used.
"""

from typing import TYPE_CHECKING

from rowwise.lazy import names_of

if TYPE_CHECKING:
    from rowwise.recipes.find import load as load
    from rowwise.recipes.recipe import Recipe as Recipe
    from rowwise.recipes.runs import RunResult as RunResult
    from rowwise.recipes.runs import TrainingRun as TrainingRun
    from rowwise.recipes.runs import evaluate as evaluate
    from rowwise.recipes.runs import load_trained as load_trained
    from rowwise.recipes.runs import predict_rows as predict_rows

_HOMES = {
    "find": ("load",),
    "recipe": ("Recipe",),
    "runs": ("RunResult", "TrainingRun", "evaluate", "load_trained", "predict_rows"),
}
__all__, __getattr__ = names_of(__name__, _HOMES)
