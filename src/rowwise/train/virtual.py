"""Virtual shards: a global batch is cut the same way for any number of ranks, and each shard computed the same way.

`determinism: elastic` promises the same bits for any world size that divides the number of shards, by four rules. The
cut depends only on the number of samples, in whole blocks, so that contributions to a row merge in one order (see
[Note: Merge order]). Each shard is a batch with memory of its own, so that vector kernels see the same alignment.
Torch's dense operators run on one thread. Random numbers (dropout) are a function of seed, step and shard.

Known limits: buffers that a forward changes (batch norm) differ between ranks, as each sees its own shards; ranks that
are threads share torch's generator, so their dropout differs.
"""

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise

import torch

from rowwise.base.errors import BatchError
from rowwise.tables.batch import Batch
from rowwise.tables.ops import jagged
from rowwise.tables.ops.reference.sums import BLOCK
from rowwise.train.draws import seeded
from rowwise.train.objective import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualShards:
    """The virtual shards of one rank: count / world consecutive shards."""

    count: int  # of all ranks
    rank: int
    world: int
    seed: int

    def split_batch(self, batches: Sequence[Batch], samples_W: Sequence[int]) -> list[Batch]:
        """This rank's shards of the global batch; raises unless each rank has exactly the samples of its shards."""
        sizes_V, per_rank = cut(sum(samples_W), self.count), self.count // self.world
        expected_W = [sum(sizes_V[w * per_rank : (w + 1) * per_rank]) for w in range(self.world)]
        if len(batches) != 1 or list(samples_W) != expected_W:
            got = f"{len(batches)} batches" if len(batches) != 1 else f"{list(samples_W)} samples on {self.world} ranks"
            hint = f"a global batch of a multiple of {self.count * BLOCK} samples is cut evenly"
            raise BatchError(
                f"elastic, {self.count} virtual shards: got {got}",
                f"one batch per rank, of {expected_W} samples: whole blocks of {BLOCK}",
                hint=hint,
            )
        return split(batches[0], sizes_V[self.rank * per_rank : (self.rank + 1) * per_rank])

    def seeded_draws(self, step: int, index: int) -> AbstractContextManager[None]:
        """Seed torch from seed, step and shard (this rank's `index`-th) for the with block, then restore its state."""
        shard = self.rank * (self.count // self.world) + index
        digest = hashlib.blake2b(f"{self.seed} {step} {shard}".encode(), digest_size=8).digest()
        return seeded(int.from_bytes(digest))


def cut(samples: int, shards: int) -> list[int]:
    """Samples of each shard: whole blocks, as even as possible; only the last block of all may be short."""
    blocks = -(-samples // BLOCK)
    ends = [min(samples, BLOCK * (blocks * shard // shards)) for shard in range(shards + 1)]
    return [end - begin for begin, end in pairwise(ends)]


def split(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """The batch cut along its samples; each part has memory of its own."""
    tensors = batch.dense_BF, batch.labels_BK, batch.weights_B, batch.keys_B, batch.times_B
    # Cloned: a kernel may compute elements before the next aligned address by scalar code, which rounds differently.
    cuts = [[None] * len(sizes) if x is None else [part.clone() for part in x.split(list(sizes))] for x in tensors]
    sparse = jagged.split(batch.sparse, sizes)
    return [
        Batch(dense_BF=dense_BF, sparse=ids, labels_BK=labels_BK, weights_B=weights_B, keys_B=keys_B, times_B=times_B)
        for ids, dense_BF, labels_BK, weights_B, keys_B, times_B in zip(sparse, *cuts, strict=True)
    ]


def join(outcomes: Sequence[Outcome], sizes: Sequence[int]) -> Outcome:
    """The outcome of the whole batch, from the outcomes of its shards."""
    logits = [outcome.logits_BK for outcome in outcomes if outcome.logits_BK is not None]
    losses = [
        outcome.loss.detach() * (size / sum(sizes)) for outcome, size in zip(outcomes, sizes, strict=True) if size
    ]
    loss = torch.stack(losses).sum() if losses else outcomes[0].loss.detach()
    return Outcome(loss, torch.cat(logits) if logits else None)
