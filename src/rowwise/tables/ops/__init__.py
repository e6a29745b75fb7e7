"""Tensor math of one device; knows no ranks. Importing it loads the native operators.

`reference` is the definition; `_cpp` holds the CPU kernels. Which one runs is decided by torch's dispatcher
from the device of the tensors.
"""

from rowwise.tables.ops import native

native.load()
