"""Copies from the host to a GPU that the host does not wait for."""

import torch
from torch import Tensor


def pinned(x: Tensor) -> Tensor:
    """A copy in page-locked memory, which a GPU reads asynchronously; without a GPU the tensor itself."""
    return x.pin_memory() if torch.cuda.is_available() else x


def copy_to(x: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, ready for later work on the current stream; the host does not wait."""
    if x.device.type == device.type:
        return x
    return pinned(x).to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
