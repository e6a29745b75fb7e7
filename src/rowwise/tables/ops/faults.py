"""Faults that kernels find on a GPU: the host learns of them one step later, without waiting for the device."""

from typing import ClassVar

import torch
from torch import Tensor

from rowwise.base.errors import DeviceError

IDS, GRADIENTS, SLOTS = range(3)  # indices of the words


class FaultWord:
    """Fault flags of a device: a kernel sets them, and the host reads them when a later operator begins.

    Rows that a fault concerns keep their values. `check_faults` waits for the device: at the end of a run, and
    before anything is saved.
    """

    _by_device: ClassVar[dict[torch.device, "FaultWord"]] = {}

    @classmethod
    def of(cls, device: torch.device) -> "FaultWord":
        """The words of the device; `cuda` is this thread's current GPU, which tensors name by its number."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in cls._by_device:
            cls._by_device[device] = cls(device)
        return cls._by_device[device]

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._words = torch.zeros(3, dtype=torch.int32, device=device)
        self._on_host = torch.zeros(3, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._copied: torch.cuda.Event | None = None  # of a copy in flight

    def begin(self) -> Tensor:
        """The words for an operator's kernels; raises if the last finished copy has a fault."""
        if self._copied is not None and self._copied.query():
            self._raise_if_set()
        return self._words

    def end(self) -> None:
        """Copy the words to the host, behind the kernels launched so far; on the CPU a fault raises at once."""
        if self._device.type == "cpu":
            self._on_host.copy_(self._words)
            self._raise_if_set()
        elif self._device.type == "cuda" and (self._copied is None or self._copied.query()):
            self._on_host.copy_(self._words, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def set_bad_gradient(self, bad: Tensor) -> None:
        """Set the word of gradients where `bad`, a tensor of one element on the device, is true."""
        self._words[GRADIENTS].bitwise_or_(bad)
        self.end()

    def check(self) -> None:
        """Wait for all kernels launched so far, and raise if one found a fault."""
        self._on_host.copy_(self._words)
        self._raise_if_set()

    def _raise_if_set(self) -> None:
        ids, gradients, slots = self._on_host.tolist()
        self._copied = None
        if not (ids or gradients or slots):
            return
        self._words.zero_()
        self._on_host.zero_()
        lead = f"a kernel on {self._device} found, in this step or the one before,"
        if slots:  # first: the rows without a slot are ids outside the cache to later kernels
            raise DeviceError(
                f"{lead} a batch with more rows of a table than its cache on the device has slots; those without one "
                f"were neither read nor updated. Give the tables more memory (`memory`), or use fewer samples a batch"
            )
        if ids:
            raise DeviceError(
                f"{lead} an id outside its table; it was neither read nor updated. Look the batch up on the CPU, "
                f"which names feature, sample and id"
            )
        raise DeviceError(
            f"{lead} a loss or a gradient that is not finite; the weights that it reached were not changed. Lower the "
            f"learning rate, clip (`train.clip`, `clip` of a table's optimizer), or repeat the step on the CPU, which "
            f"names layer, table or feature"
        )


def check_faults(device: torch.device) -> None:
    """Wait for the kernels of a GPU, and raise if one has found a bad id or gradient, or too few slots."""
    if device.type == "cuda":
        FaultWord.of(device).check()
