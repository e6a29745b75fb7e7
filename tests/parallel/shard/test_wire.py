"""What travels between ranks is as exact as the codec of each link promises, and what a rank keeps is exact."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel.shard.equal import SEED, look_up, make_sharded, make_steps, place, train
from parallel.shard.wires import FLAT, IN_HOSTS, KINDS, LAYOUTS, SIZES_W, WORLD, by_host, codec_of, make_table

from rowwise import Embeddings, Jagged, Plan, Pooling, Sgd, Table, Tile
from rowwise.parallel.comm.codec import gradient_scale, scale_groups_of
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard.apply import copy_tables
from rowwise.parallel.shard.embeddings import ShardedEmbeddings
from rowwise.parallel.shard.vectors import Block, ExpectedBlock, WireCodecs
from rowwise.tables.spec import Codecs, Wire, WireType

kinds = st.sampled_from(KINDS)
wires = st.builds(
    lambda a, b, c, d: Wire(host=Codecs(forward=a, backward=b), network=Codecs(forward=c, backward=d)),
    kinds, kinds, kinds, kinds,
)  # fmt: skip


def allowed(x_ND, kind, widths=None, scale=1.0):
    """How far apart vectors may be after they have travelled once."""
    match kind:
        case WireType.FP32:
            return torch.zeros_like(x_ND)
        case WireType.FP16:  # eleven bits, and the smallest number there is
            return x_ND.abs() * 2.0**-11 + 2.0**-25 / scale
        case WireType.BF16:  # eight
            return x_ND.abs() * 2.0**-8
        case WireType.INT8:  # half a step, and what 32 bits lose in computing it
            offs = []
            for part in x_ND.split(widths or x_ND.shape[1], 1):
                low, high = part.aminmax(dim=1, keepdim=True)
                offs.append(((high - low) / 255 / 2 + part.abs().amax(1, True) * 2.0**-20).expand_as(part))
            return torch.cat(offs, 1)


def make_block(seed, n, d, size):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator) * size * 10.0 ** torch.randint(-3, 3, (n, 1), generator=generator)


@settings(max_examples=60)
@given(
    wire=wires,
    backward=st.booleans(),
    side_by_side=st.booleans(),
    rows=st.lists(st.integers(0, 5), min_size=16, max_size=16),
    widths=st.lists(st.sampled_from([1, 3, 8, 16, 48, 100]), min_size=1, max_size=4),
    samples=st.sampled_from([1, 7, 4096]),
    seed=st.integers(0, 1000),
)
def test_blocks_come_as_exact_as_the_codec_of_their_link_says(
    wire, backward, side_by_side, rows, widths, samples, seed
):
    scale, size = (gradient_scale(samples), 1 / samples) if backward else (1.0, 1.0)
    scales = scale_groups_of(widths) if side_by_side else ()

    def sent(sender, receiver):
        count, seeds = rows[4 * sender + receiver], [seed + 100 * sender + 10 * receiver + k for k in range(4)]
        blocks = [make_block(s, count, width, size) for s, width in zip(seeds, widths, strict=False)]
        return [torch.cat(blocks, 1)] if side_by_side else blocks

    def rank(comm):
        me, codecs = comm.rank, WireCodecs.of(comm, wire, backward=backward)
        expected_W = [[ExpectedBlock(x.shape, scales) for x in sent(other, me)] for other in range(4)]
        send_W = [[Block(x, scales) for x in sent(me, other)] for other in range(4)]
        received_W = codecs.exchange_blocks(send_W, expected_W, "x", torch.device("cpu"), scale).wait()
        for other in range(4):
            kind = codec_of(wire, other, me, backward)
            for mine, theirs in zip(received_W[other], sent(other, me), strict=True):
                assert mine.shape == theirs.shape
                limit = allowed(theirs, kind, widths if side_by_side else None, scale)
                assert ((mine - theirs).abs() <= limit).all(), (kind, other)

    run_threads(WORLD, rank, timeout_s=30)


def test_a_table_of_small_numbers_is_not_rounded_by_the_scale_of_its_neighbour():
    wire = Wire(host=Codecs(forward="int8"), network=Codecs(forward="int8"))
    tables = [Table(name=name, rows=40, dim=8, pooling=Pooling.SUM) for name in ("small", "large")]
    plan = Plan(world=2, tiles=tuple(Tile(table=t.name, rank=0, rows=(0, 40), cols=(0, 8)) for t in tables))
    lengths = torch.tensor([1, 0, 1, 1])
    sparse = Jagged(features=("small", "large"), values_N=torch.tensor([3, 5, 7]), lengths_FB=lengths)

    def rank(comm):
        sharded = ShardedEmbeddings(tables, plan, comm, wire=wire)
        for held in sharded.local_tiles():
            size = 1e-4 if held.tile.table == "small" else 10.0
            held.rows.copy_(size * torch.linspace(-1, 1, 320).view(40, 8))
        with torch.no_grad():
            vectors = sharded(sparse)
        if comm.rank == 1:  # what came from the other rank
            step = 1e-4 * 2 / 39 / 255
            assert (vectors["small"][0] - 1e-4 * torch.linspace(-1, 1, 320).view(40, 8)[3]).abs().max() <= step
            assert not vectors["small"][1].any()  # an empty bag is nothing

    run_threads(2, rank, timeout_s=30)


INT8 = Codecs(forward="int8", backward="int8")
WIDTHS = ((8, 24, 12), (16, 24, 40), (20, 16, 8), (48, 8, 8))  # of which no multiple of 16 is a measure
EVERYWHERE = ("table-wise", "row-wise", "column-wise", "table-row-wise", "grid", "pinwheel")


@pytest.mark.parametrize(("layout", "widths"), list(zip(EVERYWHERE, WIDTHS + WIDTHS, strict=False)))
def test_each_feature_is_rounded_by_its_own_scale_both_ways(layout, widths):
    """Features of 1e-4 and 1e3 side by side: the error of each follows from its own numbers."""
    sizes = {"small": 1e-4, "large": 1e3, "middle": 1e-2}
    tables = tuple(Table(name=n, rows=40, dim=d, optimizer=Sgd(lr=1.0)) for n, d in zip(sizes, widths, strict=True))
    (step,) = make_steps(tables, [(20, 7, 0, 30)], seed=widths[0])
    whole = Embeddings(tables, seed=SEED)
    for table, ups in zip(tables, step.ups[""].split(widths, 1), strict=True):
        whole.table(table.name).copy_(torch.randn(40, table.dim).clamp(-3, 3) * sizes[table.name])
        ups.copy_(ups.clamp(-3, 3) * sizes[table.name])
    before = copy.deepcopy(whole)
    ((_, wanted),) = train(whole, [step])
    rounding = 2 * 3 * 4 / 255 / 2 * 1.001  # half a step between the sums of four numbers of 3
    most = {t.name: int(step.batch.ids_of(t.name).bincount().max()) for t in tables}

    def rank(comm):
        sharded = ShardedEmbeddings(tables, place(tables, layout, WORLD), comm, wire=Wire(host=INT8, network=INT8))
        copy_tables(before, sharded)
        ((_, mine),) = train(sharded, [step.of(comm.rank)])
        off = (mine[""] - step.cut(wanted, comm.rank)[""]).abs()
        for table, off_BD in zip(tables, off.split(widths, 1), strict=True):
            # At most four parts are added up, and their sum is sent on once.
            assert (off_BD <= 5 * rounding * sizes[table.name]).all(), table.name
        for held in sharded.local_tiles():
            name = held.tile.table
            off_RD = (held.rows - whole.weights(name)[slice(*held.tile.rows), slice(*held.tile.cols)]).abs()
            # A gradient is no sum, and travels twice at most; those of a row are added up.
            assert (off_RD <= most[name] * 2 * (rounding / 4) * sizes[name]).all(), held.tile

    run_threads(WORLD, rank, timeout_s=30)


def test_the_scale_of_gradients_is_a_power_of_two_that_keeps_those_of_a_mean_in_range():
    for samples in (0, 1, 2, 3, 1000, 1 << 16, (1 << 16) + 1):
        scale = gradient_scale(samples)
        assert scale == 2.0 ** round(torch.tensor(scale).log2().item())
        assert max(1, samples) <= scale < 2 * max(1, samples)


# How exact.


def off_by(x_BFD, kind, scale=1.0):
    """What is rounded where vectors [B, features, columns] travel side by side."""
    _, features, width = x_BFD.shape
    return allowed(x_BFD.flatten(1), kind, [width] * features, scale).view(x_BFD.shape)


def made_by(tile, step, table):
    """What a tile makes of a batch [B, features, D]: what one device would whose other rows and columns are zero."""
    whole = Embeddings([table], seed=SEED)
    kept = torch.zeros(table.rows, table.dim)
    kept[slice(*tile.rows), slice(*tile.cols)] = whole.weights("t")[slice(*tile.rows), slice(*tile.cols)]
    whole.table("t").copy_(kept)
    with torch.no_grad():
        return look_up(whole, step)[""].view(-1, 2, table.dim)


def forward_limit(layout, table, wire, step, rank):
    """Of a rank's pooled vectors: the sum of all that is rounded on the way."""
    tiles = LAYOUTS[layout](table)
    parts = {tile: made_by(tile, step, table)[sum(SIZES_W[:rank]) :][: SIZES_W[rank]] for tile in tiles}
    limit = torch.zeros(SIZES_W[rank], 2, table.dim)
    if layout not in IN_HOSTS:
        for tile, part in parts.items():
            columns = slice(*tile.cols)
            limit[:, :, columns] += off_by(part[:, :, columns], codec_of(wire, tile.rank, rank, False))
        return limit.flatten(1)
    for host, mine, columns in by_host(tiles):
        # Added up by the device of this rank's number, and sent on from there.
        adder = host * WORLD.devices + rank % WORLD.devices
        total = sum(parts[tile][:, :, columns] for tile in mine)
        off = sum(off_by(parts[tile][:, :, columns], codec_of(wire, tile.rank, adder, False)) for tile in mine)
        most = off.amax((1, 2), keepdim=True) if len(off) else off  # which is rounded with the sum
        limit[:, :, columns] += off + off_by(total, codec_of(wire, adder, rank, False)) + most / 100
    return limit.flatten(1)


