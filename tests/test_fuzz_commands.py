"""Crafted inputs through real commands: each ends with exit code 2 and one line, in seconds and in bounded memory.

The campaigns beside this one go through the same readers in one process, thousands of variants at a time; what is
added here is the command around them, the system's limits, and what stands in the place of a file.
"""

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import warm
import yaml
from small import sections, trained

GOLDEN = Path(__file__).parent / "golden" / "files"
DATA_bytes, CPU_S, LIMIT_S = 6 << 30, 60, 200.0  # none needs a tenth of these
HUGE = "9" * 5000
NESTED = "[" * 20_000
BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}]\n" for a, b in pairwise("abcdefghi"))
TABLES = [{"name": "a", "rows": 1000, "dim": 8, "pooling": 2.0}]
CSV = "name,rows,dim,pooling\na,{},8,2\n"
PLAN = {"world": 2, "tiles": [{"table": "a", "rank": 0, "rows": [0, 1000], "cols": [0, 8]}], "approximate": []}
ATTACK = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0ctouch escaped\x85R."


class Case(NamedTuple):
    """A command in a copy of the folder of a small run, after something was done to it."""

    name: str
    command: str
    craft: Callable[[Path], object]
    accepted: bool = False


def text(name: str, content: str | bytes) -> Callable[[Path], object]:
    def craft(at: Path) -> None:
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).unlink(missing_ok=True)
        (at / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return craft


def data(name: str, content: object) -> Callable[[Path], object]:
    return text(name, json.dumps(content))


def fifo(name: str) -> Callable[[Path], object]:
    def craft(at: Path) -> None:
        (at / name).unlink(missing_ok=True)
        os.mkfifo(at / name)

    return craft


def link(name: str, to: str = "outside") -> Callable[[Path], object]:
    def craft(at: Path) -> None:
        if (at / name).is_dir():
            shutil.rmtree(at / name)
        (at / name).unlink(missing_ok=True)
        (at / name).symlink_to(to if to.startswith("/") else at / to)

    return craft


def flipped(pattern: str, places: float) -> Callable[[Path], object]:
    """Ones and zeros change places in files, from a share of each on, in one byte of 16."""

    def craft(at: Path) -> None:
        for path in sorted(at.glob(pattern)):
            content = bytearray(path.read_bytes())
            begin = int(places * len(content))
            content[begin::16] = bytes(255 - byte for byte in content[begin::16])
            path.write_bytes(content)

    return craft


def changed(**changes: object) -> Callable[[Path], object]:
    """The recipe of the small run, with other sections."""
    return lambda at: (at / "small.yaml").write_text(yaml.safe_dump(sections(at, **changes)))


def both(*crafts: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda at: [craft(at) for craft in crafts]


INFINITE = (GOLDEN / "hardware.json").read_text().replace(": 8000000000.0", ": 1e999", 1)
RUN, PLANNING = "runs/small/1", "plan --topology 2xcpu --seconds 0.1"
FIRST = "train small.yaml --dry-run"
CASES = (
    Case("recipe: nested", "train x.yaml --dry-run", text("x.yaml", f"model: {NESTED}")),
    Case("recipe: digits", "train x.yaml --dry-run", text("x.yaml", f"seed: {HUGE}")),
    Case("recipe: tag", "train x.yaml", text("x.yaml", "name: !!python/object/apply:os.system ['touch escaped']\n")),
    Case("recipe: aliases", "train x.yaml --dry-run", text("x.yaml", BOMB)),
    Case("recipe: a FIFO", "train x.yaml --dry-run", fifo("x.yaml")),
    Case("recipe: a device", "train x.yaml --dry-run", link("x.yaml", "/dev/zero")),
    Case("recipe: other bytes", "train x.yaml --dry-run", text("x.yaml", b"name: \xff\xfe\n")),
    Case("recipe: batch", FIRST, changed(train={"batch": 1 << 62})),
    Case("recipe: threads", FIRST, changed(train={"threads": 1 << 40})),
    Case("recipe: workers", FIRST, changed(data={"workers": {"count": 1 << 40}})),
    Case("--set: batch", f"{FIRST} --set train.batch={HUGE}", changed()),
    Case("--set: nested", f"{FIRST} --set model={NESTED[:5000]}", changed()),
    Case("--set: escape", f"{FIRST} --set train.\x1b[2J=1", changed()),
    Case("plan: world", f"{FIRST} --plan p.json", both(changed(), data("p.json", {**PLAN, "world": 1 << 62}))),
    Case("plan: a FIFO", f"{FIRST} --plan p.json", both(changed(), fifo("p.json"))),
    Case("profile: nested", f"{FIRST} --hardware ./h.json", both(changed(), text("h.json", NESTED))),
    Case("profile: not finite", "plan --tables t.json --topology 2xh.json",
         both(data("t.json", TABLES), text("h.json", INFINITE))),
    Case("tables: rows", f"{PLANNING} --tables t.json", data("t.json", [{**TABLES[0], "rows": 1 << 62}])),
    Case("tables: a path", f"{PLANNING} --tables t.json", data("t.json", [{**TABLES[0], "name": "../../x"}])),
    Case("tables: digits", f"{PLANNING} --tables t.csv", text("t.csv", CSV.format(HUGE))),
    Case("tables: accesses", f"{PLANNING} --tables t.json", data("t.json", [{**TABLES[0], "zipf_a": -1e308}])),
    Case("constraints: twice", f"{PLANNING} --tables t.json --constraints c.json",
         both(data("t.json", TABLES), text("c.json", '{"layouts": {"a": ["row_wise"], "a": ["table_wise"]}}'))),
    Case("constraints: nested", f"{PLANNING} --tables t.json --constraints c.json",
         both(data("t.json", TABLES), text("c.json", NESTED))),
    Case("--replan: rows", f"{PLANNING} --tables t.json --replan p.json",
         both(data("t.json", TABLES), data("p.json", {**PLAN, "tiles": [{**PLAN["tiles"][0], "rows": [0, 1 << 62]}]}))),
    Case("id map: a head", "train small.yaml --dry-run --set tables.list.0.id_map={kind: stored, file: m.idmap}",
         both(changed(), text("m.idmap", (1 << 60).to_bytes(8, "little") + b"{}"))),
    Case("id map: cut", "train small.yaml --dry-run --set tables.list.0.id_map={kind: stored, file: m.idmap}",
         both(changed(), text("m.idmap", (GOLDEN / "user.idmap").read_bytes()[:-9]))),
    Case("run: metrics are a link", f"resume {RUN} --set train.epochs=2", link(f"{RUN}/metrics.csv")),
    Case("run: checkpoints are a link", f"resume {RUN} --set train.epochs=2", link(f"{RUN}/ckpt")),
    Case("run: the log is a FIFO", f"resume {RUN} --set train.epochs=2", fifo(f"{RUN}/log.txt")),
    Case("run: eval of a flipped tensor", f"eval {RUN}", flipped(f"{RUN}/ckpt/*/*.safetensors", 0.08)),
    Case("run: predict with a flipped manifest", f"predict {RUN} --out p.parquet",
         flipped(f"{RUN}/ckpt/*/manifest.json", 0.5)),
    Case("run: recipe of a FIFO", f"eval {RUN}", fifo(f"{RUN}/recipe.yaml")),
    Case("run: report of markup", f"report {RUN}",
         text(f"{RUN}/warnings.txt", "<script>x\x1b[2J</script>\n"), accepted=True),
    Case("run: report through a link", f"report {RUN}", link(f"{RUN}/report.html"), accepted=True),
    Case("calibration: order", "calibrate c --minutes 0.01", text("c/order.json", NESTED)),
    Case("calibration: memory", "calibrate c --minutes 0.01", data("c/order.json", {"limits": {"bytes": 1 << 62}})),
    Case("compress: order", "compress small.yaml --ratio 2 --out c", both(changed(), text("c/order.json", NESTED))),
    Case("convert: a journal of paths", "data convert rows.parquet w",
         both(text("w/_rowwise/journal.jsonl", '{"path": "../../x"}\n'), text("w/x.parquet", ""))),
    Case("convert: a lock elsewhere", "data convert rows.parquet w",
         both(text("w/_rowwise/x", ""), link("w/_rowwise/lock"))),
    Case("convert: a manifest", "data convert rows.parquet w", text("w/_rowwise/warehouse.json", NESTED)),
    Case("Parquet: footer", "data inspect rows.parquet", flipped("rows.parquet", 0.99)),
    Case("Parquet: cut", "data inspect x.parquet", text("x.parquet", b"PAR1" + bytes(100) + b"\xff\xff\xff\x7fPAR1")),
    Case("Parquet: a FIFO", "data inspect x.parquet", fifo("x.parquet")),
    Case("CSV: zeros", "data inspect x.csv", text("x.csv", b"a,b\n1,2\n3,\x00\xff\n1,2,3\n")),
    Case("CSV: a FIFO", "data inspect x.csv", fifo("x.csv")),
    Case("CSV: a device", "data inspect x.csv", link("x.csv", "/dev/zero")),
    Case("import: a pickle", "ckpt import d o --dry-run", text("d/.metadata", ATTACK)),
)  # fmt: skip


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_bytes, DATA_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))


