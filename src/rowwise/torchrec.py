"""TorchRec's entry points over rowwise's tables: `from rowwise.torchrec import DistributedModelParallel`.

A script that was written with TorchRec's modules runs here when this import changes. No other module imports this one.
"""

from typing import TYPE_CHECKING

from rowwise.base.lazy import export_lazily
from rowwise.recipes.torchrec import import_torchrec

if TYPE_CHECKING:
    from rowwise.recipes.door.model import DistributedModelParallel as DistributedModelParallel
    from rowwise.recipes.door.model import get_default_sharders as get_default_sharders
    from rowwise.recipes.door.pipeline import TrainPipelineBase as TrainPipelineBase
    from rowwise.recipes.door.pipeline import TrainPipelineSparseDist as TrainPipelineSparseDist

_HOMES = {
    "recipes.door.model": ("DistributedModelParallel", "get_default_sharders"),
    "recipes.door.pipeline": ("TrainPipelineBase", "TrainPipelineSparseDist"),
}
__all__, _load = export_lazily("rowwise", _HOMES)


def __getattr__(name: str) -> object:
    if name in __all__:
        import_torchrec("torchrec.distributed")
    return _load(name)
