"""Reference of row formats: reading stored rows as floats, and writing them back rounded stochastically or to nearest.

Stored rows are bytes [M, P] here, for all types. See [Note: Row formats] in `_cpp/tables.h` and
[Note: Stochastic rounding] in `_cpp/rowtype.h`.
"""

import torch
from torch import Tensor

from rowwise.tables.ops.layout import RowFormat
from rowwise.tables.spec import RowType

CODE_BITS = 22  # fraction bits of an int8 code before rounding
MAX_HALF, MAX_BFLOAT, MAX_INT8 = 65504.0, float.fromhex("0x1.FEp127"), float(torch.tensor(1e38))


def read_rows(packed_MP: Tensor, form: RowFormat) -> Tensor:
    """Stored rows as floats [M, D]."""
    match form.type:
        case RowType.FP32:
            return packed_MP.view(torch.float32)
        case RowType.FP16:
            return packed_MP.view(torch.float16).float()
        case RowType.BF16:
            return packed_MP.view(torch.bfloat16).float()
        case RowType.INT8 | RowType.INT4:
            scale_MD, low_MD = _spread(packed_MP, form)
            codes_MP = packed_MP[:, _header(form) :]
            if form.type is RowType.INT4:
                codes_MP = torch.stack([codes_MP & 15, codes_MP >> 4], 2).flatten(1)
            return codes_MP[:, : form.dim].float() * scale_MD + low_MD


def write_rows(w_MD: Tensor, form: RowFormat, bits_MD: Tensor) -> Tensor:
    """Floats as stored rows [M, P], rounded stochastically without bias by 32 random bits each."""
    match form.type:
        case RowType.FP32:
            return w_MD.view(torch.uint8)
        case RowType.FP16:
            return _halves(w_MD.clamp(-MAX_HALF, MAX_HALF), bits_MD >> 19)
        case RowType.BF16:
            # Add noise below the bits that are kept, then truncate: no special cases.
            pattern = w_MD.clamp(-MAX_BFLOAT, MAX_BFLOAT).view(torch.int32).long() & 0xFFFFFFFF
            return _narrow((pattern + (bits_MD >> 16)) >> 16)
        case RowType.INT8:
            return _codes(w_MD, form, bits_MD >> (32 - CODE_BITS))
        case RowType.INT4:
            raise ValueError("rows of int4 are not updated")


def pack(rows: Tensor, group: int) -> Tensor:
    """Rows as int8, rounded to nearest; a row that is not finite gets a NaN scale."""
    form = RowFormat(RowType.INT8, rows.shape[1], group)
    finite_N = (rows * 0 == 0).all(1)
    half_ND = torch.full_like(rows, 1 << (CODE_BITS - 1), dtype=torch.int64)
    packed_NP = _codes(torch.where(finite_N.unsqueeze(1), rows, 0.0), form, half_ND)
    header = _header(form)
    scales = packed_NP[:, :header].clone().view(torch.float32)
    scales[:, 0::2] = torch.where(finite_N.unsqueeze(1), scales[:, 0::2], torch.nan)
    packed_NP[:, :header] = scales.view(torch.uint8)
    return packed_NP


def unpack(packed: Tensor, dim: int, group: int) -> Tensor:
    """Packed int8 rows as floats."""
    return read_rows(packed, RowFormat(RowType.INT8, dim, group))


def _halves(w_MD: Tensor, noise_MD: Tensor) -> Tensor:
    pattern = w_MD.view(torch.int32).long() & 0xFFFFFFFF
    magnitude = pattern & 0x7FFFFFFF
    normal = ((magnitude + noise_MD) >> 13) - (112 << 10)
    # Below 2^-14 halves are multiples of 2^-24, however small: more bits are cut than in the exponent's own step.
    small = ((w_MD.abs() + noise_MD.float() * 2.0**-37) * 2.0**24).long()
    return _narrow((pattern >> 16 & 0x8000) | torch.where(magnitude < 0x38800000, small, normal))


def _codes(w_MD: Tensor, form: RowFormat, noise_MD: Tensor) -> Tensor:
    packed_MP = torch.zeros(len(w_MD), form.bytes, dtype=torch.uint8, device=w_MD.device)
    header = _header(form)
    scales = []
    for first in range(0, form.dim, form.scale_group or form.dim):
        columns = slice(first, min(first + (form.scale_group or form.dim), form.dim))
        # Plus zero: either of -0 and +0 could be the minimum, and their bits differ.
        low_M, high_M = (x.clamp(-MAX_INT8, MAX_INT8) + 0.0 for x in w_MD[:, columns].aminmax(dim=1))
        scale_M = (high_M - low_M) * (torch.tensor(1.0, device=w_MD.device) / 255.0)
        flat_M = scale_M < 2.0**-126  # all weights are (nearly) equal
        inverse_M = torch.where(flat_M, 0.0, 1.0 / scale_M)
        scales += [torch.where(flat_M, 0.0, scale_M), low_M]
        codes = ((w_MD[:, columns] - low_M.unsqueeze(1)) * inverse_M.unsqueeze(1)).clamp(0.0, 255.0)
        # In whole numbers: a sum of floats would be rounded, and large codes go up more often than down.
        fixed = (codes * float(1 << CODE_BITS)).long() + noise_MD[:, columns]
        packed_MP[:, header + columns.start : header + columns.stop] = (fixed >> CODE_BITS).to(torch.uint8)
    packed_MP[:, :header] = torch.stack(scales, 1).view(torch.uint8)
    return packed_MP


def _spread(packed_MP: Tensor, form: RowFormat) -> tuple[Tensor, Tensor]:
    """Scale and offset of each column [M, D]."""
    scales = packed_MP[:, : _header(form)].clone().view(torch.float32)
    group_D = torch.arange(form.dim, device=packed_MP.device) // (form.scale_group or form.dim)
    return scales[:, 0::2][:, group_D], scales[:, 1::2][:, group_D]


def _narrow(bits_MD: Tensor) -> Tensor:
    """The low 16 bits of each number, as bytes."""
    # To int16 by way of its sign, as a number past its range has no defined value there.
    return torch.where(bits_MD > 0x7FFF, bits_MD - 0x10000, bits_MD).to(torch.int16).view(torch.uint8)


def _header(form: RowFormat) -> int:
    """Bytes of scales and offsets."""
    return 8 * -(-form.dim // (form.scale_group or form.dim))
