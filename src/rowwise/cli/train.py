"""`rowwise train` and `rowwise resume`: run a recipe, and go on with a run that was stopped."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from rowwise.cli.code import load_recipe, tell_of_run
from rowwise.cli.console import console_for, show_outlook
from rowwise.cli.environment import CommandEnvironment
from rowwise.cli.launch import TIMEOUT_S, count_ranks, launch
from rowwise.cli.run_request import RunRequest
from rowwise.errors import SpecError

if TYPE_CHECKING:
    from rowwise.recipes.recipe import Recipe

RUNS = Path("runs")
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value: --set train.epochs=2.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, and nothing else.")]
Nproc = Annotated[
    int | None, typer.Option(metavar="N", help="Ranks to run on, as processes of this machine; under torchrun none.")
]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", metavar="FILE", help="Where tables live: a plan's JSON file, used as it is.")
]
HardwareName = Annotated[
    str | None,
    typer.Option("--hardware", metavar="NAME", help="What predicts a step: a preset, or a profile's JSON file."),
]
Timeout = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help=f"How long a rank waits for another before it gives up: {TIMEOUT_S:g}."),
]
Profile = Annotated[
    str | None, typer.Option(metavar="FIRST:LAST", help="Trace these steps with torch.profiler, such as steps=10:20.")
]


def train(  # noqa: PLR0913 - one for each option
    ctx: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A recipe by name (see rowwise ls), or a YAML file.")],
    changes: Set = None,
    runs: Annotated[Path | None, typer.Option(help=f"Where runs are kept: {RUNS}.")] = None,
    init_from: Annotated[
        Path | None, typer.Option(help="A run or a checkpoint: take over the weights that match by name.")
    ] = None,
    nproc: Nproc = None,
    plan: PlanFile = None,
    hardware: HardwareName = None,
    timeout: Timeout = None,
    profile: Profile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and say what would be trained; write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model by a recipe, test it, and write a report.

    Ctrl-C saves and says how to go on. Everything is in runs/<recipe>/<n>/. Several ranks share the tables, and the
    samples of each batch; torchrun may start them, too, on several hosts, and then restarts what was killed.

    Example: rowwise train dlrm-synthetic

    Example: rowwise train my.yaml --set train.epochs=2 --set train.optimizer.lr=1e-3

    Example: rowwise train my.yaml --init-from runs/my/7

    Example: rowwise train my.yaml --nproc 4 --plan plan.json

    Example: rowwise train my.yaml --nproc 4 --hardware machine.json

    Example: torchrun --nproc-per-node 4 --max-restarts 2 -m rowwise train my.yaml

    Example: rowwise train my.yaml --dry-run
    """
    around = _around(ctx)
    ranks = count_ranks(nproc, timeout, around)
    given = [*(changes or []), *_named(init_from=init_from, plan=plan, hardware=hardware)]
    given += [f"log.profile={_quoted(profile)}"] if profile is not None else []
    for option, value in (("--runs", runs), ("--timeout", timeout)):
        if dry_run and value is not None:
            raise SpecError(f"{option} with --dry-run, which writes nothing and waits for no rank: leave it away")
    loaded = load_recipe(recipe, given, told=_is_first(around))
    if not dry_run:
        launch(RunRequest(recipe=loaded, folder=runs or RUNS, as_json=as_json), nproc, timeout, around)
    elif _is_first(around):
        _look_ahead(loaded, ranks, as_json=as_json)


def resume(  # noqa: PLR0913 - one for each option
    ctx: typer.Context,
    run: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/dlrm-synthetic/1.")],
    changes: Set = None,
    which: Annotated[str, typer.Option("--from", help="last, step-<number>, or failed: where to go on from.")] = "last",
    nproc: Nproc = None,
    plan: PlanFile = None,
    hardware: HardwareName = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Go on with a run that was stopped or killed, as if it had not been; on any number of ranks.

    Example: rowwise resume runs/dlrm-synthetic/1

    Example: rowwise resume runs/dlrm-synthetic/1 --set train.epochs=3

    Example: rowwise resume runs/dlrm-synthetic/1 --nproc 2
    """
    given = (*(changes or ()), *_named(plan=plan, hardware=hardware))
    around = _around(ctx)
    count_ranks(nproc, timeout, around)
    if _is_first(around):
        tell_of_run(run, given)
    launch(RunRequest(folder=run, changes=given, which=which, as_json=as_json), nproc, timeout, around)


def _look_ahead(recipe: "Recipe", ranks: int, *, as_json: bool) -> None:
    from rowwise.recipes.outlook import make_outlook

    console = console_for(quiet=as_json)
    with console.status("reading the data"):
        found = make_outlook(recipe, ranks)
    show_outlook(found, console, "dry run: nothing is trained, nothing is written")
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())


def _is_first(around: CommandEnvironment) -> bool:
    return around.torchrun is None or around.torchrun.rank == 0


def _around(ctx: typer.Context) -> CommandEnvironment:
    found = ctx.find_object(CommandEnvironment)
    return found or CommandEnvironment.read({})


def _named(**named: Path | str | None) -> list[str]:
    return [f"{name}={_quoted(value)}" for name, value in named.items() if value is not None]


def _quoted(value: Path | str) -> str:
    return "'" + str(value).replace("'", "''") + "'"
