"""What travels between ranks takes as many bytes as the formulas say.

They are those of the paper on ZionEX (arXiv 2104.05158): a rank with b samples sends ids to owners; an owner of D
columns sends pooled [b, D] to each rank, whatever rows it has; copies send 2 (W - 1) / W of the table's gradient;
tables over the devices of a host one vector a sample across the network. Gradients go back the same way.
"""

from collections import Counter

import pytest
from parallel.shard.equal import make_sharded, make_steps, train
from parallel.shard.wires import (
    FLAT,
    IN_HOSTS,
    KINDS,
    LAYOUTS,
    SIZES_W,
    WORLD,
    by_host,
    codec_of,
    ids_of,
    make_table,
)

from rowwise import Plan, Pooling, Topology, Wire
from rowwise.parallel.comm.thread import run_threads
from rowwise.tables.spec import Codecs, WireType


def vector_bytes(count, widths, kind):
    """Of vectors that lie side by side."""
    match kind:
        case WireType.FP32:
            return count * sum(widths) * 4
        case WireType.INT8:  # a quarter, and two floats for each vector
            return count * sum(8 + -(-width // 4) * 4 for width in widths)
    return count * sum(widths) * 2


class Ledger:
    """What each rank sends in a step, by purpose, collective and link, as the formulas say."""

    def __init__(self, wire, world):
        self.wire, self.world, self.sent_W = wire, world, [Counter() for _ in range(world.world)]

    def send(self, rank, other, what, count_bytes, collective="all_to_all"):
        if rank != other and count_bytes:
            self.sent_W[rank][what, collective, self.world.link(rank, other)] += count_bytes

    def send_vectors(self, rank, other, what, count, width, collective="all_to_all"):
        """Two features; what is rounded cannot be added up on the way, so it is sent to each rank by itself."""
        kind = codec_of(self.wire, rank, other, what == "gradients", self.world)
        collective = collective if kind is WireType.FP32 else "all_to_all"
        self.send(rank, other, what, vector_bytes(count, [width] * 2, kind), collective)

    def ids(self, tiles, step, weighted):
        """Sizes to everybody, and to the owner of a tile how many ids each bag has, the ids, and their weights."""
        for rank, samples in enumerate(SIZES_W):
            ids = ids_of(step.of(rank).batch)
            for other in range(WORLD.world):
                self.send(rank, other, "counts", 3 * 8)
            for tile in tiles:
                n = int(((ids >= tile.rows[0]) & (ids < tile.rows[1])).sum())
                self.send(rank, tile.rank, "ids", 4 * (2 * samples + n + n * weighted))

    def at_once(self, tile):
        """The columns of a tile for all samples, and their gradients."""
        for rank, samples in enumerate(SIZES_W):
            self.send_vectors(tile.rank, rank, "pooled", samples, tile.cols[1] - tile.cols[0])
            self.send_vectors(rank, tile.rank, "gradients", samples, tile.cols[1] - tile.cols[0])

    def over_hosts(self, host, width):
        """Inside the host, for the samples of all ranks of a device number; then to those ranks."""
        samples_D = [sum(SIZES_W[device :: WORLD.devices]) for device in range(WORLD.devices)]
        for device, rank in enumerate(WORLD.ranks_of(host)):
            for other, neighbour in enumerate(WORLD.ranks_of(host)):
                self.send_vectors(rank, neighbour, "pooled", samples_D[other], width, "reduce_scatter")
                self.send_vectors(rank, neighbour, "gradients", samples_D[device], width, "all_gather")
            for peer in range(device, WORLD.world, WORLD.devices):
                self.send_vectors(rank, peer, "pooled", SIZES_W[peer], width)
                self.send_vectors(peer, rank, "gradients", SIZES_W[peer], width)


def expected_bytes(layout, table, wire, step, world=WORLD):
    ledger, tiles = Ledger(wire, world), LAYOUTS[layout](table)
    ledger.ids(tiles, step, table.pooling is Pooling.WEIGHTED)
    for tile in tiles if layout in FLAT else ():
        ledger.at_once(tile)
    for host, _, columns in by_host(tiles) if layout in IN_HOSTS else ():
        ledger.over_hosts(host, columns.stop - columns.start)
    return ledger.sent_W


def bytes_of_a_step(table, tiles, wire, step, world=WORLD):
    def rank(comm):
        sharded = make_sharded([table], Plan(world=4, tiles=tiles), comm, wire=wire)
        list(train(sharded, [step.of(comm.rank)]))
        return comm.sent.counts

    return run_threads(world, rank, timeout_s=30)


WIRES = [Wire(host=Codecs(forward=k, backward=k), network=Codecs(forward=k, backward=k)) for k in KINDS]
WIRES.append(
    Wire(
        host=Codecs(forward=WireType.FP32, backward=WireType.BF16),
        network=Codecs(forward=WireType.INT8, backward=WireType.FP16),
    )
)


@pytest.mark.few(5)
@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN, Pooling.WEIGHTED])
@pytest.mark.parametrize("layout", [*FLAT, *IN_HOSTS])
def test_bytes_are_those_of_the_formulas(layout, pooling):
    table = make_table(pooling)
    (step,) = make_steps([table], [SIZES_W])
    for wire in WIRES:
        assert bytes_of_a_step(table, LAYOUTS[layout](table), wire, step) == expected_bytes(layout, table, wire, step)


RACKS = Topology(hosts=4, groups=(2, 2))
FAR_HOSTS = Topology(hosts=2, devices=2, groups=(1, 1))


@pytest.mark.parametrize("layout", [*FLAT, *IN_HOSTS])
def test_bytes_between_groups_are_those_of_the_formulas_on_their_own_link(layout):
    table, world = make_table(), RACKS if layout in FLAT else FAR_HOSTS
    (step,) = make_steps([table], [SIZES_W])
    narrow = Codecs(forward=WireType.INT8, backward=WireType.FP16)
    for wire in (Wire(), Wire(uplink=narrow), Wire(network=narrow), Wire(network=narrow, uplink=Codecs())):
        sent_W = bytes_of_a_step(table, LAYOUTS[layout](table), wire, step, world)
        assert sent_W == expected_bytes(layout, table, wire, step, world)
        assert {link for sent in sent_W for *_, link in sent} == set(world.links)


def total(sent_W, what, link=None):
    return sum(n for sent in sent_W for key, n in sent.items() if key[0] == what and link in (None, key[2]))


@pytest.mark.parametrize("layout", [*FLAT, *IN_HOSTS])
def test_codecs_halve_the_bytes_of_vectors_or_leave_a_quarter_and_the_scales(layout):
    table = make_table()
    (step,) = make_steps([table], [SIZES_W])
    found = {k: bytes_of_a_step(table, LAYOUTS[layout](table), w, step) for k, w in zip(KINDS, WIRES, strict=False)}
    for what in ("pooled", "gradients"):
        exact, half = total(found[WireType.FP32], what), total(found[WireType.FP16], what)
        width = LAYOUTS[layout](table)[0].cols[1]
        assert half * 2 == total(found[WireType.BF16], what) * 2 == exact > 0
        assert total(found[WireType.INT8], what) * 4 * width == exact * (width + 8)


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
                    ids = ids_of(step.of(rank).batch)
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
            n = len(ids_of(step.of(rank).batch))
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
