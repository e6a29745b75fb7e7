"""An index of item vectors that proposes items to a query: inverted lists of faiss, of which a few are looked at.

Its order is never an answer: faiss sums dot products in other orders. Extra `retrieval`.

[Note: One thread for faiss] faiss brings an OpenMP runtime of its own beside torch's. The threads of two runtimes wait
for work on the same cores. So faiss has one thread, in each thread that calls it.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, final

import numpy as np
from torch import Tensor

from rowwise.base.errors import SpecError
from rowwise.serve.contents import reading_export

TRAINED_EACH = 64  # vectors that a list is trained by
ROUNDS = 10  # of k-means
MAX_LISTS = 1 << 15


def require_faiss(what: str) -> None:
    """Raise where faiss is not installed."""
    if find_spec("faiss") is None:
        raise SpecError(f"{what}: faiss is not installed", hint="pip install 'rowwise[retrieval]'")


def choose_lists(items: int) -> int:
    """About the square root of the number of items, as a power of 2."""
    return min(MAX_LISTS, 1 << round(np.log2(max(items, 1)) / 2))


@final
class ItemIndex:
    """Inverted lists of item vectors.

    Args:
        index: of faiss.
    """

    def __init__(self, index: Any) -> None:
        """By `build` or `open`."""
        self._index = index

    @classmethod
    def build(cls, items_ID: Tensor, lists: int) -> Self:
        """Group the vectors by k-means; the same vectors give the same index."""
        faiss = _faiss()
        dim = items_ID.shape[1]
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
        index.cp.niter, index.cp.max_points_per_centroid, index.cp.spherical = ROUNDS, TRAINED_EACH, True
        index.cp.min_points_per_centroid = 1  # else few vectors are warned of
        index.train(items_ID.numpy())
        index.add(items_ID.numpy())
        return cls(index)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map a file, whose pages all processes share."""
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
        """Places of at most so many items, the nearest first, out of the lists that are nearest to the query."""
        faiss = _faiss()
        _, places_1C = self._index.search(
            query_D.numpy()[None], min(count, self.items), params=faiss.SearchParametersIVF(nprobe=probes)
        )
        return places_1C[0][places_1C[0] >= 0]

    def items_compared(self, query_D: Tensor, probes: int) -> int:
        """How many items these lists hold: the cost of a search."""
        _faiss()
        _, lists_1P = self._index.quantizer.search(query_D.numpy()[None], probes)
        return sum(self._index.invlists.list_size(int(number)) for number in lists_1P[0])


def _faiss() -> Any:
    """The library, with one thread in this thread. See [Note: One thread for faiss]."""
    import faiss

    faiss.omp_set_num_threads(1)
    return faiss
