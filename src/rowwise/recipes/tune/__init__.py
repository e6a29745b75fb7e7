"""Searches the settings of a recipe with Optuna: `space` defines the search space, `study` runs and records trials.

`dims` chooses dims of tables under a budget of parameters.

A study is a folder: journal.log (Optuna's, to which all processes append), a run for each trial, best.yaml, test.json
and report.html. A killed study continues from its journal.
"""

from rowwise.recipes.tune.dims import tune_dims as tune_dims
from rowwise.recipes.tune.study import tune as tune
