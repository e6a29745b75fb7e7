"""`rowwise train` and `rowwise resume`: train a recipe, and resume a run that was stopped or killed."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rowwise.base.errors import SpecError
from rowwise.cli.code import load_recipe, warn_of_run_code
from rowwise.cli.console import show_outlook
from rowwise.cli.environment import CommandEnvironment
from rowwise.cli.job import JobRequest, parse_settings
from rowwise.cli.launch import TIMEOUT_S, launch, parse_ranks
from rowwise.cli.options import Changes, RecipeName
from rowwise.cli.run_request import RunRequest
from rowwise.cli.terminal import make_terminal, print_json

if TYPE_CHECKING:
    from rowwise.recipes.recipe import Recipe

RUNS = Path("runs")
MAX_NODES = 10_000
SCHEDULERS = ("slurm", "ray", "kubernetes")
MIN_SEEDS, MAX_SEEDS = 2, 100
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object, and nothing else.")]
Nproc = Annotated[
    int | None, typer.Option(metavar="N", help="Number of ranks on this machine, one process each; not with torchrun.")
]
PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", metavar="FILE", help="Sharding plan to use (JSON, from rowwise plan)."),
]
HardwareName = Annotated[
    str | None,
    typer.Option(
        "--hardware", metavar="NAME", help="Hardware preset or profile (from rowwise calibrate) for the planner."
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Host memory for tables, such as 4GB; the rest is on disk (default: free memory)."
    ),
]
NetworkFile = Annotated[
    str | None,
    typer.Option(
        "--network", metavar="FILE", help="Network (from rowwise net probe) to order hosts by; probe measures it first."
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help=f"Timeout of a rank that waits for others (default: {TIMEOUT_S:g})."),
]
Profile = Annotated[
    str | None, typer.Option(metavar="FIRST:LAST", help="Trace these steps with torch.profiler: --profile steps=10:20.")
]


def train(  # noqa: PLR0913 - one for each option
    ctx: typer.Context,
    recipe: RecipeName,
    changes: Changes = None,
    runs: Annotated[Path | None, typer.Option(help=f"Parent folder of runs (default: {RUNS}).")] = None,
    run: Annotated[
        Path | None, typer.Option(help="Folder of this run (default: a numbered one); an existing run is resumed.")
    ] = None,
    init_from: Annotated[
        str | None,
        typer.Option(help="Warm start: load weights with matching names from a run or checkpoint (path or URL)."),
    ] = None,
    nproc: Nproc = None,
    plan: PlanFile = None,
    hardware: HardwareName = None,
    memory: Memory = None,
    network: NetworkFile = None,
    timeout: Timeout = None,
    profile: Profile = None,
    baseline: Annotated[
        bool | None,
        typer.Option(
            help="Train boosted trees (LightGBM) on the same rows, and compare (default: for small datasets in files).",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Train N runs with consecutive seeds, from the recipe's, and evaluate their ensemble."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print a summary of the run; write nothing.")
    ] = False,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="SCHEDULER",
            help="Submit to slurm or ray; --dry-run prints the job script, or a kubernetes manifest.",
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", help="Number of nodes with --on, with --nproc ranks each.")
    ] = None,
    job: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Scheduler setting, such as partition=gpu or image=NAME, or a YAML file; may be repeated.",
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Submit the job and return at once.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train the model of a recipe, evaluate it on the test rows, and write a report.

    All output goes to the folder runs/<recipe>/<n>/. Ctrl-C saves a checkpoint and prints the command that resumes.
    With --nproc or torchrun, tables and batches are sharded over ranks; torchrun also runs several hosts and restarts
    killed ranks.

    Example: rowwise train dlrm-synthetic

    Example: rowwise train my.yaml --set train.epochs=2 --set train.optimizer.lr=1e-3

    Example: rowwise train my.yaml --init-from runs/my/7

    Example: rowwise train my.yaml --nproc 4 --plan plan.json

    Example: rowwise train my.yaml --nproc 4 --hardware machine.json

    Example: rowwise train my.yaml --memory 4GB

    Example: torchrun --nproc-per-node 4 --max-restarts 2 -m rowwise train my.yaml

    Example: torchrun --nnodes 8 --nproc-per-node 8 ... -m rowwise train my.yaml --network net.json

    Example: rowwise train my.yaml --seeds 3

    Example: rowwise train my.yaml --dry-run

    Example: rowwise train my.yaml --on slurm --nodes 4 --nproc 8 --job partition=gpu --job time=12:00:00

    Example: rowwise train my.yaml --on ray --nodes 4 --nproc 8 --job address=http://head:8265 --job gpus=1

    Example: rowwise train my.yaml --on kubernetes --nodes 2 --nproc 8 --job cluster.yaml --dry-run | kubectl apply -f -
    """
    environment = _get_environment(ctx)
    if on is not None:
        _check_scheduler(environment, on, nodes)
    ranks = parse_ranks(nproc, timeout if on is None or (nodes or 1) == 1 else None, environment) * (nodes or 1)
    all_changes = [
        *(changes or []),
        *_as_changes(init_from=init_from, plan=plan, hardware=hardware, memory=memory, network=network),
    ]
    all_changes += [f"log.profile={_quote_yaml(profile)}"] if profile is not None else []
    if seeds is not None:
        _check_seeds(seeds, environment)
    loaded = load_recipe(recipe, all_changes, warn=_is_first(environment))
    if on is not None:
        command = ("train", recipe, *(text for change in all_changes for text in ("--set", change)))
        command += () if timeout is None else ("--timeout", f"{timeout:g}")
        address = {"address": environment.ray_address} if on == "ray" and environment.ray_address else {}
        job_request = JobRequest(
            recipe=loaded.name,
            command=command,
            cwd=Path.cwd(),
            runs=(runs or RUNS).absolute(),
            run=run and run.absolute(),
            nodes=nodes or 1,
            nproc=nproc or 1,
            node_counts=_find_node_counts(loaded, nodes or 1, nproc or 1),
            settings={**address, **parse_settings(job or [])},
        )
        _submit(job_request, on, dry_run=dry_run, detach=detach)
    elif not dry_run:
        request = RunRequest(recipe=loaded, folder=runs or RUNS, run=run, as_json=as_json, baseline=baseline)
        if seeds is None:
            launch(request, nproc, timeout, environment)
        else:
            _train_seeds(request, seeds, lambda seeded: launch(seeded, nproc, timeout, environment))
    elif _is_first(environment):
        _dry_run(loaded, ranks, as_json=as_json)