def backward_limit(layout, table, wire, step, tile):
    """Of the gradients that a tile gets [G, features, columns]."""
    limits, scale = [], gradient_scale(sum(SIZES_W))
    for rank in range(WORLD.world):
        grad = step.cut(step.ups, rank)[""].view(-1, 2, table.dim)[:, :, slice(*tile.cols)]
        if layout not in IN_HOSTS:
            limits.append(off_by(grad, codec_of(wire, rank, tile.rank, True), scale))
            continue
        first = WORLD.host_of(tile.rank) * WORLD.devices + rank % WORLD.devices
        off = off_by(grad, codec_of(wire, rank, first, True), scale)
        most = off.amax((1, 2), keepdim=True) if len(off) else off
        limits.append(off + off_by(grad, codec_of(wire, first, tile.rank, True), scale) + most / 100)
    return torch.cat(limits)


@pytest.mark.few(2)
@settings(max_examples=15)
@given(wire=wires, seed=st.integers(0, 100))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pooled_vectors_and_their_gradients_are_as_exact_as_their_way(layout, wire, seed):
    table = make_table()
    (step,) = make_steps([table], [SIZES_W], seed)
    whole = Embeddings([table], seed=SEED)
    ((_, wanted),) = train(whole, [step])

    def rank(comm):
        sharded = make_sharded([table], Plan(world=4, tiles=LAYOUTS[layout](table)), comm, wire=wire)
        ((_, mine),) = train(sharded, [step.of(comm.rank)])
        limit = forward_limit(layout, table, wire, step, comm.rank) + 1e-5
        assert ((mine[""] - step.cut(wanted, comm.rank)[""]).abs() <= limit).all(), wire
        for held in sharded.local_tiles():
            rows, columns = slice(*held.tile.rows), slice(*held.tile.cols)
            limit = torch.zeros(len(step.ups[""]), 2, table.dim)
            if layout != "replicated":
                limit[:, :, columns] = backward_limit(layout, table, wire, step, held.tile)
            added = Embeddings([table], seed=SEED)
            added.table("t").zero_()
            list(train(added, [replace(step, ups={"": -limit.flatten(1)})]))
            limit = added.weights("t")[rows, columns] + 1e-5
            assert ((held.rows - whole.weights("t")[rows, columns]).abs() <= limit).all(), wire

    run_threads(WORLD, rank, timeout_s=30)


