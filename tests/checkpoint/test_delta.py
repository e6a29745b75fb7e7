"""An increment gives back what a full checkpoint would, to the bit, whatever plan writes it and whatever plan reads."""

import multiprocessing
import os
import random
import shutil
import time
from dataclasses import dataclass

import pytest
import torch
from checkpoint.plans import Net, contents, differences, empty, make_plan, make_tables, take_step, track
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from problems import make_problem
from small import same
from trainings import Killed, World, fast, left

from rowwise import CheckpointError, Embeddings, Jagged, Plan, RowType, RowWiseAdagrad, Table
from rowwise.checkpoint import write as writing
from rowwise.checkpoint.delta import changed_rows
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.manifest import CheckpointManifest
from rowwise.checkpoint.policy import LONGEST, average_bytes, is_full_due
from rowwise.checkpoint.read import Checkpoint
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard.apply import shard
from rowwise.tables.ops.jagged import split
from rowwise.tables.spec import TRAINED_TYPES
from rowwise.train import saved as saving
from rowwise.train.saved import CheckpointFolder, CheckpointReduction
from rowwise.train.settings import Saving
from rowwise.train.snapshot import collect, restore


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model that is trained a little between checkpoints, by any plan."""

    tables: tuple[Table, ...]
    plan: Plan | None
    seed: int = 0

    def start(self, comm):
        model = Net(self.tables)
        model = model if self.plan is None else shard(model, self.plan, comm)
        track(model)
        return model, {"dense": torch.optim.AdamW(model.top.parameters(), lr=0.1)}

    def train(self, comm, model, optimizers, step):
        samples = 6
        whole = make_problem(self.tables, samples * len(comm.ranks), 3, self.seed + step).jagged
        mine = split(whole, [samples] * len(comm.ranks))[comm.rank]
        take_step(model, optimizers["dense"], mine, torch.ones(3, 7))


def always_increment(chain_bytes, full_bytes, increment_bytes):
    return not chain_bytes


def make_run(seed, world=4, **shape):
    chance = random.Random(seed)
    tables = make_tables(chance, **shape)
    return chance, Run(tables=tables, plan=make_plan(chance, tables, world), seed=seed)


def save_both(run, folder, bits, background=False, steps=4):
    """After each step an increment, and a full checkpoint that it has to be equal to."""

    def rank(comm):
        model, optimizers = run.start(comm)
        full = CheckpointFolder(folder / "full", comm, reduction=CheckpointReduction(bits=bits))
        less = CheckpointFolder(
            folder / "less", comm, background=background, reduction=CheckpointReduction(incremental=True, bits=bits)
        )
        for step in range(steps):
            if step:
                run.train(comm, model, optimizers, step)
            parts, data = collect(model, optimizers, comm)
            full.save(step, parts, data)
            less.save(step, parts, data)
        less.wait()
        return [x.clone() for held in model.embeddings.local_tiles() for x in (held.rows, *held.state.values())]

    return run_threads(run.plan.world, rank, timeout_s=60)


@pytest.fixture
def small(monkeypatch):
    """Small pieces and files, so that tensors are cut; nothing but increments after the first one."""
    monkeypatch.setattr(writing, "SIZES", writing.FileSizes(700, 5000))
    monkeypatch.setattr(saving, "is_full_due", always_increment)


def test_changed_rows_have_their_numbers_in_the_table():
    touched = torch.tensor([1, 0, 1, 0, 1, 1, 0, 1], dtype=torch.uint8)
    rows = torch.arange(16.0).view(8, 2)
    shard = LocalShard(name="t", tensor=rows, shape=(20, 2), rows=(5, 13), touched=touched)
    (changed,) = changed_rows([shard], run_rows=3)
    assert changed.ids.tolist() == [5, 7, 9, 10, 12]
    assert torch.equal(changed.tensor, rows[touched.bool()])


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("bits", [32, 8, 4])
@pytest.mark.parametrize("seed", range(3))
def test_an_increment_is_what_a_full_one_would_be(tmp_path, small, bits, seed):
    _, run = make_run(seed)
    save_both(run, tmp_path, bits, background=seed == 1)
    for step in range(4):
        full, less = (CheckpointFolder(tmp_path / kind).open(f"step-{step:09}") for kind in ("full", "less"))
        assert len(less.manifest.chain_bytes) == step + 1
        less.verify()
        assert same(contents(full), contents(less))
    some = [(name, entry) for name, entry in less.manifest.tensors.items() if entry.row_type]
    assert any(piece.ids for _, entry in some for piece in entry.chunks)
    chance = random.Random(seed)
    for name, entry in some:
        begin = chance.randint(0, entry.rows)
        rows = begin, chance.randint(begin, entry.rows)
        assert torch.equal(full.load(name, rows), less.load(name, rows))
        for row_type in TRAINED_TYPES:
            out, want = (torch.zeros(entry.rows, width(entry, row_type), dtype=dtype(row_type)) for _ in range(2))
            less.copy_into(out, name, row_type=row_type)
            full.copy_into(want, name, row_type=row_type)
            assert torch.equal(out, want)


def width(entry, row_type):
    group = (entry.column_group if entry.row_type is RowType.INT8 else None) or entry.columns
    return 8 * -(-entry.columns // group) + -(-entry.columns // 4) * 4 if row_type is RowType.INT8 else entry.columns


def dtype(row_type):
    names = {RowType.FP32: torch.float32, RowType.FP16: torch.float16, RowType.BF16: torch.bfloat16}
    return names.get(row_type, torch.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_another_plan_goes_on_from_increments_and_adds_its_own(tmp_path, small, seed):
    """Saved by four ranks, on by three, then by one: always what one that was never saved has."""
    chance, run = make_run(seed, rows=60)
    save_both(run, tmp_path, 32)
    plans = [make_plan(chance, run.tables, 3), None]
    for number, plan in enumerate(plans):
        step, again = 3 + number, Run(tables=run.tables, plan=plan, seed=seed)

        def rank(comm, step=step, again=again):
            model, optimizers = empty(again.tables, again.plan, comm)
            track(model)
            less = CheckpointFolder(tmp_path / "less", comm, reduction=CheckpointReduction(incremental=True))
            restore(less.open(), model, optimizers, comm)
            less.set_base(less.path(step), collect(model, optimizers, comm)[0])
            again.train(comm, model, optimizers, step + 1)
            less.save(step + 1, *collect(model, optimizers, comm))
            whole, _ = empty(again.tables, None, solo())
            restore(less.open(), whole, {"dense": torch.optim.AdamW(whole.top.parameters())}, solo())
            return differences(model.embeddings, whole.embeddings)

        found = run_threads(3, rank, timeout_s=60) if plan else [rank(solo())]
        assert not any(found)
        assert len(CheckpointFolder(tmp_path / "less").open().manifest.chain_bytes) == step + 2


def one_table(rows=1000, **settings):
    model = torch.nn.Module()
    model.embeddings = Embeddings([Table(name="t", rows=rows, dim=16, optimizer=RowWiseAdagrad(lr=0.1), **settings)])
    track(model)
    return model


def incremental(folder, *, background=False, **how):
    return CheckpointFolder(folder, background=background, reduction=CheckpointReduction(incremental=True, **how))


def has_rows_of(checkpoint, model):
    return torch.equal(checkpoint.load("model/embeddings.t"), model.embeddings.table("t"))


def touch(model, ids):
    model.embeddings(Jagged.from_lists({"t": [ids]})).matrix_BS.sum().backward()
    model.embeddings.update()


def add(saved, step, model):
    saved.save(step, *collect(model, {}))


def add_and_wait(saved, step, model):
    add(saved, step, model)
    saved.wait()


def test_a_checkpoint_stands_alone_when_those_it_builds_on_are_gone(tmp_path):
    model, saved = one_table(), incremental(tmp_path)
    for step in range(4):
        touch(model, [step, 7])
        add(saved, step, model)
    last = saved.open()
    files = [tmp_path / "step-000000000" / "00000-00000.safetensors", last.folder / "00000-00000.safetensors"]
    assert files[0].stat().st_ino == files[1].stat().st_ino
    assert [n > 60_000 for n in last.manifest.chain_bytes] == [True, False, False, False]
    want = model.embeddings.table("t").clone()
    shutil.copytree(last.folder, tmp_path / "copied")
    saved.prune(1, None)
    assert saved.steps() == [3]
    for found in (saved.open(), Checkpoint.open(tmp_path / "copied")):
        found.verify()
        assert torch.equal(found.load("model/embeddings.t"), want)


def add_for_ever(folder, ready):
    """In a process of its own: the n-th checkpoint has the rows before n touched."""
    model, saved = one_table(), incremental(folder)
    for step in range(1000):
        add(saved, step, model)
        saved.prune(2, None)
        touch(model, [step])
        if not step:
            ready.set()


@pytest.mark.dist
def test_killed_at_any_moment(tmp_path):
    """What is there under its own name is whole, whenever the writer died, though what it was built on may be gone."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    for number, delay_s in enumerate((0.0, 0.02, 0.05)):
        ready.clear()
        child = context.Process(target=add_for_ever, args=(tmp_path / str(number), ready), daemon=True)
        child.start()
        assert ready.wait(60)
        time.sleep(delay_s)
        child.kill()
        child.join()
        saved = CheckpointFolder(tmp_path / str(number))
        saved.clean()
        assert saved.steps()
        for step in saved.steps():
            found = Checkpoint.open(saved.path(step))
            found.verify()
            assert found.load("rows/embeddings.t/sum").nonzero().flatten().tolist() == list(range(step))


