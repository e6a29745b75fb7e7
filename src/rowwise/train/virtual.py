"""Virtual shards: a global batch is cut the same way for any number of ranks, and each shard computed the same way.

`determinism: elastic` promises the same bits for any world size that divides the number of shards. What could differ
is kept from differing here: the cut goes by the number of samples alone, in whole blocks, so that rows add up as ever
(see [Note: Merge order]); a shard is a batch of its own, whose tensors begin where torch's memory begins, with torch's
dense operators on one thread; and what it draws (dropout) follows from seed, step and shard. Known limits: statistics
that a forward keeps in buffers, which each rank has of its own shards; and, where ranks are threads, draws, as torch's
generator is one for all of them.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch

from rowwise.batch import Batch
from rowwise.errors import BatchError
from rowwise.ops import jagged
from rowwise.ops.reference.sums import BLOCK
from rowwise.train.objective import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualShards:
    """The virtual shards of one rank; all ranks have equally many, in order."""

    count: int  # of all ranks
    rank: int
    world: int
    seed: int

    def of(self, batches: Sequence[Batch], samples_W: Sequence[int]) -> list[Batch]:
        """This rank's shards of the global batch; it holds their samples."""
        sizes_V, each = cut(sum(samples_W), self.count), self.count // self.world
        want_W = [sum(sizes_V[w * each : (w + 1) * each]) for w in range(self.world)]
        if len(batches) != 1 or list(samples_W) != want_W:
            got = f"{len(batches)} batches" if len(batches) != 1 else f"{list(samples_W)} samples on {self.world} ranks"
            even = f"a global batch of a multiple of {self.count * BLOCK} samples is cut evenly"
            want = f"want one batch a rank, of {want_W} samples: whole blocks of {BLOCK}; {even}"
            raise BatchError(f"elastic, {self.count} virtual shards: got {got}; {want}")
        return split(batches[0], sizes_V[self.rank * each : (self.rank + 1) * each])

    @contextmanager
    def chance(self, step: int, place: int) -> Iterator[None]:
        """Random numbers inside follow from seed, step and shard, the `place`-th of this rank."""
        shard = self.rank * (self.count // self.world) + place
        digest = hashlib.blake2b(f"{self.seed} {step} {shard}".encode(), digest_size=8).digest()
        seed, on_gpu = int.from_bytes(digest), torch.cuda.is_initialized()
        with torch.random.fork_rng([torch.cuda.current_device()] if on_gpu else []):
            # Not torch.manual_seed: it leaves a note for each kind of device that is not in use, a millisecond each.
            torch.default_generator.manual_seed(seed)
            if on_gpu:
                torch.cuda.manual_seed(seed)
            yield


def cut(samples: int, shards: int) -> list[int]:
    """Samples in each shard: whole blocks, as evenly as they can be dealt; only the last of all may be short."""
    blocks = -(-samples // BLOCK)
    ends = [min(samples, BLOCK * (blocks * shard // shards)) for shard in range(shards + 1)]
    return [end - begin for begin, end in pairwise(ends)]


def split(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """The batch cut along its samples; each part has memory of its own."""
    given = batch.dense_BF, batch.labels_BK, batch.weights_B, batch.keys_B, batch.times_B
    # Cloned: a kernel may take a few numbers by themselves, up to the next multiple of a vector in memory.
    cuts = [[None] * len(sizes) if x is None else [part.clone() for part in x.split(list(sizes))] for x in given]
    sparse = jagged.split(batch.sparse, sizes)
    return [
        Batch(dense_BF=dense_BF, sparse=ids, labels_BK=labels_BK, weights_B=weights_B, keys_B=keys_B, times_B=times_B)
        for ids, dense_BF, labels_BK, weights_B, keys_B, times_B in zip(sparse, *cuts, strict=True)
    ]


def join(outcomes: Sequence[Outcome], sizes: Sequence[int]) -> Outcome:
    """The outcome of the batch that was cut."""
    logits = [outcome.logits_BK for outcome in outcomes if outcome.logits_BK is not None]
    weighed = [
        outcome.loss.detach() * (size / sum(sizes)) for outcome, size in zip(outcomes, sizes, strict=True) if size
    ]
    loss = torch.stack(weighed).sum() if weighed else outcomes[0].loss.detach()
    return Outcome(loss, torch.cat(logits) if logits else None)
