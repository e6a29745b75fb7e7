"""What every wire codec has to do: sizes that follow from shapes, bounded errors, any shape, anywhere in a message."""

import hashlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise.parallel.comm.codec import ScaleGroups, codec_of, gradient_scale, scale_groups_of, sum_codec_of
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard.vectors import Block, ExpectedBlock, WireCodecs
from rowwise.planning.perf.exchange import NarrowWires
from rowwise.planning.perf.hardware import Coding
from rowwise.tables.spec import RUN, WIRE_TYPES, FarType, WireType
from rowwise.train.coded import CodedSum

SHARE = {WireType.FP32: 0.0, WireType.FP16: 2.0**-11, WireType.BF16: 2.0**-8, WireType.INT8: 1 / 255 / 2 * 1.001}
WIDTHS = st.lists(st.sampled_from([1, 3, 8, 16, 48, 100]), min_size=1, max_size=4)
kinds = pytest.mark.parametrize("kind", WireType)


def make_block(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def largest(block_ND, scales):
    """Of each number, the range of those that it is encoded with, for a codec with scales; itself for the others."""
    groups = [s.width for s in scales for _ in range(s.columns // s.width)] or [block_ND.shape[1]]
    ranges = [part.amax(1, True) - part.amin(1, True) for part in block_ND.split(groups, 1)]
    return torch.cat([x.expand(-1, group) for x, group in zip(ranges, groups, strict=True)], 1)


@kinds
@given(
    rows=st.integers(0, 5), widths=WIDTHS, by_vector=st.booleans(), before=st.integers(0, 5), seed=st.integers(0, 99)
)
def test_what_is_decoded_is_as_near_as_the_codec_promises(kind, rows, widths, by_vector, before, seed):
    codec, scales, shape = codec_of(kind), scale_groups_of(widths) if by_vector else (), (rows, sum(widths))
    block_ND = make_block(*shape, seed)
    coded_P = codec.encode(block_ND, scales)
    assert coded_P.dtype == torch.uint8
    assert coded_P.shape == (codec.block_bytes(shape, scales),)
    message_P = torch.cat([torch.zeros(before, dtype=torch.uint8), coded_P])  # it may begin anywhere
    decoded_ND = codec.decode(message_P[before:], shape, scales)
    assert decoded_ND.dtype == torch.float32
    assert decoded_ND.shape == shape
    if rows:
        reach = largest(block_ND, scales) if kind.facts.header_bytes else block_ND.abs()
        assert ((decoded_ND - block_ND).abs() <= reach * SHARE[kind] + 2.0**-20).all()
    assert codec.lossy or decoded_ND.equal(block_ND)


@kinds
@pytest.mark.parametrize("shape", [(0, 0), (0, 7), (3, 0)])
def test_empty_blocks_take_nothing(kind, shape):
    codec = codec_of(kind)
    coded_P = codec.encode(torch.empty(shape))
    assert codec.block_bytes(shape) == len(coded_P) == 0
    assert codec.decode(coded_P, shape).shape == shape


@kinds
@pytest.mark.parametrize("width", [1, 3, 4, 16, 17])
def test_the_size_of_a_vector_is_known_without_the_codec(kind, width):
    codec = codec_of(kind)
    assert codec.block_bytes((5, width)) == 5 * kind.vector_bytes(width)
    assert codec.block_bytes((5, 3 * width), (ScaleGroups(3 * width, width),)) == 15 * kind.vector_bytes(width)


@kinds
def test_parts_of_a_larger_matrix_are_encoded_as_copies_are(kind):
    codec, whole = codec_of(kind), make_block(6, 40, seed=1)
    assert codec.encode(whole[:, 8:24]).equal(codec.encode(whole[:, 8:24].clone()))


@kinds
@pytest.mark.parametrize("samples", [1, 7, 1 << 20])
def test_gradients_of_a_mean_over_many_samples_keep_their_leading_bits(kind, samples):
    codec, scale = codec_of(kind), gradient_scale(samples)
    block_ND = make_block(4, 16, seed=2) / samples
    decoded_ND = codec.decode(codec.encode(block_ND, loss_scale=scale), (4, 16), loss_scale=scale)
    reach = largest(block_ND, ()) if kind.facts.header_bytes else block_ND.abs()
    assert ((decoded_ND - block_ND).abs() <= reach * SHARE[kind] + 2.0**-20 / samples).all()


@kinds
def test_numbers_that_are_not_finite_do_not_come_back_finite(kind):
    codec, block_ND = codec_of(kind), make_block(3, 8, seed=3)
    block_ND[1, 2] = math.inf
    decoded_ND = codec.decode(codec.encode(block_ND), (3, 8))
    assert not decoded_ND[1, 2].isfinite()
    assert decoded_ND[[0, 2]].isfinite().all()


FAR = ("fp32", "bf16", "int8", "int4", "topk:1%", "topk:12.5%")


@pytest.mark.parametrize("name", FAR)
@given(rows=st.integers(0, 5), spread=st.floats(-6, 6), before=st.integers(0, 5), seed=st.integers(0, 99))
def test_runs_of_sums_are_as_near_as_their_type_promises(name, rows, spread, before, seed):
    kind = FarType.parse(name)
    codec, shape = sum_codec_of(kind), (rows, RUN)
    runs_RC = make_block(*shape, seed) * 10**spread
    coded_P = codec.encode(runs_RC)
    assert coded_P.dtype == torch.uint8
    assert coded_P.shape == (codec.block_bytes(shape),) == (rows * kind.run_bytes,)
    assert codec.encode(runs_RC.clone()).equal(coded_P)
    message_P = torch.cat([torch.zeros(before, dtype=torch.uint8), coded_P])
    decoded_RC = codec.decode(message_P[before:], shape)
    assert decoded_RC.shape == shape
    assert decoded_RC.dtype == torch.float32
    assert codec.lossy != kind.facts.exact
    if kind.kept < RUN:
        least_kept_R1 = runs_RC.abs().topk(kind.kept).values[:, -1:]
        sent = decoded_RC != 0
        assert (sent.sum(1) == kind.kept).all()
        assert decoded_RC[sent].equal(runs_RC[sent])
        assert (runs_RC[~sent].abs() <= least_kept_R1.expand_as(runs_RC)[~sent]).all()
    elif name == "int4":  # ends of the range may move inwards by up to 12 fiftieths of it, for a smaller squared error
        reach_R1 = runs_RC.amax(1, True) - runs_RC.amin(1, True) if rows else runs_RC
        plain_RC = (reach_R1 / 15 / 2).expand_as(runs_RC)
        assert ((decoded_RC - runs_RC).square().sum(1) <= (plain_RC.square() * 1.001).sum(1)).all()
        assert ((decoded_RC - runs_RC).abs() <= reach_R1 * (12 / 50 + 1 / 30)).all()


@pytest.mark.parametrize("name", ["int4", "topk:1%"])
def test_numbers_of_sums_that_are_not_finite_do_not_come_back_finite(name):
    codec, runs_RC = sum_codec_of(FarType.parse(name)), make_block(3, RUN, seed=3)
    runs_RC[1, 2] = math.nan
    decoded_RC = codec.decode(codec.encode(runs_RC), (3, RUN))
    assert not decoded_RC[1, 2].isfinite()
    assert decoded_RC[[0, 2]].isfinite().all()


def test_sums_of_four_bits_are_the_same_on_all_instruction_sets(isa):
    whole = torch.randint(-9999, 9999, (40, RUN), generator=torch.Generator().manual_seed(4))
    codec, runs_RC = sum_codec_of(FarType.parse("int4")), whole.float() / 977
    coded_P = codec.encode(runs_RC)
    bits = (coded_P, codec.decode(coded_P, (40, RUN)))
    found = [hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16] for tensor in bits]
    assert found == ["ba0d26e8bdd15c3b", "baeddcf1db5504f1"]


def test_every_wire_type_has_a_record():
    assert set(WireType) < set(WIRE_TYPES)
    assert all(codec_of(kind).lossy != facts.exact for kind, facts in WIRE_TYPES.items())
    assert {facts.coded_as for facts in WIRE_TYPES.values()} == set(Coding.__struct_fields__)
    assert Coding.__struct_fields__ == NarrowWires.__struct_fields__


class Sixteenths:
    """A codec that `rowwise` does not know: whole sixteenths, a byte each."""

    lossy = True

    def block_bytes(self, shape, scales=()):
        return shape[0] * shape[1]

    def encode(self, block_ND, scales=(), loss_scale=1.0):
        return (block_ND * 16).round().to(torch.int8).flatten().view(torch.uint8)

    def decode(self, coded_P, shape, scales=(), loss_scale=1.0):
        return coded_P.view(torch.int8).view(shape) / 16


def exchange_and_sum(comm):
    """Vectors that a rank gets, and a sum over ranks."""
    vectors_ND = torch.full((2, 3), comm.rank + 1 / 16 + 1 / 100)
    codecs = WireCodecs(comm, (Sixteenths(), Sixteenths()))
    pending = codecs.exchange_blocks(
        [[Block(vectors_ND)]] * 2, [[ExpectedBlock((2, 3))]] * 2, "vectors", vectors_ND.device
    )
    dense = CodedSum(comm, Sixteenths(), feedback=False)
    (total_N,) = dense.finish([dense.start(0, torch.full((5,), comm.rank + 0.51))], [5])
    return pending.wait(), total_N


def test_vectors_and_sums_travel_by_a_codec_of_another_module():
    (((own_ND,), (other_ND,)), total_N), _ = run_threads(2, exchange_and_sum)
    assert own_ND.equal(torch.full((2, 3), 1 / 16 + 1 / 100))
    assert other_ND.equal(torch.full((2, 3), 1 + 1 / 16))
    assert total_N.equal(torch.full((5,), 2.0))
