"""`rowwise train` and `rowwise resume`: run a recipe, and go on with a run that was stopped."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from rowwise.cli.console import Line, console_for, show_beginning, show_end, show_outlook, stopping_well

if TYPE_CHECKING:
    from rich.console import Console

    from rowwise.recipes.recipe import Recipe
    from rowwise.recipes.runs import Run

Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value: --set train.epochs=2.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, and nothing else.")]
Profile = Annotated[
    str | None, typer.Option(metavar="FIRST:LAST", help="Trace these steps with torch.profiler, such as steps=10:20.")
]


def train(  # noqa: PLR0913 - one for each option
    recipe: Annotated[str, typer.Argument(help="A recipe by name (see rowwise ls), or a YAML file.")],
    changes: Set = None,
    runs: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs"),
    init_from: Annotated[
        Path | None, typer.Option(help="A run or a checkpoint: take over the weights that match by name.")
    ] = None,
    profile: Profile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and say what would be trained; write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model by a recipe, test it, and write a report.

    Ctrl-C saves and says how to go on. Everything is in runs/<recipe>/<n>/.

    Example: rowwise train dlrm-synthetic

    Example: rowwise train my.yaml --set train.epochs=2 --set train.optimizer.lr=1e-3

    Example: rowwise train my.yaml --init-from runs/my/7

    Example: rowwise train my.yaml --dry-run
    """
    from rowwise.recipes.find import load

    given = [*(changes or []), *([f"init_from={_quoted(init_from)}"] if init_from else [])]
    given += [f"log.profile={_quoted(profile)}"] if profile else []
    loaded = load(recipe, given)
    console = console_for(quiet=as_json)
    if dry_run:
        _look_ahead(loaded, console, as_json=as_json)
        return
    from rowwise.recipes.runs import Run

    line = Line(console)
    with console.status("reading the data"):
        run = Run.start(loaded, runs, line)
    _go(run, line, console, as_json=as_json)


def resume(
    run: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/dlrm-synthetic/1.")],
    changes: Set = None,
    which: Annotated[str, typer.Option("--from", help="last, step-<number>, or failed: where to go on from.")] = "last",
    as_json: AsJson = False,
) -> None:
    """Go on with a run that was stopped or killed, as if it had not been.

    Example: rowwise resume runs/dlrm-synthetic/1

    Example: rowwise resume runs/dlrm-synthetic/1 --set train.epochs=3
    """
    from rowwise.recipes.runs import Run

    console = console_for(quiet=as_json)
    line = Line(console)
    with console.status("reading the checkpoint"):
        resumed = Run.resume(run, changes or (), which=which, tell=line)
    _go(resumed, line, console, as_json=as_json)


def _look_ahead(recipe: "Recipe", console: "Console", *, as_json: bool) -> None:
    from rowwise.recipes.outlook import look_ahead

    with console.status("reading the data"):
        found = look_ahead(recipe)
    show_outlook(found, console, "dry run: nothing is trained, nothing is written")
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())


def _go(run: "Run", line: Line, console: "Console", *, as_json: bool) -> None:
    show_beginning(run, console)
    with stopping_well(run.trainer, console) as met, line.showing():
        result = run.go()
    show_end(result, console)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
    if met:
        console.print(f"go on: rowwise resume {run.folder.path}", markup=False, soft_wrap=True)
        raise typer.Exit(128 + met[0])


def _quoted(value: Path | str) -> str:
    """As a text in YAML, whatever is in it."""
    return "'" + str(value).replace("'", "''") + "'"
