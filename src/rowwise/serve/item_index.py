"""An approximate index of item vectors: inverted lists (IVF) of faiss, of which a few are probed per query.

It yields candidates only, as faiss sums dot products in another order. Needs the extra `retrieval`.

[Note: One thread for faiss] faiss has an OpenMP runtime besides that of torch, and the idle threads of both would spin
on the same cores. So faiss is limited to one thread, in each calling thread.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, final

import numpy as np
from torch import Tensor

from rowwise.base.errors import SpecError
from rowwise.serve.contents import reading_export

TRAINED_PER_LIST = 64  # training vectors per list
ROUNDS = 10  # of k-means
MAX_LISTS = 1 << 15


def require_faiss(what: str) -> None:
    """Raise unless faiss is installed."""
    if find_spec("faiss") is None:
        raise SpecError(f"{what}: faiss is not installed", hint="pip install 'rowwise[retrieval]'")


def choose_lists(items: int) -> int:
    """Number of lists: about the square root of the items, as a power of 2."""
    return min(MAX_LISTS, 1 << round(np.log2(max(items, 1)) / 2))


@final
class ItemIndex:
    """Inverted lists of item vectors.

    Args:
        index: an index of faiss.
    """

    def __init__(self, index: Any) -> None:
        self._index = index

    @classmethod
    def build(cls, items_ID: Tensor, lists: int) -> Self:
        """Cluster the vectors by k-means; deterministic."""
        faiss = _faiss()
        dim = items_ID.shape[1]
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
        index.cp.niter, index.cp.max_points_per_centroid, index.cp.spherical = ROUNDS, TRAINED_PER_LIST, True
        index.cp.min_points_per_centroid = 1  # silences a warning on few vectors
        index.train(items_ID.numpy())
        index.add(items_ID.numpy())
        return cls(index)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Memory-map a file, with pages shared by all processes."""
        require_faiss(f"{path.parent.parent} has an index of items")
        faiss = _faiss()
        with reading_export(path, RuntimeError):
            return cls(faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC))

    def write(self, path: Path) -> None:
        _faiss().write_index(self._index, str(path))

    @property
    def items(self) -> int:
        return int(self._index.ntotal)

    def propose(self, query_D: Tensor, count: int, probes: int) -> np.ndarray:
        """Row numbers of up to `count` items, nearest first, from the `probes` nearest lists."""
        faiss = _faiss()
        _, places_1C = self._index.search(
            query_D.numpy()[None], min(count, self.items), params=faiss.SearchParametersIVF(nprobe=probes)
        )
        return places_1C[0][places_1C[0] >= 0]

    def items_compared(self, query_D: Tensor, probes: int) -> int:
        """Number of items in the probed lists: the cost of a search."""
        _faiss()
        _, lists_1P = self._index.quantizer.search(query_D.numpy()[None], probes)
        return sum(self._index.invlists.list_size(int(number)) for number in lists_1P[0])


def _faiss() -> Any:
    """The library, limited to one thread. See [Note: One thread for faiss]."""
    import faiss

    faiss.omp_set_num_threads(1)
    return faiss
