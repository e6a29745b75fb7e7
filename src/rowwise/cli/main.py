"""The `rowwise` command: its subcommands, its exit codes and the environment variables that it reads and sets.

Commands import torch and other heavy modules inside their functions, so that `rowwise --help` answers at once.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

import rowwise
from rowwise.base.errors import RowwiseError, one_line
from rowwise.cli import ckpt, data, data_bench, measure, net, sid
from rowwise.cli.audit import audit
from rowwise.cli.bench import bench
from rowwise.cli.calibrate import calibrate
from rowwise.cli.compress import compress
from rowwise.cli.conflicts import check_conflicts
from rowwise.cli.convert import convert
from rowwise.cli.doctor import doctor
from rowwise.cli.drill import drill
from rowwise.cli.environment import CommandEnvironment
from rowwise.cli.explain import explain
from rowwise.cli.export import export, versions
from rowwise.cli.fleet import fleet
from rowwise.cli.jobs import ps, stop
from rowwise.cli.pictures import pictures
from rowwise.cli.plan import plan
from rowwise.cli.recipes import cp, ls
from rowwise.cli.recommend import recommend
from rowwise.cli.serve import serve
from rowwise.cli.simulate import simulate
from rowwise.cli.train import resume, train
from rowwise.cli.tune import tune
from rowwise.cli.watch import watch

INTERRUPTED = 130  # what shells report for a command that Ctrl-C ended
JOIN_s = 10.0  # longest wait for threads after Ctrl-C

BEGIN = """Three commands to begin with:

  rowwise train dlrm-synthetic    train a small model for half a minute, and write a report
  rowwise data inspect FILE       look at a CSV or Parquet file, and write a recipe for it
  rowwise train FILE.yaml         train that recipe

rowwise --help lists all commands, rowwise COMMAND --help has examples of each."""


class CommandGroup(NamedTuple):
    """Subcommands of one command, such as `rowwise data`."""

    name: str
    help: str
    commands: tuple[Callable[..., None], ...]


DATA = CommandGroup(
    "data",
    "Fetch, inspect and convert datasets. Example: rowwise data inspect logs/",
    (data.get, data.inspect, data.ls, convert, pictures, data_bench.bench),
)
CKPT = CommandGroup(
    "ckpt",
    "List, verify, compare and convert checkpoints. Example: rowwise ckpt ls runs/dlrm-synthetic/1",
    (ckpt.ls, ckpt.verify, ckpt.diff, ckpt.copy, ckpt.reshard, ckpt.remap, ckpt.export, ckpt.import_),
)
NET = CommandGroup(
    "net",
    "Measure the links between hosts, and order hosts by them. Example: rowwise net show net.json",
    (net.probe, net.show, net.order),
)
SID = CommandGroup(
    "sid",
    "Fit semantic ids of items. Example: rowwise sid fit items.parquet --key item --vectors v --out ids",
    (sid.fit, sid.append, sid.show),
)
PANELS: dict[str, tuple[Callable[..., None] | CommandGroup, ...]] = {  # sections of `rowwise --help`
    "Start": (doctor, ls, cp, DATA),
    "Train": (train, resume, tune, ps, stop, watch),
    "Understand": (measure.evaluate, measure.report, explain, measure.baseline),
    "Scale": (plan, simulate, calibrate, compress, SID, NET),
    "Serve": (measure.predict, recommend, export, versions, serve, fleet, audit),
    "Maintain": (drill, bench, CKPT),
}
NAMES = {"evaluate": "eval", "import_": "import"}  # functions that cannot have the name of their command


def main() -> None:
    # OpenMP reads this when torch is imported: idle threads that spin would take cores from working ones.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # cuBLAS reads this when the first product runs on a GPU: with it products are bitwise deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # MLflow's client reads these: by default it waits minutes for a server that is down, and prints addresses.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    make_app()()


def make_app() -> typer.Typer:
    """A new application with all commands."""
    app = typer.Typer(name="rowwise", add_completion=False, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(_read_environment)
    for panel, commands in PANELS.items():
        for command in commands:
            if isinstance(command, CommandGroup):
                group = typer.Typer(no_args_is_help=True, help=command.help)
                for subcommand in command.commands:
                    _add(group, subcommand)
                app.add_typer(group, name=command.name, rich_help_panel=panel)
            else:
                _add(app, command, panel)
    return app


def _add(app: typer.Typer, command: Callable[..., None], panel: str | None = None) -> None:
    app.command(NAMES.get(command.__name__), cls=CheckedCommand, rich_help_panel=panel)(command)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"rowwise {rowwise.__version__}")
        raise typer.Exit


def _read_environment(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train recommendation models whose embedding tables outgrow one device.

    Example: rowwise doctor

    Example: rowwise train dlrm-synthetic --nproc 2
    """
    ctx.obj = CommandEnvironment.read(os.environ)  # commands get it from the context
    if ctx.invoked_subcommand is None:
        print(BEGIN)


class CheckedCommand(TyperCommand):
    """A command that checks its options for conflicts before it runs.

    Exits with one line and code 2 on a user error, with 130 after Ctrl-C; a bug keeps its traceback.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        paragraphs = (self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(text.split()) for text in paragraphs)  # as wide as the terminal

    def invoke(self, ctx: Any) -> None:
        try:
            words = ctx.command_path.removeprefix(f"{ctx.find_root().command_path} ")
            check_conflicts(words, set(self._changed(ctx.params)))
            super().invoke(ctx)
        except (RowwiseError, OSError) as error:
            line = one_line(error)
            if line is None:
                raise
            print(f"rowwise: {line}", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            print("rowwise: stopped by Ctrl-C", file=sys.stderr)
            _wait_for_threads()
            raise typer.Exit(INTERRUPTED) from None

    def _changed(self, values: Mapping[str, object]) -> Iterator[str]:
        """Options and arguments that differ from their defaults, as a user types them."""
        for param in self.params:
            value = values.get(param.name)
            if value != param.default and value not in (None, (), []):
                name = (param.secondary_opts if value is False else param.opts)[0]
                yield name if name.startswith("-") else name.upper()


def _wait_for_threads() -> None:
    """Wait for threads that Python wrongly marked as ended: one that is inside torch at exit aborts the process.

    Before Python 3.13, a `Thread.join` that Ctrl-C interrupts marks a running thread as ended.
    """
    end_s = time.monotonic() + JOIN_s
    while any(not t.is_alive() and not t.daemon for t in threading.enumerate()) and time.monotonic() < end_s:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
