"""`rowwise ckpt` as users meet it: real files, what is printed, exit codes, and kills."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from checkpoint.made import SPREAD, flip, saved, wholes
from pyarrow import parquet as pq
from small import recipe, trained
from test_cli import rowwise_cli

from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.manifest import NAME
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import write
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.trained import load_trained
from rowwise.tables.spec import RowType


@pytest.fixture
def run(tmp_path):
    """A run that was trained to its end, with three checkpoints."""
    trained(tmp_path, save={"every": 8, "keep": 3})
    return tmp_path / "runs" / "small" / "1"


@pytest.fixture
def refused(refused):
    return partial(refused, "ckpt")


@pytest.fixture
def ok(command):
    """What a command printed that ended well."""

    def run(*args):
        code, out, err = command("ckpt", *map(str, args))
        assert (code, err) == (0, "")
        return out

    return run


def columns(out):
    """Words of each line."""
    return [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]


@pytest.mark.slow
def test_a_run_is_listed_checked_and_compared(ok, command, run):
    lines = columns(ok("ls", run))
    assert lines[0] == ["checkpoint", "step", "samples", "size", "written", "tensors", "ranks", "saved", "how"]
    newest, middle, oldest = lines[1:]
    assert newest[:2] == ["step-000000020", "last, best"]
    assert (middle[0], oldest[0]) == ("step-000000016", "step-000000010")
    told = json.loads(ok("ls", run, "--json"))
    assert [(one["step"], one["ranks"]) for one in told] == [(20, 1), (16, 1), (10, 1)]
    out = ok("ls", run / "ckpt" / "step-000000016")
    assert ["model/embeddings.user", "fp32 rows", "50 x 8", "1.6 kB", "1"] in columns(out)
    assert ok("verify", run) == "".join(f"{name}: intact\n" for name, *_ in lines[1:])
    code, out, _ = command("ckpt", "diff", str(run / "ckpt" / "step-000000016"), str(run))
    assert code == 1
    assert "progress.step " in out
    assert "--json shows all" in out
    code, out, _ = command("ckpt", "diff", str(run), str(run), "--json")
    assert (code, json.loads(out)["tensors"]) == (0, [])


@pytest.mark.slow
def test_training_twice_gives_equal_checkpoints(ok, run, tmp_path):
    TrainingRun.start(recipe(tmp_path, save={"every": 8, "keep": 3}), tmp_path / "runs").go()
    assert re.fullmatch(r"equal: \d+ tensors, bit for bit\n", ok("diff", run, tmp_path / "runs" / "small" / "2"))


@pytest.mark.slow
def test_damage_is_shown(command, run):
    newest = run / "ckpt" / "step-000000020"
    one = Checkpoint.open(newest)
    (piece,) = one.entry("model/embeddings.item").chunks
    flip(newest, piece.file, one.header(piece.file).ranges[piece.key].begin)
    code, out, _ = command("ckpt", "verify", str(newest))
    assert code == 1
    lines = columns(out)
    assert lines[0] == ["step-000000020: 1 damaged chunks"]
    assert lines[2] == ["model/embeddings.item", "rows 0 to 29", piece.file, "wrong checksum"]
    assert lines[3:] == [["step-000000016: intact"], ["step-000000016 is intact"]]
    (newest / piece.file).unlink()
    (run / "ckpt" / "step-000000016" / NAME).write_text("{")
    (run / "ckpt" / "step-000000010" / NAME).unlink()
    code, out, _ = command("ckpt", "verify", str(run), "--json")
    assert code == 1
    told = json.loads(out)
    assert told["whole"] is None
    gone = [p for entry in one.manifest.tensors.values() for p in entry.chunks if p.file == piece.file]
    assert [len(other["damage"]) for other in told["checked"]] == [len(gone), 1]
    code, out, _ = command("ckpt", "verify", str(run))
    assert "no intact checkpoint in" in out


@pytest.mark.slow
def test_written_anew_a_run_goes_on_from_it(ok, run, tmp_path):
    """The checkpoint of another plan in the place of the run's own."""
    plan = tmp_path / "plan.json"
    tables = [f'{{"table":"{n}","rank":{k},"rows":[0,{r}],"cols":[0,8]}}' for k, (n, r) in enumerate(SMALL)]
    plan.write_text(f'{{"world":3,"tiles":[{",".join(tables)}]}}')
    out = ok("reshard", run, tmp_path / "three", "--plan", plan)
    assert re.match(r".*three: \d+ tensors of .*step-000000020, .* kB, for 3 ranks\n", out)
    assert ok("diff", run, tmp_path / "three").startswith("equal: ")
    before = load_trained(run)[1].state_dict()
    last = run / "ckpt" / "step-000000020"
    last.rename(tmp_path / "before")
    (tmp_path / "three").rename(last)
    after = load_trained(run, "last")[1].state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


