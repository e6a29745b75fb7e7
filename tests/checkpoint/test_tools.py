"""What is done with checkpoints as they lie there: listed, checked, compared, written anew, given to others."""

import json
import math
import shutil

import pytest
import torch
from checkpoint.made import SPREAD, TABLES, drawn, flip, same, saved, wholes, write_by
from checkpoint.plans import contents, make_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet as pq

from rowwise import CheckpointError, Plan, SpecError, Topology
from rowwise.checkpoint import export as exporting
from rowwise.checkpoint import windows as seen
from rowwise.checkpoint import write as writing
from rowwise.checkpoint.atomic import atomic_output
from rowwise.checkpoint.check import verify
from rowwise.checkpoint.diff import diff
from rowwise.checkpoint.export import export_parquet, export_torch, own_names, torchrec_names
from rowwise.checkpoint.listing import list_checkpoints, list_tensors
from rowwise.checkpoint.manifest import NAME, CheckpointManifest, TensorEntry
from rowwise.checkpoint.named import open_named, tables_of
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.rewrite import retype_tables, rewrite
from rowwise.planning.planner import simple_plan
from rowwise.tables.ops import rowtype
from rowwise.tables.spec import RowType


@pytest.fixture
def three(tmp_path):
    """By three ranks."""
    return saved(tmp_path / "three")


def rewritten(checkpoint, folder, plan=None, every=None, some=None, *, state=True):
    tables = retype_tables(checkpoint, every, some or {})
    plan = plan or simple_plan(list(tables.values()), Topology(devices=2))
    rewrite(checkpoint, folder, plan, tables, state=state, tell=None)
    return Checkpoint.open(folder)


def weights(checkpoint, table):
    """Of a table, as float32."""
    one = tables_of(checkpoint.manifest)[table]
    out = torch.empty(one.entry.shape)
    checkpoint.copy_into(out, one.name, row_type=RowType.FP32)
    return out


def small(patch):
    """Pieces, files and windows so small that everything is cut."""
    patch.setattr(writing, "SIZES", writing.FileSizes(500, 2000))
    patch.setattr(seen, "WINDOW_bytes", 900)


@pytest.mark.slow
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), worlds=st.tuples(st.integers(1, 4), st.integers(1, 5)), cut=st.booleans())
def test_written_anew_for_another_plan_every_bit_is_the_same(tmp_path_factory, seed, worlds, cut):
    folder = tmp_path_factory.mktemp("ckpt")
    chance, trained, plan = drawn(seed, worlds[0])
    with pytest.MonkeyPatch.context() as patch:
        if cut:
            small(patch)
        first = write_by(folder / "first", trained, plan)
        second = rewritten(first, folder / "second", make_plan(chance, trained.tables, worlds[1]))
    assert second.find_damage() == []
    assert second.manifest.data == first.manifest.data
    a, b = contents(first), contents(second)
    assert a.keys() == b.keys()
    assert all(same(a[name], b[name]) for name in a)
    assert not diff(first, second).any
    assert {int(file[:5]) for file in second.manifest.files} <= set(range(worlds[1]))


@pytest.mark.slow
@settings(max_examples=6)
@given(seed=st.integers(0, 10**6), world=st.integers(1, 4))
def test_the_files_are_those_that_the_ranks_would_have_written(tmp_path_factory, seed, world):
    folder = tmp_path_factory.mktemp("ckpt")
    chance, trained, plan = drawn(seed, world)
    other = make_plan(chance, trained.tables, world)
    theirs = write_by(folder / "theirs", trained, other).manifest
    ours = rewritten(write_by(folder / "first", trained, plan), folder / "ours", other).manifest

    def writers(manifest, table):
        """The rank that wrote each place; tiles that touch may be one piece, or one tile several."""
        entry = manifest.tensors[f"model/embeddings.{table.name}"]
        found = torch.full(entry.shape, -1)
        for piece in entry.chunks:
            found[slice(*piece.rows), slice(*entry.chunk_cols(piece))] = int(piece.file[:5])
        return found

    for table in trained.tables:
        its = other.tiles_of(table.name)
        copied = len(its) > 1 and len({(tile.rows, tile.cols) for tile in its}) == 1
        # Who writes what of a copy depends on what else it writes.
        assert copied or torch.equal(writers(ours, table), writers(theirs, table))


@pytest.mark.parametrize("kind", list(RowType))
def test_rows_of_another_type_are_rounded_once(three, tmp_path, kind):
    found = rewritten(three, tmp_path / "other", every=kind, some={"few": RowType.FP32})
    for table in TABLES:
        entry = found.entry(f"model/embeddings.{table.name}")
        wanted = RowType.FP32 if table.name == "few" else kind
        group = table.column_group if wanted is table.row_type else None
        assert (entry.row_type, entry.column_group, entry.shape) == (wanted, group, (table.rows, table.dim))
        packed = rowtype.pack(weights(three, table.name), wanted, group)
        want = three.load(f"model/embeddings.{table.name}") if wanted is table.row_type else packed
        assert same(found.load(f"model/embeddings.{table.name}"), want)


