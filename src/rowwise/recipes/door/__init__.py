"""TorchRec's `DistributedModelParallel` over rowwise's tables; `rowwise.torchrec` has the public names.

`model` is the entry point. It reads the collections of a module (`sources`), plans them (`plans`), and lets TorchRec
replace each by a `RowwiseCollection` (`collection`), whose optimizer is a `RowwiseFusedOptimizer` (`fused`). TorchRec
is imported here and in `recipes/torchrec.py` only.
"""