SMALL = (("user", 50), ("item", 30), ("seen", 20))


@pytest.mark.slow
def test_smaller_rows_without_state(ok, run, tmp_path):
    ok("reshard", run, tmp_path / "out", "--nproc", "1", "--row-type", "int8", "--table", "user=fp16", "--no-state")
    found = Checkpoint.open(tmp_path / "out")
    kinds = {name: found.entry(f"model/embeddings.{name}").row_type for name, _ in SMALL}
    assert kinds == {"user": RowType.FP16, "item": RowType.INT8, "seen": RowType.INT8}
    assert all(name.startswith("model/") for name in found.names())
    started = TrainingRun.start(recipe(tmp_path, init_from=str(tmp_path / "out")), tmp_path / "runs")
    assert len(started.match.loaded) == len(found.names())


@pytest.mark.slow
def test_given_to_others(ok, run, tmp_path):
    out = ok("export", run, "--parquet", tmp_path / "vectors", "--table", "user", "--state")
    assert out.splitlines() == [
        f"wrote {tmp_path / 'vectors'} from {run / 'ckpt' / 'step-000000020'}",
        f"  {tmp_path / 'vectors' / 'user.parquet'}",
    ]
    assert pq.read_schema(tmp_path / "vectors" / "user.parquet").names == ["id", "vector", "sum"]
    assert "  rec.embedding_bags.user.weight\n" in ok(
        "export", run, "--torchrec", tmp_path / "t.pt", "--prefix", "rec", "--sequence", "item"
    )
    assert "rec.embeddings.item.weight" in torch.load(tmp_path / "t.pt", weights_only=True)
    ok("export", run, "--torch", tmp_path / "all.pt")
    assert "top.layers.0.weight" in torch.load(tmp_path / "all.pt", weights_only=True)
    assert "  embeddings.seen\n" in ok("export", run, "--dcp", tmp_path / "dcp", "--table", "seen")


def test_taken_from_others(ok, run, tmp_path):
    ok("export", run, "--torchrec", tmp_path / "t.pt", "--prefix", "sparse")
    before = sorted(tmp_path.iterdir())
    out = ok("import", tmp_path / "t.pt", tmp_path / "start", "--dry-run")
    assert ["sparse.embedding_bags.user.weight", "model/embeddings.user", "fp32, table user", "50 x 8"] in columns(out)
    assert sorted(tmp_path.iterdir()) == before
    out = ok("import", tmp_path / "t.pt", tmp_path / "start", "--map", "sparse.embedding_bags.item.weight=table:goods")
    assert out.endswith(f"start from it with: rowwise train RECIPE --init-from {tmp_path / 'start'}\n")
    started = TrainingRun.start(recipe(tmp_path, init_from=str(tmp_path / "start")), tmp_path / "runs")
    assert set(started.match.loaded) == {"model/embeddings.user", "model/embeddings.seen"}
    assert started.match.unused == ["model/embeddings.goods"]
    told = json.loads(ok("import", tmp_path / "t.pt", tmp_path / "again", "--json"))
    assert [one["table"] for one in told["taken"]] == ["user", "item", "seen"]