def test_without_state_only_the_model_is_left(three, tmp_path):
    found = rewritten(three, tmp_path / "bare", state=False)
    assert set(found.names()) == {name for name in three.names() if name.startswith("model/")}
    assert found.manifest.data == {"step": 7, "samples": 700}


def test_a_plan_for_other_tables_is_refused(three, tmp_path):
    tiles = tuple(tile for tile in SPREAD.tiles if tile.table != "word")
    with pytest.raises(SpecError, match=r"'word' .*on no rank"):
        rewritten(three, tmp_path / "out", Plan(world=3, tiles=tiles))
    with pytest.raises(SpecError, match="12, as int8 columns"):
        rewritten(three, tmp_path / "out", SPREAD, RowType.INT8)
    with pytest.raises(CheckpointError, match="table 'usr'; did you"):
        rewritten(three, tmp_path / "out", SPREAD, some={"usr": RowType.FP16})
    with pytest.raises(CheckpointError, match="three exists already"):
        rewritten(three, three.folder)
    assert [path.name for path in tmp_path.iterdir()] == ["three"]


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 50), st.integers(1, 40), st.integers(1, 9))
def test_windows_are_all_rows_in_order_and_end_at_cuts(cuts, rows, reach, width):
    cuts = sorted({cut for cut in cuts if cut <= rows})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seen, "WINDOW_bytes", reach * width)
        found = list(seen.cut_rows(rows, width, cuts))
    assert [row for begin, end in found for row in range(begin, end)] == list(range(rows))
    for begin, end in found:
        inside = [cut for cut in cuts if begin < cut <= begin + reach]
        assert end - begin <= reach
        assert end == rows or not inside or end == inside[-1]


# --- what is damaged


def test_every_bad_piece_is_named(three):
    pieces = [(name, piece) for name in three.names() for piece in three.entry(name).chunks]
    name, piece = next((n, p) for n, p in pieces if n == "model/embeddings.item" and p.cols == (4, 8))
    gone = next(file for file in three.manifest.files if file != piece.file)
    (three.folder / gone).unlink()
    flip(three.folder, piece.file, Checkpoint.open(three.folder).header(piece.file).ranges[piece.key].begin)
    found = verify(three.folder)
    assert (found.good, found.whole) == (False, None)
    (checked,) = found.checked
    bad = {(one.tensor, one.place, one.file) for one in checked.damage}
    assert (name, "rows 0 to 39, columns 4 to 7", piece.file) in bad
    assert len(bad) == 1 + sum(p.file == gone for _, p in pieces)
    assert all(one.file in (gone, piece.file) for one in checked.damage)


@pytest.fixture(scope="module")
def one_saved(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("kept") / "one").folder


def run_of(tmp_path, one_saved, steps=(5, 10, 15)):
    """A run's folder with copies of a checkpoint."""
    for step in steps:
        shutil.copytree(one_saved, tmp_path / "run" / "ckpt" / f"step-{step:09}")
    return tmp_path / "run"


def test_an_older_one_that_is_whole_is_named(tmp_path, one_saved):
    run = run_of(tmp_path, one_saved)
    newest, middle = run / "ckpt" / "step-000000015", run / "ckpt" / "step-000000010"
    assert verify(run).whole == "step-000000015"
    flip(newest, "00001-00000.safetensors")
    flip(middle, NAME, 300)
    found = verify(newest)
    assert [{bad.file for bad in one.damage} for one in found.checked] == [{"00001-00000.safetensors"}, {NAME}, set()]
    assert found.whole == "step-000000005"
    assert verify(run) == found
    assert verify(run / "ckpt" / "step-000000005").good
    # It does not help that a newer one is whole.
    shutil.rmtree(newest)
    shutil.copytree(one_saved, newest)
    assert verify(middle).whole == "step-000000005"
    assert verify(run).whole == "step-000000015"


def test_progress_is_told(three):
    told = []
    verify(three.folder, lambda done, of: told.append((done, of)))
    assert told[-1][0] == told[-1][1] > 0
    assert told == sorted(told)


# --- what there is


