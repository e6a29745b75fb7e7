"""Training: the step, the loop, metrics, and the state that a resumed run needs.

`Trainer` trains any module over `Embeddings`; `rowwise.recipes` makes a trainer from a recipe. Names are loaded when
first used: recipes are read without torch.
"""

from typing import TYPE_CHECKING

from rowwise.base.lazy import export_lazily

if TYPE_CHECKING:
    from rowwise.train.evaluate import ClickEvaluator as ClickEvaluator
    from rowwise.train.metrics import Metrics as Metrics
    from rowwise.train.objective import Clicks as Clicks
    from rowwise.train.objective import Outcome as Outcome
    from rowwise.train.run_folder import RunFolder as RunFolder
    from rowwise.train.settings import Settings as Settings
    from rowwise.train.settings import Training as Training
    from rowwise.train.trainer import Trainer as Trainer
    from rowwise.train.trainer import TrainingJob as TrainingJob

_HOMES = {
    "evaluate": ("ClickEvaluator",),
    "metrics": ("Metrics",),
    "objective": ("Clicks", "Outcome"),
    "run_folder": ("RunFolder",),
    "settings": ("Settings", "Training"),
    "trainer": ("TrainingJob", "Trainer"),
}
__all__, __getattr__ = export_lazily(__name__, _HOMES)
