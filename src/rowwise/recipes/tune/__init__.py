"""Searches the settings of a recipe with Optuna: `space` is what is searched, `study` runs trials and keeps them.

A study is a folder: journal.log (Optuna's, to which all processes append), a run for each trial, best.yaml, test.json
and report.html. A study that was killed goes on from its journal.
"""

from rowwise.recipes.tune.study import tune as tune