def test_checkpoints_of_a_run_are_listed(tmp_path, one_saved):
    run = run_of(tmp_path, one_saved)
    home = run / "ckpt"
    shutil.copytree(one_saved, home / "failed")
    (home / "step-000000020.part").mkdir()
    (home / "step-000000005" / NAME).write_text("{}")
    writing.write_data(home / "step-000000015", {"progress": {"step": 15, "samples": 99, "best": {"step": 10}}})
    found = {one.name: one for one in list_checkpoints(run)}
    assert list(found) == [*(f"step-0000000{n}" for n in ("15", "10", "05")), "failed", "step-000000020.part"]
    last, best, broken, failed, unfinished = found.values()
    assert (last.marks, last.step, last.samples, last.ranks) == (("last",), 15, 99, 3)
    assert last.written_bytes == last.size_bytes == sum(path.stat().st_size for path in one_saved.glob("*.safetensors"))
    assert (best.marks, best.tensors) == (("best",), len(Checkpoint.open(one_saved).names()))
    assert "is damaged" in broken.problem
    assert failed.marks == ("failed",)
    assert unfinished.problem == "not complete"
    assert list_checkpoints(home) == list_checkpoints(run)
    assert open_named(run).folder == home / "step-000000015"


def test_tensors_are_listed(three):
    found = {one.name: one for one in list_tensors(three.manifest)}
    assert list(found) == three.names()
    word = found["model/embeddings.word"]
    assert (word.kind, word.shape, word.chunks) == ("int8 rows", (30, 32), 2)
    assert word.size_bytes == 30 * (32 + 2 * 8)
    assert found["model/top.weight"].kind == "float32"


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda at: None, "no such folder: expected a checkpoint or a run"),
        (lambda at: at.mkdir(), "is no checkpoint: it has no manifest.json; nor a run"),
        (lambda at: (at / "ckpt").mkdir(parents=True), "has no checkpoint yet"),
        (lambda at: at.write_text(""), "is no checkpoint"),
    ],
    ids=["nothing", "empty", "before the first", "a file"],
)
def test_what_is_no_checkpoint_says_so(tmp_path, make, want):
    make(tmp_path / "it")
    with pytest.raises(CheckpointError, match=want):
        open_named(tmp_path / "it")
    with pytest.raises(CheckpointError, match=want):
        verify(tmp_path / "it")


def test_what_was_not_completed_says_so(tmp_path, one_saved):
    run = run_of(tmp_path, one_saved)
    part = run / "ckpt" / "step-000000020.part"
    part.mkdir()
    with pytest.raises(CheckpointError, match=r"step-000000020.part"):
        open_named(part)


# --- what differs


def test_rows_that_differ_are_counted(tmp_path):
    a = {"x": torch.zeros(100, 3), "n": torch.tensor(4), "same": torch.ones(2), "gone": torch.ones(1)}
    b = {"x": torch.zeros(100, 3), "n": torch.tensor(7), "same": torch.ones(2), "new": torch.ones(1)}
    b["x"][5, 1], b["x"][80] = 2.5, torch.tensor([0.0, -0.0, 1.0])
    a |= {"shape": torch.ones(2), "type": torch.ones(2), "bad": torch.tensor([1.0, math.nan, math.inf, math.nan])}
    b |= {"shape": torch.ones(3), "type": torch.ones(2).half(), "bad": torch.tensor([1.0, math.nan, math.inf, 0.0])}
    wholes(tmp_path / "a", a, {"progress": {"step": 3, "time_s": 1.5, "best": None}})
    wholes(tmp_path / "b", b, {"progress": {"step": 4, "time_s": 9.5, "best": {"step": 2}}})
    found = diff(Checkpoint.open(tmp_path / "a"), Checkpoint.open(tmp_path / "b"))
    by_name = {one.name: one for one in found.tensors}
    assert found.equal == 1
    assert (by_name["x"].rows, by_name["x"].of_rows, by_name["x"].largest) == (2, 100, 2.5)
    assert (by_name["n"].rows, by_name["n"].largest) == (1, 3.0)
    assert (by_name["gone"].kind, by_name["new"].kind) == ("only in the first", "only in the second")
    assert (by_name["shape"].first, by_name["shape"].second) == ("(2,)", "(3,)")
    assert (by_name["type"].first, by_name["type"].second) == ("float32", "float16")
    assert by_name["bad"].rows == 1
    assert math.isnan(by_name["bad"].largest)
    assert found.data == {"progress.step": (3, 4), "progress.best.step": (None, 2)}


