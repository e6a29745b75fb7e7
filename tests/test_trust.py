"""What strangers put into names and recipes: said before it runs, and never a command to a terminal or a browser."""

import io
import json
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import warm
from rich.table import Table as Grid

from rowwise.checkpoint.check import CheckedCheckpoint, CheckResult
from rowwise.checkpoint.listing import ListedCheckpoint
from rowwise.checkpoint.read import DamagedChunk
from rowwise.cli.ckpt_show import show_checkpoints, show_verdict
from rowwise.cli.terminal import Terminal, print_json
from rowwise.ingest.warehouse.journal import FOLDER, Journal
from rowwise.ingest.warehouse.popularity import log_use
from rowwise.planning.calibrate.folder import lock_exclusively
from rowwise.recipes.code import find_foreign_code
from rowwise.recipes.text import decode, parse
from rowwise.report import write

HOSTILE = "x\x1b[2J[/bold]<script>alert(1)</script>"
OWN = "data: {{dataset: synthetic}}\nmodel: {model}\ntransforms: [{transform}]\n"


def elsewhere(folder: Path, model: str = "{kind: dlrm}", transform: str = "") -> tuple[str, ...]:
    text = OWN.format(model=model, transform=transform)
    return find_foreign_code(decode(parse(text, "x"), "x"), folder / "my.yaml")


def test_code_that_is_not_beside_its_recipe_is_named(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    assert elsewhere(here) == ()
    assert elsewhere(here, f"{here}/net.py:Net", f"{here}/deep/t.py:f") == ()
    away = (f"{there}/net.py, which is not beside {here}/my.yaml", f"{there}/t.py, which is not beside {here}/my.yaml")
    assert elsewhere(here, f"{there}/net.py:Net", f"{there}/t.py:f") == away
    assert elsewhere(here, f"{here}/../there/net.py:Net") == (
        f"{here}/../there/net.py, which is not beside {here}/my.yaml",
    )
    kept = f"{{kind: own, function: '{here}/t.py:f', source: 'def f(a): return a'}}"
    assert elsewhere(here, transform=kept) == (f"the text of {here}/t.py:f that is written into {here}/my.yaml",)


def test_json_on_a_terminal_has_no_control_characters(capsys) -> None:
    value = {"table\x9b2J\x7f\x85": ["\u202e\x1b[31m", "k\u00fcche \U000e0001", float("nan")]}
    print_json(value)
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert "k\u00fcche" in out
    assert json.loads(out) == {key: [*texts[:2], None] for key, texts in value.items()}


def test_a_console_writes_what_is_not_printable_out() -> None:
    out = io.StringIO()
    console = Terminal(file=out, force_terminal=True, width=120)
    grid = Grid("column\x1b]0;title\x07")
    grid.add_row("cell\x1b[2J\u202e")
    console.print(grid, markup=False)
    console.print("[bold]name[/bold]\x1b[31m")
    text = out.getvalue()
    assert "\x1b[2J" not in text
    assert "\x1b]0;" not in text
    assert "\x1b[31m" not in text
    assert "\u202e" not in text
    assert "cell\\x1b[2J" in text
    assert "\x1b[1mname\x1b[0m" in text  # its own colours stay


def test_no_name_of_a_run_is_markup_of_its_report(tmp_path: Path) -> None:
    """XML has no escape character, so what is left of one is a replacement character."""
    row = HOSTILE.replace(",", "")
    (tmp_path / "recipe.yaml").write_text(f"name: '<script>alert(1)</script>'\ntrain: {{x: \"{HOSTILE!r}\"}}\n")
    (tmp_path / "env.json").write_text('{"host": "<script>alert(1)</script>\\u001b"}')
    (tmp_path / "metrics.csv").write_text(f"step,samples,time_s,split,task,metric,value\n1,1,1,{row},{row},{row},0.5\n")
    (tmp_path / "tables.csv").write_text(f"table,rows,dim,row_type,optimizer,features\n{row},1,1,{row},{row},{row}\n")
    (tmp_path / "slices.csv").write_text(f"split,feature,value,task,count,ne\n{row},{row},{row},{row},5,0.5\n")
    (tmp_path / "warnings.txt").write_text(f"{HOSTILE}\n")
    (tmp_path / "result.json").write_text(
        '{"status": "failed", "message": "<script>alert(1)</script>", "recipe": "<b>"}'
    )
    page = write(tmp_path).read_text()
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert "\x1b" not in page


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("x[/bold]", 0), (HOSTILE, 2)])
def test_a_hostile_column_of_a_file_reaches_no_terminal(tmp_path: Path, name: str, code: int) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({name: [f"{HOSTILE}{k % 3}" for k in range(50)], "label": [0, 1] * 25}), path)
    command = [*warm.command(), "data", "inspect", str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_command_says_which_code_from_elsewhere_it_runs(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "net.py").write_text("raise ImportError('it was run')\n")
    recipe = tmp_path / "here" / "my.yaml"
    recipe.write_text(f"data: {{dataset: synthetic, rows: 100, test_rows: 10}}\nmodel: {tmp_path}/net.py:Net\n")
    command = [*warm.command(), "train", str(recipe), "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    told = f"rowwise: this recipe runs {tmp_path}/net.py, which is not beside {recipe}: make sure that you trust it"
    assert done.stderr.splitlines()[0] == told
    assert done.returncode == 2


@pytest.mark.parametrize("place", ["calibrate", "convert"])
def test_folders_of_measurements_and_warehouses_have_no_links(tmp_path: Path, place: str) -> None:
    """What goes on in one would add to what a link leads to, or cut it off after its last line."""
    outside = tmp_path / "outside"
    outside.write_text("mine")
    if place == "calibrate":
        (tmp_path / "order.json").write_text("{}")
        (tmp_path / "rank-0.jsonl").symlink_to(outside)
        working = lock_exclusively(tmp_path / "order.json", tmp_path, "*.jsonl")
    else:
        dest = tmp_path / "warehouse"
        (dest / FOLDER).mkdir(parents=True)
        (dest / FOLDER / "lock").symlink_to(outside)
        working = Journal(dest).lock()
    with pytest.raises(OSError, match="this is a link"), working:
        pass
    assert outside.read_text() == "mine"


def test_a_note_of_what_was_used_is_not_left_through_a_link(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "warehouse"
    outside.mkdir()
    (root / FOLDER).mkdir(parents=True)
    (root / FOLDER / "warehouse.json").write_text("{}")
    assert log_use(root, ["user"], 1.0) is not None
    shutil.rmtree(root / FOLDER / "popularity")
    (root / FOLDER / "popularity").symlink_to(outside)
    assert log_use(root, ["user"], 1.0) is None
    assert not list(outside.iterdir())


def test_names_of_a_checkpoint_are_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """A file called [/] ended in a traceback of rich, and one called [red] was shown without its name."""
    why = "[/].safetensors [/bold] is cut"
    bad = DamagedChunk(tensor="user[/]", place="rows [/] to [red]", file="[/].safetensors", why=why)
    show_verdict(Path("x"), CheckResult(checked=(CheckedCheckpoint(name="[/]", damage=(bad,)),), whole=None))
    show_checkpoints(Path("x"), [ListedCheckpoint(name="step-[/]", marks=(), problem="there is no [/italic].json")])
    said = capsys.readouterr().out
    for name in ("user[/]", "rows [/] to [red]", "[/].safetensors", "[/bold] is cut", "step-[/]", "no [/italic].json"):
        assert name in said
