"""All-reduce in two levels: exact among near ranks, encoded between groups of near ranks.

Near are the ranks of a group of hosts or, without groups, of a host. A group of ranks reduce-scatters its sum in equal
shares over its first n ranks, n the size of the smallest group. The ranks that hold the same share in all groups
all-reduce it by `CodedSum`. Then each group all-gathers the shares. So a number crosses slow links once, and only there
it is encoded. All ranks decode the same bytes, so all end with the same bits. Further ranks of larger groups are idle.

Known limits: sums are in float32; only the first of three steps overlaps with a backward.
"""

from collections.abc import Sequence
from typing import final

from torch import Tensor
from torch.nn import functional as F

from rowwise.parallel.comm.codec import sum_codec_of
from rowwise.parallel.comm.interface import Comm, Work
from rowwise.tables.spec import RUN, FarType
from rowwise.train.coded import CodedSum


@final
class TwoLevelSum:
    """Sums of buckets, with the methods of `CodedSum`. Construction is a collective.

    Args:
        comm: all ranks.
        far: the type in which shares travel between groups.
        feedback: whether to add rounding errors to the numbers of the next step.
    """

    def __init__(self, comm: Comm, far: FarType, *, feedback: bool) -> None:
        near_G = comm.topology.near_ranks
        self._holders = min(map(len, near_G))
        holders_KG = [[ranks[k] for ranks in near_G] for k in range(self._holders)]
        idle = [[rank] for ranks in near_G for rank in ranks[self._holders :]]
        self._near, far_comm = comm.split(near_G), comm.split([*holders_KG, *idle])
        self._coded = CodedSum(far_comm, sum_codec_of(far), feedback=feedback and not far.facts.exact)

    @property
    def residuals(self) -> dict[int, Tensor]:
        """Rounding errors of this rank's share by bucket; zeros on a rank without a share."""
        return self._coded.residuals

    def start(self, bucket: int, flat_N: Tensor) -> Work:
        """Start the reduce-scatter of the bucket among near ranks."""
        share = self._share(len(flat_N))
        padded_N = F.pad(flat_N.float(), (0, share * self._holders - len(flat_N)))
        return self._near.reduce_scatter(padded_N, self._splits(share), "dense")

    def finish(self, handles: Sequence[Work], sizes: Sequence[int]) -> list[Tensor]:
        """The sums of all buckets, which have these sizes."""
        shares = [self._share(size) for size in sizes]
        # Several passes, so that transfers of buckets overlap: a share travels to other groups while the next bucket
        # is still summed among near ranks.
        near: list[Tensor] = []
        far: list[Work] = []
        for k, (handle, share) in enumerate(zip(handles, shares, strict=True)):
            near.append(handle.wait())
            far.append(self._coded.start(k, F.pad(near[k], (0, share - len(near[k])))))
        totals = self._coded.finish(far, shares)
        gathers = [
            self._near.all_gather(total[: len(part)].contiguous(), self._splits(share), "dense")
            for total, part, share in zip(totals, near, shares, strict=True)
        ]
        return [gather.wait()[:size] for gather, size in zip(gathers, sizes, strict=True)]

    def _share(self, size: int) -> int:
        """Elements of a share, rounded up to whole runs."""
        return -(-size // (self._holders * RUN)) * RUN

    def _splits(self, share: int) -> list[int]:
        return [share if rank < self._holders else 0 for rank in range(len(self._near.ranks))]