def resume(  # noqa: PLR0913 - one for each option
    ctx: typer.Context,
    run: Annotated[str, typer.Argument(help="Run folder, such as runs/dlrm-synthetic/1, or the URL of its mirror.")],
    changes: Changes = None,
    which: Annotated[
        str, typer.Option("--from", help="Checkpoint to resume from: last, step-<number> or failed.")
    ] = "last",
    nproc: Nproc = None,
    plan: PlanFile = None,
    hardware: HardwareName = None,
    memory: Memory = None,
    network: NetworkFile = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Resume a run that was stopped or killed, from its last checkpoint, also on another number of ranks.

    The result is bitwise that of an uninterrupted run on the same number of ranks; with train.determinism=elastic, on
    any number of ranks.
    A run in an object store (save.mirror) is downloaded to runs/<recipe>/<last part of the URL> first.

    Example: rowwise resume runs/dlrm-synthetic/1

    Example: rowwise resume runs/dlrm-synthetic/1 --set train.epochs=3

    Example: rowwise resume runs/dlrm-synthetic/1 --nproc 2

    Example: rowwise resume s3://bucket/runs/clicks-7
    """
    all_changes = (*(changes or ()), *_as_changes(plan=plan, hardware=hardware, memory=memory, network=network))
    if _is_mirrored(run) and not any(change.startswith("save.mirror=") for change in all_changes):
        all_changes += (f"save.mirror={_quote_yaml(run)}",)  # a copied mirror may name its source in the recipe
    environment = _get_environment(ctx)
    parse_ranks(nproc, timeout, environment)
    first = _is_first(environment)
    folder = _local_folder(run, which, fetch=first, quiet=as_json or not first)
    if first:
        warn_of_run_code(folder, all_changes)
    launch(RunRequest(folder=folder, changes=all_changes, which=which, as_json=as_json), nproc, timeout, environment)


def _is_mirrored(run: str) -> bool:
    """Whether this names the mirror of a run."""
    from rowwise.base.storage.folder import URL

    if URL.fullmatch(run):
        return True
    if not (Path(run) / "mirror.json").is_file():
        return False
    from rowwise.recipes.mirror import is_mirror

    return is_mirror(Path(run))


def _local_folder(run: str, which: str, *, fetch: bool, quiet: bool) -> Path:
    """The local folder of a run. The first rank alone downloads a mirrored run, and sends its path to the others."""
    if not _is_mirrored(run):
        return Path(run)
    if not fetch:
        return RUNS
    from rowwise.recipes.mirror import fetch_run

    with make_terminal(stderr=True, quiet=quiet).status(f"copying {run}"):
        return fetch_run(run, RUNS, which)


def _find_node_counts(recipe: "Recipe", nodes: int, nproc: int) -> tuple[int, ...]:
    """Node counts up to `nodes` on which the recipe can run, for restarts on fewer; raises if `nodes` is not one."""
    from rowwise.recipes.recipe import check_ranks

    check_ranks(recipe, nodes * nproc)
    fewer = []
    for count in range(1, nodes) if recipe.plan is None else ():  # a plan is for one number of ranks
        with suppress(SpecError):
            check_ranks(recipe, count * nproc)
            fewer.append(count)
    return (*fewer, nodes)


def _submit(request: JobRequest, on: str, *, dry_run: bool, detach: bool) -> None:
    if on != "kubernetes":
        from rowwise.cli.jobs import submit

        submit(request, on, dry_run=dry_run, detach=detach)
        return
    from rowwise.cli.kubernetes import make_manifest

    if not dry_run:
        raise SpecError("--on kubernetes submits nothing itself", hint="run it with --dry-run ... | kubectl apply -f -")
    print(make_manifest(request), end="")


def _check_scheduler(environment: CommandEnvironment, on: str, nodes: int | None) -> None:
    if on not in SCHEDULERS:
        raise SpecError(
            f"--on {on}",
            f"{', '.join(SCHEDULERS[:-1])} or {SCHEDULERS[-1]}",
            hint="for others start torchrun on each node",
        )
    if environment.torchrun is not None:
        raise SpecError(f"--on {on} under torchrun", hint="run it without torchrun, as the job starts the ranks")
    if nodes is not None and not 1 <= nodes <= MAX_NODES:
        raise SpecError(f"--nodes {nodes}", f"1 to {MAX_NODES}")


def _check_seeds(seeds: int, environment: CommandEnvironment) -> None:
    if not MIN_SEEDS <= seeds <= MAX_SEEDS:
        raise SpecError(f"--seeds {seeds}", f"{MIN_SEEDS} to {MAX_SEEDS} runs")
    if environment.torchrun is not None:
        raise SpecError(f"--seeds {seeds} under torchrun, which starts the ranks of one run", "--nproc N")


def _train_seeds(request: RunRequest, seeds: int, launch_run: Callable[[RunRequest], Path | None]) -> None:
    """Train one run per seed, and evaluate their ensemble on the test rows."""
    from msgspec import structs

    from rowwise.cli.ensemble import check_recipe, compare_runs

    recipe = request.recipe
    assert recipe is not None
    check_recipe(recipe, seeds)
    done: list[Path] = []
    for number in range(seeds):
        seeded = structs.replace(recipe, seed=recipe.seed + number)
        run = launch_run(replace(request, recipe=seeded, baseline=request.baseline if number == 0 else False))
        assert run is not None
        done.append(run)
    compare_runs(done)


def _dry_run(recipe: "Recipe", ranks: int, *, as_json: bool) -> None:
    from rowwise.recipes.outlook import dry_run

    console = make_terminal(stderr=True, quiet=as_json)
    with console.status("reading the data"):
        outlook = dry_run(recipe, ranks)
    show_outlook(outlook, console, "dry run: nothing is trained or written")
    if as_json:
        print_json(outlook)


def _is_first(environment: CommandEnvironment) -> bool:
    return environment.torchrun is None or environment.torchrun.rank == 0


def _get_environment(ctx: typer.Context) -> CommandEnvironment:
    environment = ctx.find_object(CommandEnvironment)
    return environment or CommandEnvironment.read({})


def _as_changes(**values: Path | str | None) -> list[str]:
    return [f"{name}={_quote_yaml(value)}" for name, value in values.items() if value is not None]


def _quote_yaml(value: Path | str) -> str:
    """The value as a quoted YAML string."""
    return "'" + str(value).replace("'", "''") + "'"