def test_rows_of_different_types_are_compared_as_floats(three, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        other = rewritten(three, tmp_path / "other", every=RowType.INT8)
        found = {one.name: one for one in diff(three, other).tensors}
    gap = (weights(three, "user") - weights(other, "user")).abs()
    user = found["model/embeddings.user"]
    assert (user.kind, user.first, user.second) == ("type", "fp32 rows", "int8 rows")
    assert user.rows == int((gap > 0).any(1).sum())
    assert user.largest == pytest.approx(gap.max().item())
    assert "model/embeddings.word" not in found


# --- to others


@pytest.mark.parametrize("cut", [False, True])
def test_parquet_has_the_rows(three, tmp_path, monkeypatch, cut):
    if cut:
        small(monkeypatch)
        monkeypatch.setattr(exporting, "GROUP_bytes", 400)
    files = {file.stem: file for file in export_parquet(three, tmp_path / "out", state=True)}
    assert files.keys() == {table.name for table in TABLES}
    for table in TABLES:
        read = pq.read_table(files[table.name])
        assert read["id"].to_pylist() == list(range(table.rows))
        vectors = torch.tensor(read["vector"].to_pylist())
        assert same(vectors, weights(three, table.name))
        about = {k.decode(): v.decode() for k, v in read.schema.metadata.items()}
        assert about["rowwise.table"] == table.name
        assert about["rowwise.row_type"] == table.row_type
        assert about["rowwise.step"] == "7"
        assert about["rowwise.updates"] == "3"
        for slot in set(read.column_names) - {"id", "vector"}:
            state = three.load(f"rows/embeddings.{table.name}/{slot}")
            assert same(torch.tensor(read[slot].to_pylist()), state)
    assert set(pq.read_schema(files["user"]).names) == {"id", "vector", "exp_avg", "exp_avg_sq"}
    assert pq.read_metadata(files["user"]).row_group(0).column(1).compression == "ZSTD"
    assert (pq.read_metadata(files["user"]).num_row_groups > 1) is cut


def test_only_the_tables_that_are_named_are_exported(three, tmp_path):
    assert [file.stem for file in export_parquet(three, tmp_path / "out", ["word"])] == ["word"]
    assert pq.read_schema(tmp_path / "out" / "word.parquet").names == ["id", "vector"]
    with pytest.raises(CheckpointError, match="table 'wort'; did you"):
        export_parquet(three, tmp_path / "no", ["wort"])
    assert own_names(three, ["word"]) == {"model/embeddings.word": "embeddings.word"}
    with pytest.raises(CheckpointError, match="has no table"):
        own_names(three, ["x"])


def test_a_torch_file_has_the_state_dict(three, tmp_path, monkeypatch):
    small(monkeypatch)
    export_torch(three, tmp_path / "all.pt", own_names(three, state=True))
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert {"embeddings.user", "top.weight", "rows/embeddings.user/exp_avg", "rows/embeddings.item/step"} < set(found)
    for table in TABLES:
        assert same(found[f"embeddings.{table.name}"], weights(three, table.name))
    for name in three.names():
        if not name.startswith(("model/embeddings", "rng/")):
            assert same(found[name.removeprefix("model/")], three.load(name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.pt", "three"]


def test_names_of_torchrec(three):
    found = torchrec_names(three, sequences=["word"], prefix="sparse.")
    assert found["model/embeddings.user"] == "sparse.embedding_bags.user.weight"
    assert found["model/embeddings.word"] == "sparse.embeddings.word.weight"
    with pytest.raises(CheckpointError, match="has no table 'wort'"):
        torchrec_names(three, sequences=["wort"])


def test_what_fails_leaves_nothing(three, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise CheckpointError("it is damaged")

    monkeypatch.setattr(Checkpoint, "fill", broken)
    before = sorted(tmp_path.rglob("*"))
    for attempt in (
        lambda: rewritten(three, tmp_path / "out", SPREAD),
        lambda: export_parquet(three, tmp_path / "out"),
        lambda: export_torch(three, tmp_path / "out.pt", own_names(three)),
    ):
        with pytest.raises(CheckpointError, match="it is damaged"):
            attempt()
        assert sorted(tmp_path.rglob("*")) == before


def test_ctrl_c_leaves_nothing(tmp_path):
    def stopped():
        with atomic_output(tmp_path / "out") as part:
            part.mkdir()
            (part / "half").write_text("")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_error(tmp_path):
    want = "out was not written: No space left on device"
    with pytest.raises(CheckpointError, match=want), atomic_output(tmp_path / "out"):
        raise OSError(28, "No space left on device")


def test_a_manifest_says_what_it_is_to_others(three, tmp_path):
    """What was written anew is as open as what was saved."""
    rewritten(three, tmp_path / "out")
    plain = json.loads((tmp_path / "out" / NAME).read_text())
    assert plain["tensors"]["model/embeddings.word"]["row_type"] == "int8"


def test_tables_of_two_modules_may_have_one_name(tmp_path):
    entry = TensorEntry(dtype="float32", shape=(4, 4), row_type=RowType.FP32)
    both = CheckpointManifest(format=2, data={}, files={}, tensors={"model/a.t": entry, "model/b.t": entry})
    assert list(tables_of(both)) == ["a.t", "b.t"]
