"""Rows drawn by Zipf's law, the most frequent ones anywhere in the table."""

import numpy as np


def zipf_rows(a, rows, count, seed=0):
    share = np.arange(1, rows + 1.0) ** -a
    rng = np.random.default_rng(seed)
    places = np.searchsorted(np.cumsum(share / share.sum()), rng.random(count))
    return rng.permutation(rows)[places.clip(max=rows - 1)]
