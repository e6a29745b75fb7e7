"""What a trained model has learned from: importance of features, effects of ids and numbers, calibration, drift.

`rows` holds a sample of rows in memory, `importance` scores it with one feature permuted, `slices` compares predictions
with labels, `drift` compares rows of training with those that are explained. `run` puts them together.
"""

from rowwise.recipes.explain.run import explain as explain
