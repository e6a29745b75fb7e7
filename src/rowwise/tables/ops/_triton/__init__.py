"""The operators of a GPU: Triton kernels with the reference's bits, one source for NVIDIA and AMD.

`rows`, `sums` and `rules` are parts of kernels; `lookup` and `update` are the kernels; `specialise` chooses their
constants; `route` sorts the ids of a batch; `rearrange` are the kernels of batches that `jagged` launches; `operators`
launches the others. Imported when the first tensor on a GPU comes.

[Note: Bits on a GPU]
The order of every sum is written in the source: ids of a bag one after the other, contributions to a row as in
[Note: Merge order], columns as in [Note: Column sums]. Kernels are compiled without fused multiply-add, and divide and
take roots by the correctly rounded instructions. No kernel has an atomic, and no program reads what another program
of its launch wrote, so the bits do not depend on the order in which programs run.
"""
