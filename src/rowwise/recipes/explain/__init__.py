"""Explains a trained model: importance of features, effects of ids and numbers, calibration, drift.

`rows` holds a sample of rows in memory, `importance` scores it with one feature permuted, `slices` compares predictions
with labels, `drift` compares training rows with the explained rows. `run` combines them.
"""

from rowwise.recipes.explain.run import explain as explain
