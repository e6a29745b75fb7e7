"""Commands over crafted checkpoints, with limits of memory and processor time: one line, or accepted and right."""

import os
import resource
import subprocess
from random import Random

import pytest
import torch
import warm
from checkpoint.crafted import check_right, copy, head_of, mutate, plain, put, put_head, sound
from checkpoint.test_pickles import attacks, torch_file
from launching import ENVIRONMENT
from small import trained

from rowwise.checkpoint.dcp_source import METADATA
from rowwise.checkpoint.diff import diff
from rowwise.checkpoint.named import checkpoints_of, open_named, tables_of
from rowwise.checkpoint.read import Checkpoint

MEMORY_bytes = 6 << 30  # of addresses: torch alone takes half of it
PROCESSOR_S = 30  # a command takes 4
TIMEOUT_S = 300  # of a busy machine

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1200)]


def limit():
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_bytes, MEMORY_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_S, PROCESSOR_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run(folder, *args):
    """A command that either does what it should or ends in one line; its exit code, and what it printed."""
    call = [*warm.command(ENVIRONMENT), *map(str, args)]
    done = subprocess.run(
        call, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
        preexec_fn=limit,
    )  # fmt: skip
    what = f"{' '.join(call)}: {done.returncode}: {done.stdout[-500:]}{done.stderr[-2000:]}"
    if done.returncode == 2:
        assert done.stderr.startswith("rowwise: "), what
        assert done.stderr.count("\n") == 1, what
        assert done.stderr[:-1].isprintable(), what
        assert not done.stdout, what
    else:
        assert done.returncode in (0, 1), what
        assert not done.stderr, what
    assert "Traceback" not in done.stdout, what
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return sound(tmp_path_factory.mktemp("sound") / "three")


def verified(place, one, _whole):
    code, told = run(place, "ckpt", "verify", one)
    if code == 0:
        check_right(open_named(one))
    assert told or code == 2
    return code


def listed(place, one, _whole):
    code, told = run(place, "ckpt", "ls", one, "--json")
    assert code != 1
    assert code == 2 or all(f'"{name}"' in told for name in Checkpoint.open(one).names())
    return code


def compared(place, one, whole):
    code, _ = run(place, "ckpt", "diff", one, whole)
    assert code == 2 or diff(open_named(one), Checkpoint.open(whole)).any == bool(code)
    return code


def exported(place, one, _whole):
    code, _ = run(place, "ckpt", "export", one, "--parquet", place / "out")
    assert code != 1
    if code == 0:
        check_right(open_named(one))
        names = {f"{name}.parquet" for name in tables_of(Checkpoint.open(one).manifest)}
        assert set(os.listdir(place / "out")) == names
    return code


def resharded(place, one, _whole):
    code, _ = run(place, "ckpt", "reshard", one, place / "out", "--nproc", 2)
    assert code != 1
    assert code == 2 or not diff(open_named(one), Checkpoint.open(place / "out")).any
    return code


def imported(place, one, _whole):
    file = sorted(one.glob("*.safetensors"))[0]
    code, _ = run(place, "ckpt", "import", file, place / "out", "--map", "model/*=*", "--dry-run")
    assert code != 1
    return code


COMMANDS = {  # the kind of change, and the seed of it
    verified: (("manifest", 37), ("bytes", 1), ("size", 2), ("kind", 3)),
    listed: (("manifest", 37), ("text", 1), ("kind", 2)),
    compared: (("manifest", 37), ("swap", 1), ("head", 2)),
    exported: (("manifest", 37), ("manifest", 1), ("size", 2)),
    resharded: (("manifest", 37), ("manifest", 1), ("head", 2)),
    imported: (("head", 0), ("bytes", 1)),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_crafted_checkpoint_is_one_line_or_right(whole, tmp_path, command):
    counts = {0: 0, 1: 0, 2: 0}
    for kind, seed in COMMANDS[command]:
        place = tmp_path / f"{kind}-{seed}"
        place.mkdir()
        one = copy(whole, place / "one")
        print(command.__name__, mutate(one, Random(seed), [kind]))
        counts[command(place, one, whole)] += 1
        assert set(os.listdir(place)) <= {"one", "out"}
    print(f"COMMANDS {command.__name__}: {counts[2]} refused in one line, {counts[0]} accepted, {counts[1]} told of")


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("kind", ["dotted, of pathlib", "os.system"])
@pytest.mark.parametrize("folder", [True, False], ids=["dcp", "pt"])
def test_an_import_runs_nothing(tmp_path, kind, folder, dcp):
    """As it was reported: with --dry-run, too."""
    canary = tmp_path / "was-run"
    attack = attacks(str(canary))[kind]
    if folder:
        dcp.save({"t": torch.ones(4, 4)}, storage_writer=dcp.FileSystemWriter(tmp_path / "given"))
        (tmp_path / "given" / METADATA).write_bytes(attack)
    else:
        torch_file(tmp_path / "given", attack)
        (tmp_path / "given").rename(tmp_path / "given.pt")
    given = tmp_path / ("given" if folder else "given.pt")
    assert run(tmp_path, "ckpt", "import", given, "out", "--map", "t=table:t", "--dry-run")[0] == 2
    assert not canary.exists()
    assert not (tmp_path / "out").exists()


def with_pipe(newest):
    name = next(iter(plain(newest)["files"]))
    (newest / name).unlink()
    os.mkfifo(newest / name)


def with_other_shapes(newest):
    name = next(iter(plain(newest)["files"]))
    head, rest = head_of(newest / name)
    for word in head.values():
        word["shape"] = [1, *word["shape"]]
    put_head(newest, name, head, rest)


def with_text(newest):
    manifest = plain(newest)
    manifest["data"]["progress"] = "far"
    put(newest, manifest)


def test_commands_of_a_run_end_in_one_line(tmp_path):
    trained(tmp_path, train={"epochs": 1})
    path = tmp_path / "runs" / "small" / "1"
    more = {"eval": (), "predict": ("--out", tmp_path / "out"), "resume": ("--set", "train.epochs=2")}
    changes = {"eval": with_pipe, "predict": with_other_shapes, "resume": with_text}
    for command, change in changes.items():
        one = copy(path, tmp_path / command)
        change(checkpoints_of(one)[0])
        assert run(tmp_path, command, one, *more[command])[0] == 2, command
    assert not (tmp_path / "out").exists()