@pytest.mark.slow
def test_a_run_that_saves_increments_and_is_killed_ends_as_any_other(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "is_full_due", always_increment)
    save = Saving(every=2, keep=2, incremental=True)
    plain = World(fast(train={"epochs": 3}, save=Saving(every=2, keep=2)), tmp_path / "plain")
    plain.start().run()
    world = World(fast(train={"epochs": 3}, save=save), tmp_path / "killed")
    trainer = world.start(tell=kill_at(7))
    with pytest.raises(Killed):
        trainer.run()
    trainer = world.resume(tell=kill_at(13))
    with pytest.raises(Killed):
        trainer.run()
    assert len(CheckpointFolder(world.folder / "ckpt").open().manifest.chain_bytes) == 6  # of steps 2, 4, ..., 12
    world.resume().run()
    expected, found = left(plain.folder), left(world.folder)
    assert found.pop("steps")[-1] == expected.pop("steps")[-1]
    assert found == expected


def kill_at(step):
    def tell(shown):
        if shown.progress.step == step:
            raise Killed

    return tell


def test_a_run_goes_on_from_rounded_rows(tmp_path):
    world = World(fast(save=Saving(incremental=True, bits=8)), tmp_path)
    first = world.start()
    first.run()
    exact, near = (trainer.job.model.embeddings.table("user") for trainer in (first, world.resume()))
    assert 0 < float((near - exact).abs().max()) < 0.01


