"""A watch on the optimizer of a peer, which runs in a Python of its own: imports what every peer has."""

import time
from collections.abc import Callable, Sequence
from importlib.metadata import version

import numpy as np
from sklearn.metrics import log_loss, roc_auc_score
from torch.optim import Optimizer

ALONE = 3  # epochs over batches that are there already


class Watch:
    """The time at the end of each step."""

    def __init__(self, optimizer: Optimizer, steps: int) -> None:
        self._ends: list[float] = []
        self._steps = steps  # of an epoch
        optimizer.register_step_post_hook(lambda *_: self._tick())

    def _tick(self) -> None:
        self._ends.append(time.time())

    def found(self, labels: Sequence[float], predicted: Sequence[float]) -> dict:
        """Of a run: an epoch is from the last step of the one before to its own last, so loading is part of it."""
        labels_B, predicted_B = np.asarray(labels), np.asarray(predicted, np.float64)
        last = self._ends[self._steps - 1 :: self._steps]
        return {
            "first_step_at": self._ends[0],
            "epoch_s": np.diff(last).tolist(),
            "steps": len(self._ends),
            "rows": len(labels_B),
            "positives": int(labels_B.sum()),
            "auc": float(roc_auc_score(labels_B, predicted_B)),
            "log_loss": float(log_loss(labels_B, predicted_B)),
        }

    def alone(self, step: Callable[[object], object], batches: Sequence[object]) -> dict:
        """Seconds of epochs without loading."""
        took = []
        for _ in range(ALONE):
            begin_s = time.perf_counter()
            for batch in batches:
                step(batch)
            took.append(time.perf_counter() - begin_s)
        return {"alone_epoch_s": took}

    def version(self, package: str) -> dict:
        """Of a peer and of what it runs on."""
        return {"versions": {name: version(name) for name in (package, "torch", "numpy")}}