def test_what_is_wrong_is_one_line(refused, run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "plan.json").write_text(SPREAD.to_json())
    (tmp_path / "bad.json").write_text('{"wrld": 3}')
    resharded = ("reshard", run, "out", "--nproc", "2")
    wrong = {
        ("ls", tmp_path / "nowhere"): "nowhere: no such folder: expected a checkpoint or a run",
        ("ls", tmp_path / "empty"): "empty is no checkpoint: it has no manifest.json; nor a run",
        ("verify", tmp_path / "nowhere"): "no such folder",
        ("diff", run, tmp_path / "empty"): "is no checkpoint",
        ("reshard", run, "out", "--plan", "plan.json"): "no such table; the tables are user, item, seen",
        ("reshard", run, "out", "--plan", "bad.json"): "not a plan: .*`wrld`",
        ("reshard", run, "out", "--plan", "none.json"): "none.json: No such file",
        ("reshard", run, "empty", "--nproc", "2"): "empty exists already; choose another name",
        (*resharded, "--table", "usr=int8"): "no table 'usr'; did you mean 'user'?",
        (*resharded, "--table", "user=int9"): "expected NAME=ROWTYPE, where ROWTYPE is one of fp32, ",
        ("export", run, "--parquet", "empty"): "empty exists already",
        ("export", run, "--torch", "a", "--table", "sen"): "has no table 'sen'; did you mean 'seen'?",
        ("import", "nowhere.pt", "out"): "nowhere.pt: no such file: expected ",
        ("import", run / "recipe.yaml", "out"): "recipe.yaml cannot be read",
        ("import", "empty", "out"): "empty has no .metadata",
        ("import", "nowhere.pt", "empty"): "empty exists: expected another name",
    }
    before = sorted(tmp_path.rglob("*"))
    for args, want in wrong.items():
        assert re.search(want if ".*" in want else re.escape(want), refused(*args)), args
    assert sorted(tmp_path.rglob("*")) == before


KILLED = {
    "reshard": ("reshard", "big", "out", "--nproc", "3"),
    "parquet": ("export", "big", "--parquet", "out"),
    "dcp": ("export", "big", "--dcp", "out"),
    "torch": ("export", "big", "--torch", "out"),
    "import": ("import", "big.pt", "out", "--map", "t=table:t"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "number"), [*((which, signal.SIGKILL) for which in KILLED), ("reshard", signal.SIGINT)]
)
def test_a_kill_in_the_middle_leaves_nothing_that_looks_complete(tmp_path, which, number):
    rows = torch.randn(400_000, 64)
    torch.save({"t": rows}, tmp_path / "big.pt")
    part = LocalShard(name="model/t", tensor=rows, shape=(400_000, 64), rows=(0, 400_000), row_type=RowType.FP32)
    write(tmp_path / "big", [part], {})
    command = [sys.executable, "-m", "rowwise.cli.main", "ckpt", *KILLED[which]]
    out, met = tmp_path / "out", 0
    for delay_s in (0.0, 0.03):
        for left in tmp_path.glob("*out*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            end_s = time.monotonic() + 60
            while process.poll() is None and not list(tmp_path.glob("out*")) and time.monotonic() < end_s:
                time.sleep(0.001)
            time.sleep(delay_s)
            process.send_signal(number)
            said = process.communicate(timeout=60)
        if process.returncode == 0:
            continue  # it was faster
        met += 1
        assert process.returncode == (130 if number == signal.SIGINT else -number), said
        assert not out.exists()
        assert number == signal.SIGKILL or not list(tmp_path.glob("*out*"))
    assert met
    for whole in tmp_path.glob("out"):
        shutil.rmtree(whole) if whole.is_dir() else whole.unlink()
    assert rowwise_cli("ckpt", *KILLED[which], cwd=tmp_path).returncode == 0  # what is left is in nobody's way
    assert out.exists()
    assert not list(tmp_path.glob("*.part"))


def test_three_ranks_of_four_row_types(ok, tmp_path):
    """What ranks have written together is one checkpoint to every command."""
    saved(tmp_path / "three")
    assert ["model/embeddings.word", "int8 rows", "30 x 32", "1.4 kB", "2"] in columns(ok("ls", tmp_path / "three"))
    ok("verify", tmp_path / "three")
    ok("reshard", tmp_path / "three", tmp_path / "five", "--nproc", "5")
    assert ok("diff", tmp_path / "three", tmp_path / "five").startswith("equal: ")


def test_names_are_shown_as_they_are(ok, tmp_path):
    wholes(tmp_path / "odd", {"model/[bold]x": torch.ones(2)})
    assert "model/[bold]x" in ok("ls", tmp_path / "odd")