@pytest.mark.few(1)
@settings(max_examples=15)
@given(wire=wires, seed=st.integers(0, 100))
@pytest.mark.parametrize("layout", FLAT)
def test_vectors_of_each_id_are_as_exact_as_their_link(layout, wire, seed):
    table = make_table(Pooling.SEQUENCE)
    (step,) = make_steps([table], [SIZES_W], seed)
    before = Embeddings([table], seed=SEED).weights("t").clone()

    def rank(comm):
        sharded = make_sharded([table], Plan(world=4, tiles=LAYOUTS[layout](table)), comm, wire=wire)
        mine = step.of(comm.rank)
        ((_, outs),) = train(sharded, [mine])
        for tile in LAYOUTS[layout](table):
            columns, kind = slice(*tile.cols), codec_of(wire, tile.rank, comm.rank, False)
            for feature in table.feature_names:
                my_ids = mine.batch.ids_of(feature)
                here = (my_ids >= tile.rows[0]) & (my_ids < tile.rows[1])
                want = before[my_ids[here], columns]
                assert ((outs[feature][here, columns] - want).abs() <= allowed(want, kind)).all(), wire
        for held in sharded.local_tiles():
            rows, columns = slice(*held.tile.rows), slice(*held.tile.cols)
            summed, limit = torch.zeros(table.rows, table.dim), torch.zeros(table.rows, table.dim) + 1e-5
            for sender in range(4):
                cut = step.cut(step.ups, sender)
                kind = codec_of(wire, sender, comm.rank, True)
                for feature in table.feature_names:
                    first = sum(len(step.cut(step.ups, r)[feature]) for r in range(sender))
                    asked = step.batch.ids_of(feature)[first : first + len(cut[feature])]
                    summed.index_add_(0, asked, cut[feature])
                    off = allowed(cut[feature][:, columns], kind, 0, gradient_scale(sum(SIZES_W)))
                    limit[:, columns] = limit[:, columns].index_add(0, asked, off)
            assert ((held.rows - (before - summed)[rows, columns]).abs() <= limit[rows, columns]).all(), wire

    run_threads(WORLD, rank, timeout_s=30)
