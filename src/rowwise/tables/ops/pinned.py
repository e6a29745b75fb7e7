"""Copies from the host to a GPU that the host does not wait for."""

import torch
from torch import Tensor


def pinned(x: Tensor) -> Tensor:
    """The tensor in memory that a GPU reads by itself; where there is no GPU, the tensor."""
    return x.pin_memory() if torch.cuda.is_available() else x


def copy_to(x: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, for what is launched on the current stream from now on."""
    if x.device.type == device.type:
        return x
    return pinned(x).to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
