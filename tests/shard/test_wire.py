"""What travels between ranks: as many bytes as the formulas say, and as exact as the codec of each link promises.

The formulas are those of the paper on ZionEX (arXiv 2104.05158): a rank of W with b samples of a table of dim D sends
ids to owners; an owner of columns sends pooled [b, D]; of rows, as much for each part of the rows; copies 2 (W - 1) / W
of the table's gradient; tables over the devices of a host one vector a sample across the network.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shard.equal import SEED, look_up, make_sharded, make_steps, train

from rowwise import Embeddings, Plan, Pooling, RowType, Sgd, Table, Topology, Uniform
from rowwise.comm.thread import run_threads
from rowwise.planner.layouts import column_wise, grid, replicated, row_wise, table_row_wise, table_wise
from rowwise.shard.vectors import Blocks, Lanes, common_group, fitting_scale
from rowwise.spec import Codecs, Wire

WORLD = Topology(hosts=2, devices=2)
KINDS = tuple(RowType)
kinds = st.sampled_from(KINDS)
wires = st.builds(
    lambda a, b, c, d: Wire(host=Codecs(forward=a, backward=b), network=Codecs(forward=c, backward=d)),
    kinds, kinds, kinds, kinds,
)  # fmt: skip


def allowed(x_ND, kind, group=0, scale=1.0):
    """How far apart vectors may be after they have travelled once."""
    match kind:
        case RowType.FP32:
            return torch.zeros_like(x_ND)
        case RowType.FP16:  # eleven bits, and the smallest number there is
            return x_ND.abs() * 2.0**-11 + 2.0**-25 / scale
        case RowType.BF16:  # eight
            return x_ND.abs() * 2.0**-8
        case RowType.INT8:
            n, d = x_ND.shape
            found = [
                # Half a step, and what 32 bits lose in computing it.
                ((part.amax(1) - part.amin(1)) / 255 / 2 + part.abs().amax(1) * 2.0**-20)
                .unsqueeze(1)
                .expand(n, part.shape[1])
                for part in x_ND.split(group or d, 1)
            ]
            return torch.cat(found, 1)


def codec_of(wire, sender, receiver, backward):
    if sender == receiver:
        return RowType.FP32
    codecs = wire.host if WORLD.link(sender, receiver) == "host" else wire.network
    return codecs.backward if backward else codecs.forward


def make_block(seed, n, d, size):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator) * size * 10.0 ** torch.randint(-3, 3, (n, 1), generator=generator)


@settings(max_examples=60)
@given(
    wire=wires,
    backward=st.booleans(),
    group=st.sampled_from([0, 16, 48]),
    rows=st.lists(st.integers(0, 5), min_size=16, max_size=16),
    widths=st.lists(st.sampled_from([1, 3, 8, 16, 48, 100]), min_size=1, max_size=3),
    samples=st.sampled_from([1, 7, 4096]),
    seed=st.integers(0, 1000),
)
def test_blocks_come_as_exact_as_the_codec_of_their_link_says(wire, backward, group, rows, widths, samples, seed):
    scale, size = (fitting_scale(samples), 1 / samples) if backward else (1.0, 1.0)

    def sent(sender, receiver):
        places = range(len(widths))
        return [
            make_block(seed + 100 * sender + 10 * receiver + k, rows[4 * sender + receiver], widths[k], size)
            for k in places
        ]

    def rank(comm):
        me, lanes = comm.rank, Lanes.of(comm, wire, backward=backward)
        expected = [Blocks([x.shape for x in sent(other, me)], group) for other in range(4)]
        came = lanes.swap([Blocks.of(sent(me, other), group) for other in range(4)], expected, "x", scale).wait()
        for other in range(4):
            kind = codec_of(wire, other, me, backward)
            for mine, theirs in zip(came[other], sent(other, me), strict=True):
                assert mine.shape == theirs.shape
                assert ((mine - theirs).abs() <= allowed(theirs, kind, group, scale)).all(), (kind, other)

    run_threads(WORLD, rank, timeout_s=30)


def test_the_scale_of_gradients_is_a_power_of_two_that_keeps_those_of_a_mean_in_range():
    for samples in (0, 1, 2, 3, 1000, 1 << 16, (1 << 16) + 1):
        scale = fitting_scale(samples)
        assert scale == 2.0 ** round(torch.tensor(scale).log2().item())
        assert max(1, samples) <= scale < 2 * max(1, samples)


def make_table(pooling=Pooling.SUM, rows=60):
    """The rate makes of an update the sum of the gradients of each row."""
    return Table(
        name="t", rows=rows, dim=64, features=("x", "y"), pooling=pooling, optimizer=Sgd(lr=1.0), init=Uniform(1.0)
    )


SIZES_W = (5, 0, 9, 2)
LAYOUTS = {
    "table-wise": lambda table: table_wise(table, 2),
    "row-wise": lambda table: row_wise(table, range(4)),
    "column-wise": lambda table: column_wise(table, range(4)),
    "replicated": lambda table: replicated(table, range(4)),
    "table-row-wise": lambda table: table_row_wise(table, WORLD, 1),
    "grid": lambda table: grid(table, WORLD, range(2)),
}
FLAT, IN_HOSTS = ("table-wise", "row-wise", "column-wise"), ("table-row-wise", "grid")


def by_host(tiles):
    """The tiles of each host, and the columns that they have."""
    for host in range(WORLD.hosts):
        mine = [tile for tile in tiles if WORLD.host_of(tile.rank) == host]
        if mine:
            yield host, mine, slice(*mine[0].cols)


# How exact.


def off_by(x_BFD, kind, scale=1.0):
    """What is rounded where vectors [B, features, columns] travel side by side."""
    n, features, width = x_BFD.shape
    return allowed(x_BFD.flatten(1), kind, common_group([width] * features), scale).view(x_BFD.shape)


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
    limits, scale = [], fitting_scale(sum(SIZES_W))
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
        for held in sharded.held():
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


@settings(max_examples=15)
@given(wire=wires, seed=st.integers(0, 100))
@pytest.mark.parametrize("layout", FLAT)
def test_vectors_of_each_id_are_as_exact_as_their_link(layout, wire, seed):
    table = make_table(Pooling.SEQUENCE)
    (step,) = make_steps([table], [SIZES_W], seed)
    before = Embeddings([table], seed=SEED).weights("t").clone()
    ids = dict(zip(step.batch.features, bags_of(step.batch), strict=True))

    def rank(comm):
        sharded = make_sharded([table], Plan(world=4, tiles=LAYOUTS[layout](table)), comm, wire=wire)
        mine = step.of(comm.rank)
        ((_, outs),) = train(sharded, [mine])
        my_ids = dict(zip(mine.batch.features, bags_of(mine.batch), strict=True))
        for tile in LAYOUTS[layout](table):
            columns, kind = slice(*tile.cols), codec_of(wire, tile.rank, comm.rank, False)
            for feature in table.feature_names:
                here = (my_ids[feature] >= tile.rows[0]) & (my_ids[feature] < tile.rows[1])
                want = before[my_ids[feature][here], columns]
                assert ((outs[feature][here, columns] - want).abs() <= allowed(want, kind)).all(), wire
        for held in sharded.held():
            rows, columns = slice(*held.tile.rows), slice(*held.tile.cols)
            summed, limit = torch.zeros(table.rows, table.dim), torch.zeros(table.rows, table.dim) + 1e-5
            for sender in range(4):
                cut = step.cut(step.ups, sender)
                kind = codec_of(wire, sender, comm.rank, True)
                for feature in table.feature_names:
                    first = sum(len(step.cut(step.ups, r)[feature]) for r in range(sender))
                    asked = ids[feature][first : first + len(cut[feature])]
                    summed.index_add_(0, asked, cut[feature])
                    off = allowed(cut[feature][:, columns], kind, 0, fitting_scale(sum(SIZES_W)))
                    limit[:, columns] = limit[:, columns].index_add(0, asked, off)
            assert ((held.rows - (before - summed)[rows, columns]).abs() <= limit[rows, columns]).all(), wire

    run_threads(WORLD, rank, timeout_s=30)


def bags_of(batch):
    """The ids of each feature."""
    return batch.values_N.split(batch.lengths_FB.view(len(batch.features), -1).sum(1).tolist())


# How many bytes.


def vector_bytes(count, widths, kind):
    """Of vectors that lie side by side."""
    match kind:
        case RowType.FP32:
            return count * sum(widths) * 4
        case RowType.INT8:  # a quarter, and two floats for each group
            return count * (sum(widths) + 8 * (sum(widths) // common_group(widths)))
    return count * sum(widths) * 2


def expected_bytes(layout, table, wire, step):
    """What each rank sends in a step, by purpose, collective and link."""
    sent_W = [Counter() for _ in range(4)]
    tiles, hosts, devices = LAYOUTS[layout](table), WORLD.hosts, WORLD.devices

    def send(rank, other, what, count_bytes, collective="all_to_all"):
        if rank != other and count_bytes:
            sent_W[rank][what, collective, WORLD.link(rank, other)] += count_bytes

    def send_vectors(rank, other, what, count, width, collective="all_to_all"):
        kind = codec_of(wire, rank, other, what == "gradients")
        send(
            rank,
            other,
            what,
            vector_bytes(count, [width] * 2, kind),
            collective if kind is RowType.FP32 else "all_to_all",
        )

    weighted = table.pooling is Pooling.WEIGHTED
    for rank in range(4):
        ids = torch.cat(
            [x for f, x in zip(step.batch.features, bags_of(step.of(rank).batch), strict=True) if f in "xy"]
        )
        for other in range(4):
            send(rank, other, "counts", 3 * 8)
        for tile in tiles if layout != "replicated" else ():
            n = int(((ids >= tile.rows[0]) & (ids < tile.rows[1])).sum())
            send(rank, tile.rank, "ids", 4 * (2 * SIZES_W[rank] + n + n * weighted))
            if layout in FLAT:
                send_vectors(tile.rank, rank, "pooled", SIZES_W[rank], tile.cols[1] - tile.cols[0])
                send_vectors(rank, tile.rank, "gradients", SIZES_W[rank], tile.cols[1] - tile.cols[0])
    for host, mine, columns in by_host(tiles) if layout in IN_HOSTS else ():
        width = columns.stop - columns.start
        assert len(mine) == devices
        for device in range(devices):
            rank = host * devices + device
            peers = [h * devices + device for h in range(hosts)]
            for other in range(devices):  # sums for the samples of all ranks of that number; all for those of this one
                theirs = sum(SIZES_W[h * devices + other] for h in range(hosts))
                send_vectors(rank, host * devices + other, "pooled", theirs, width, "reduce_scatter")
                own = sum(SIZES_W[peer] for peer in peers)
                send_vectors(rank, host * devices + other, "gradients", own, width, "all_gather")
            for peer in peers:
                send_vectors(rank, peer, "pooled", SIZES_W[peer], width)
                send_vectors(peer, rank, "gradients", SIZES_W[peer], width)
    return sent_W


def bytes_of_a_step(table, tiles, wire, step):
    def rank(comm):
        sharded = make_sharded([table], Plan(world=4, tiles=tiles), comm, wire=wire)
        list(train(sharded, [step.of(comm.rank)]))
        return comm.sent.counts

    return run_threads(WORLD, rank, timeout_s=30)


WIRES = [Wire(host=Codecs(forward=k, backward=k), network=Codecs(forward=k, backward=k)) for k in KINDS]
WIRES.append(
    Wire(
        host=Codecs(forward=RowType.FP32, backward=RowType.BF16),
        network=Codecs(forward=RowType.INT8, backward=RowType.FP16),
    )
)


@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN, Pooling.WEIGHTED])
@pytest.mark.parametrize("layout", [*FLAT, *IN_HOSTS])
def test_bytes_are_those_of_the_formulas(layout, pooling):
    table = make_table(pooling)
    (step,) = make_steps([table], [SIZES_W])
    for wire in WIRES:
        assert bytes_of_a_step(table, LAYOUTS[layout](table), wire, step) == expected_bytes(layout, table, wire, step)


def total(sent_W, what, link=None):
    return sum(n for sent in sent_W for key, n in sent.items() if key[0] == what and link in (None, key[2]))


@pytest.mark.parametrize("layout", [*FLAT, *IN_HOSTS])
def test_codecs_halve_the_bytes_of_vectors_or_leave_a_quarter_and_the_scales(layout):
    table = make_table()
    (step,) = make_steps([table], [SIZES_W])
    found = {k: bytes_of_a_step(table, LAYOUTS[layout](table), w, step) for k, w in zip(KINDS, WIRES, strict=False)}
    for what in ("pooled", "gradients"):
        exact, half = total(found[RowType.FP32], what), total(found[RowType.FP16], what)
        width = LAYOUTS[layout](table)[0].cols[1]
        assert half * 2 == total(found[RowType.BF16], what) * 2 == exact > 0
        assert total(found[RowType.INT8], what) * 4 * width == exact * (width + 8)


def test_one_vector_a_table_and_sample_crosses_the_network_where_rows_are_on_one_host():
    """And one for each device with rows where they are not added up first."""
    table = make_table()
    (step,) = make_steps([table], [SIZES_W])
    sent_W = {name: bytes_of_a_step(table, LAYOUTS[name](table), Wire(), step) for name in LAYOUTS}
    vectors = sum(SIZES_W) * 2 * 64 * 4
    elsewhere = sum(SIZES_W[:2]) * 2 * 64 * 4  # samples of the other host
    for what in ("pooled", "gradients"):
        assert total(sent_W["table-row-wise"], what, "network") == elsewhere
        assert total(sent_W["grid"], what, "network") == vectors / 2
        assert total(sent_W["row-wise"], what, "network") == vectors * 2
        assert total(sent_W["table-wise"], what, "network") == elsewhere


def test_sequences_send_a_vector_for_each_id():
    table = make_table(Pooling.SEQUENCE)
    (step,) = make_steps([table], [SIZES_W])
    for layout in FLAT:
        for kind, wire in zip(KINDS, WIRES, strict=False):
            sent_W = bytes_of_a_step(table, LAYOUTS[layout](table), wire, step)
            want = 0
            for tile in LAYOUTS[layout](table):
                for rank in set(range(4)) - {tile.rank}:
                    features = zip(step.batch.features, bags_of(step.of(rank).batch), strict=True)
                    ids = torch.cat([x for feature, x in features if feature in "xy"])
                    n = int(((ids >= tile.rows[0]) & (ids < tile.rows[1])).sum())
                    want += vector_bytes(n, [tile.cols[1] - tile.cols[0]], kind)
            assert total(sent_W, "rows") == total(sent_W, "gradients") == want > 0


def test_copies_send_their_gradients_only():
    """A ring around small tables; ids and gradients of each rank to all others where tables are large."""
    small, large = make_table(rows=8), make_table(rows=60)
    for table in (small, large):
        (step,) = make_steps([table], [SIZES_W])
        sent_W = bytes_of_a_step(table, LAYOUTS["replicated"](table), WIRES[2], step)  # a wire for what is looked up
        for rank, sent in enumerate(sent_W):
            n = sum(len(x) for f, x in zip(step.batch.features, bags_of(step.of(rank).batch), strict=True) if f in "xy")
            want, next_link = Counter(), WORLD.link(rank, (rank + 1) % 4)
            for other in set(range(4)) - {rank}:
                link = WORLD.link(rank, other)
                want["counts", "all_to_all", link] += 3 * 8
                if table is large:
                    want["counts", "all_gather", link] += 3 * 8
                    want["ids", "all_gather", link] += 8 * (2 * SIZES_W[rank] + n)
                    want["copies", "all_gather", link] += SIZES_W[rank] * 2 * 64 * 4
            if table is small:  # the gradient, and for each row whether it was touched
                want["copies", "all_reduce", next_link] = 2 * 3 * 8 * (64 + 1) * 4 // 4
            assert +want == sent
