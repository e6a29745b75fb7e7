"""The progress of a run: numbers in a checkpoint's manifest that decide when to evaluate, save and end."""

from rowwise.ingest.batcher import Position
from rowwise.tables.spec import Value
from rowwise.train.settings import Evaluation, Saving, Training


class BestEvaluation(Value, frozen=True):
    """The best evaluation so far."""

    step: int
    task: str
    metric: str
    value: float


class Progress(Value, frozen=True):
    """The step, samples, time and best evaluation of a run."""

    position: Position
    step: int = 0
    samples: int = 0
    time_s: float = 0.0  # of training, without pauses
    evaluated: int = 0  # the step of the last evaluation
    best: BestEvaluation | None = None
    worse: int = 0  # number of evaluations since the best
    finished: bool = False

    def is_over(self, training: Training, evaluation: Evaluation) -> bool:
        """Whether the run ends here: after its epochs or steps, or out of patience."""
        if evaluation.patience is not None and self.worse >= evaluation.patience:
            return True
        return self.position.epoch >= training.epochs or (training.steps is not None and self.step >= training.steps)

    def wants_evaluation(self, evaluation: Evaluation, *, epoch_end: bool, over: bool) -> bool:
        return self.evaluated != self.step and (over or self._is_due(evaluation.every, epoch_end))

    def wants_saving(self, saving: Saving, *, epoch_end: bool, over: bool) -> bool:
        return over or self._is_due(saving.every, epoch_end)

    def _is_due(self, every: int, epoch_end: bool) -> bool:
        return self.step % every == 0 if every else epoch_end