def test_of_a_table_that_nothing_touched_an_increment_has_nothing(tmp_path):
    model, saved = one_table(), incremental(tmp_path)
    add(saved, 0, model)
    add(saved, 1, model)
    entry = saved.open().entry("model/embeddings.t")
    assert [piece.ids for piece in entry.chunks] == [None] * len(entry.chunks)
    assert has_rows_of(saved.open(), model)


def test_without_hard_links_it_is_a_full_one_and_says_so(tmp_path, monkeypatch):
    def link(*_):
        raise OSError(1, "Operation not permitted")

    said = []
    model, saved = one_table(), incremental(tmp_path, log=said.append)
    add(saved, 0, model)
    monkeypatch.setattr(os, "link", link)
    touch(model, [3])
    add(saved, 1, model)
    assert len(saved.open().manifest.chain_bytes) == 1
    assert has_rows_of(saved.open(), model)
    assert said == [
        f"step-000000001 is a full checkpoint: no hard link to files of {tmp_path / 'step-000000000'} can be made"
    ]


def test_what_it_builds_on_may_be_gone(tmp_path):
    model, saved = one_table(), incremental(tmp_path)
    add(saved, 0, model)
    shutil.rmtree(saved.path(0))
    touch(model, [3])
    add(saved, 1, model)
    assert has_rows_of(saved.open(), model)


@pytest.mark.parametrize("background", [False, True])
def test_after_one_that_failed_comes_a_full_one(tmp_path, monkeypatch, background):
    model, saved = one_table(), incremental(tmp_path, background=background)
    add(saved, 0, model)
    saved.wait()
    touch(model, [3])
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError(28, "No space left on device")

        patch.setattr(writing, "write_file", full)
        with pytest.raises(CheckpointError, match="No space left"):
            add_and_wait(saved, 1, model)
    touch(model, [4])
    add(saved, 2, model)
    saved.wait()
    assert len(saved.open().manifest.chain_bytes) == 1
    assert has_rows_of(saved.open(), model)
    touch(model, [5])
    add(saved, 3, model)
    saved.wait()
    assert len(saved.open().manifest.chain_bytes) == 2


def test_rows_written_by_hand_are_in_the_next_one(tmp_path):
    model, saved = one_table(), incremental(tmp_path)
    add(saved, 0, model)
    model.load_state_dict({"embeddings.t": torch.randn(1000, 16)})
    add(saved, 1, model)
    assert has_rows_of(saved.open(), model)
    restore(Checkpoint.open(saved.path(0)), model, {})
    add(saved, 2, model)
    assert has_rows_of(saved.open(), model)


