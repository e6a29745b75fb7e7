"""The `DistributedDataParallel` around a lookup, which takes all parameters for copies of those of rank 0."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel


def running_ddp() -> Any:
    """The `DistributedDataParallel` whose forward is running, or None."""
    return DistributedDataParallel._active_ddp_module
