"""The `rowwise` command itself: which commands there are, and how a user's mistake ends.

A command imports what it needs when it runs.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Annotated, ParamSpec

import typer

import rowwise
from rowwise.cli import ckpt, data, data_bench, measure
from rowwise.cli.bench import bench
from rowwise.cli.calibrate import calibrate
from rowwise.cli.compress import compress
from rowwise.cli.convert import convert
from rowwise.cli.doctor import doctor
from rowwise.cli.drill import drill
from rowwise.cli.environment import CommandEnvironment
from rowwise.cli.plan import plan
from rowwise.cli.recipes import cp, ls
from rowwise.cli.train import resume, train
from rowwise.errors import RowwiseError, one_line

P = ParamSpec("P")
INTERRUPTED = 130  # what shells report for a command that Ctrl-C ended


def main() -> None:
    """Run the command line."""
    # Idle OpenMP threads that spin take the cores from those that work; read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    app()()


def app() -> typer.Typer:
    """All commands, made anew for each caller."""
    made = typer.Typer(name="rowwise", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    made.callback()(_rowwise)
    commands: list[Callable[..., None]] = [train, resume, plan, measure.predict, measure.report, ls, cp, doctor]
    commands += [bench, drill, calibrate, compress]
    for command in commands:
        made.command()(_ending_well(command))
    made.command("eval")(_ending_well(measure.evaluate))
    about_data = typer.Typer(
        no_args_is_help=True, help="Fetch datasets and look into files. Example: rowwise data inspect logs/"
    )
    about_data.command()(_ending_well(data.get))
    about_data.command()(_ending_well(data.inspect))
    about_data.command()(_ending_well(convert))
    about_data.command()(_ending_well(data_bench.bench))
    made.add_typer(about_data, name="data")
    made.add_typer(_about_checkpoints(), name="ckpt")
    return made


def _about_checkpoints() -> typer.Typer:
    about = "Look at checkpoints, compare and convert them. Example: rowwise ckpt ls runs/dlrm-synthetic/1"
    made = typer.Typer(no_args_is_help=True, help=about)
    commands: list[Callable[..., None]] = [ckpt.ls, ckpt.verify, ckpt.diff, ckpt.reshard, ckpt.remap, ckpt.export]
    for command in commands:
        made.command()(_ending_well(command))
    made.command("import")(_ending_well(ckpt.import_))
    return made


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rowwise {rowwise.__version__}")
        raise typer.Exit


def _rowwise(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train recommendation models whose embedding tables outgrow one device.

    Example: rowwise doctor
    """
    ctx.obj = CommandEnvironment.read(os.environ)  # for commands, which may not read the environment


def _ending_well(command: Callable[P, None]) -> Callable[P, None]:
    """A user's mistake ends with one line and code 2, Ctrl-C with one and 130; a bug of ours with a traceback."""

    @functools.wraps(command)  # typer reads the options off the signature
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (RowwiseError, OSError) as error:
            line = one_line(error)
            if line is None:
                raise
            print(f"rowwise: {line}", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            print("rowwise: stopped by Ctrl-C", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None

    return run


if __name__ == "__main__":
    main()