def words_of(command: str) -> list[str]:
    before, mark, value = command.partition(" --set ")
    return [*before.split(), *(("--set", value) if mark else ())]


def ended(case: Case, at: Path) -> str:
    """How a case ended, in a word; what is wrong with it, if anything is."""
    case.craft(at)
    command = [*warm.command(), *words_of(case.command)]
    try:
        done = subprocess.run(
            command,
            cwd=at,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_S,
            preexec_fn=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"still there after {LIMIT_S:g} s"
    out, said = done.stdout.decode(), done.stderr.decode()
    lines = said.splitlines()
    if (at / "outside").read_text() != "mine\n" or (at / "escaped").exists():
        return "it wrote elsewhere, or ran what it was told to"
    if "\x1b" in out + said or "Traceback" in out + said:
        return f"a traceback, or a command to the terminal: {said[-600:]!r}"
    if case.accepted and done.returncode == 0:
        return "accepted and right"
    one = len(lines) == 1 and lines[0].startswith("rowwise: ") and lines[0].isprintable()
    return "refused in one line" if done.returncode == 2 and one else f"exit {done.returncode}: {said[-600:]!r}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("small")
    trained(place, train={"epochs": 1})
    (place / "outside").write_text("mine\n")
    return place


@pytest.mark.slow
def test_commands_of_crafted_files(folder: Path, tmp_path: Path) -> None:
    def take(case: Case) -> str:
        at = tmp_path / str(CASES.index(case))
        shutil.copytree(folder, at)
        return ended(case, at)

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip([case.name for case in CASES], pool.map(take, CASES), strict=True))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    refused, right = (sum(x == y for x in found.values()) for y in ("refused in one line", "accepted and right"))
    other = {name: how for name, how in found.items() if how not in ("refused in one line", "accepted and right")}
    counts = f"{refused} refused in one line, {right} accepted and right, {len(other)} anything else"
    print(f"\nCAMPAIGN commands: {counts}; {took_s:.0f} s of processor time")
    assert not other, "\n".join(f"{name}: {how}" for name, how in other.items())