@pytest.mark.parametrize(
    "key", ["model/embeddings.t[3:8]", "model/embeddings.t[3:8] ids", "rows/embeddings.t/sum[3:8] ids"]
)
def test_a_flipped_byte_of_an_increment_is_found_and_named(tmp_path, key):
    model, saved = one_table(), incremental(tmp_path, bits=8)
    add(saved, 0, model)
    touch(model, [3, 7])
    add(saved, 1, model)
    found = saved.open()
    piece = next(p for e in found.manifest.tensors.values() for p in e.chunks if p.ids and key in (p.key, p.ids.key))
    path = found.folder / piece.file
    content = bytearray(path.read_bytes())
    content[found.header(piece.file).ranges[key].begin] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"rows 3 to 7 of tensor '{key.split('[')[0]}': .* do not match their"):
        found.verify()
    Checkpoint.open(saved.path(0)).verify()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_that_is_not_finite_is_not_rounded(tmp_path, bits):
    model, saved = one_table(), incremental(tmp_path, bits=bits)
    add(saved, 0, model)
    touch(model, [3, 7])
    model.embeddings.table("t")[7, 2] = torch.nan
    with pytest.raises(CheckpointError, match=r"'model/embeddings\.t': row 7"):
        add(saved, 1, model)
    assert saved.steps() == [0]
    exact = incremental(tmp_path)
    add(exact, 1, model)
    assert torch.equal(exact.open().load("model/embeddings.t").isnan(), model.embeddings.table("t").isnan())


@pytest.mark.parametrize(("bits", "most"), [(8, 1 / 255), (4, 1 / 15)])
def test_weights_are_rounded_and_state_is_not(tmp_path, bits, most):
    model = one_table()
    touch(model, list(range(50)) * 3)
    add(CheckpointFolder(tmp_path, reduction=CheckpointReduction(bits=bits)), 0, model)
    found, table = CheckpointFolder(tmp_path).open(), model.embeddings.table("t")
    near = found.load("model/embeddings.t")
    assert not torch.equal(near, table)
    assert float((near - table).abs().max()) <= float(table.max() - table.min()) * most
    state = model.embeddings.optimizer_state()["t"]
    assert torch.equal(found.load("rows/embeddings.t/sum"), state["sum"])
    assert sum(found.manifest.chain_bytes) < 1000 * 16 * (4 if bits == 8 else 2)


def test_int8_rows_stay_as_they_are_at_eight_bits(tmp_path):
    model = one_table(row_type="int8")
    add(CheckpointFolder(tmp_path, reduction=CheckpointReduction(bits=8)), 0, model)
    assert has_rows_of(CheckpointFolder(tmp_path).open(), model)


histories = st.tuples(
    st.lists(st.integers(0, 1200), min_size=1, max_size=60), st.integers(1, 1000), st.floats(0.0, 1.0)
)


@given(histories)
def test_the_policy_never_writes_more_than_full_ones_and_its_chains_end(history):
    increments, full_bytes, restores = history
    chain, written = [], 0
    for increment_bytes in increments:
        if is_full_due(chain, full_bytes, increment_bytes, restores=restores):
            chain = [full_bytes]
        else:
            assert chain
            chain.append(increment_bytes)
        written += chain[-1]
        assert len(chain) <= LONGEST + 1
    assert written <= full_bytes * len(increments)


@given(st.integers(1, 900), st.floats(0.01, 1.0))
def test_a_chain_of_equal_increments_ends_where_its_average_is_least(increment_bytes, restores):
    chain = [1000]
    while not is_full_due(chain, 1000, increment_bytes, restores=restores, longest=10_000):
        chain.append(increment_bytes)
    averages = [average_bytes([1000] + [increment_bytes] * n, restores) for n in range(2 * len(chain) + 2)]
    assert average_bytes(chain, restores) <= min(averages) * (1 + 1e-12)


def test_a_manifest_with_rows_outside_its_tensor_is_refused(tmp_path):
    model, saved = one_table(), incremental(tmp_path)
    add(saved, 0, model)
    touch(model, [3])
    add(saved, 1, model)
    manifest = CheckpointManifest.read(saved.path(1))
    entry = manifest.tensors["model/embeddings.t"]
    far = structs.replace(entry, chunks=(*entry.chunks[:-1], structs.replace(entry.chunks[-1], rows=(3, 4000))))
    bad = structs.replace(manifest, tensors=manifest.tensors | {"model/embeddings.t": far})
    (saved.path(1) / "manifest.json").write_bytes(bad.to_json())
    with pytest.raises(CheckpointError, match="rows 3 to 3999"):
        saved.open()
