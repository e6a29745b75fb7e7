"""`rowwise ckpt`: look at checkpoints, check and compare them, write them anew, give them to others and take theirs.

What is done is in `checkpoint`; this file asks for it and says what came of it. Nothing here loads torch before a
command runs.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from rowwise.cli.ckpt_show import show_checkpoints, show_differences, show_match, show_tensors, show_verdict
from rowwise.cli.progress import splits_bar
from rowwise.cli.terminal import say, terminal
from rowwise.errors import SpecError
from rowwise.quantity import of_bytes
from rowwise.spec import RowType
from rowwise.textfile import read_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rowwise.plan import Plan
    from rowwise.spec import Table

Either = Annotated[Path, typer.Argument(metavar="RUN|CKPT", help="The folder of a run, or of a checkpoint.")]
One = Annotated[Path, typer.Argument(metavar="CKPT", help="The folder of a checkpoint; or of a run, for its last one.")]
Out = Annotated[Path, typer.Argument(help="The checkpoint to write; must not exist.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
PlanFile = Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="A plan: who holds what.")]
Nproc = Annotated[int | None, typer.Option(min=1, help="Or so many ranks, among which tables are dealt out.")]
TableTypes = Annotated[
    list[str] | None, typer.Option("--table", metavar="NAME=ROWTYPE", help="The type of one table's rows.")
]
Tables = Annotated[list[str] | None, typer.Option("--table", metavar="NAME", help="Only this table; repeat for more.")]


def ls(path: Either, as_json: AsJson = False) -> None:
    """List the checkpoints of a run, or the tensors of a checkpoint.

    Example: rowwise ckpt ls runs/dlrm-synthetic/1

    Example: rowwise ckpt ls runs/dlrm-synthetic/1/ckpt/step-000000200 --json
    """
    from rowwise.checkpoint.listing import list_checkpoints, list_tensors
    from rowwise.checkpoint.manifest import NAME, CheckpointManifest

    if (path / NAME).exists():
        tensors = list_tensors(CheckpointManifest.read(path))
        if as_json:
            _print_json(tensors)
        else:
            show_tensors(tensors)
    else:
        found = list_checkpoints(path)
        if as_json:
            _print_json(found)
        else:
            show_checkpoints(path, found)


def verify(path: Either, as_json: AsJson = False) -> None:
    """Read everything, and name every piece that is not what was written.

    Exit code 1 if there is any; then also says which older checkpoint of the run is whole.

    Example: rowwise ckpt verify runs/dlrm-synthetic/1

    Example: rowwise ckpt verify runs/dlrm-synthetic/1/ckpt/step-000000200
    """
    from rowwise.checkpoint.check import verify as read_all

    with splits_bar(terminal(stderr=True), "reading") as tell:
        found = read_all(path, tell)
    if as_json:
        _print_json(found)
    else:
        show_verdict(path, found)
    if not found.good:
        raise typer.Exit(1)


def diff(
    first: One,
    second: Annotated[Path, typer.Argument(metavar="CKPT", help="Another one.")],
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints: their tensors bit for bit, and what they know of the run. Times are left out.

    Exit code 0 if they are equal, 1 if not.

    Example: rowwise ckpt diff runs/dlrm-synthetic/1 runs/dlrm-synthetic/2
    """
    from rowwise.checkpoint.diff import diff as compare
    from rowwise.checkpoint.named import open_named

    a, b = open_named(first), open_named(second)
    with splits_bar(terminal(stderr=True), "comparing") as tell:
        found = compare(a, b, tell)
    if as_json:
        _print_json(found)
    else:
        show_differences(a.folder, b.folder, found)
    if found.any:
        raise typer.Exit(1)


def reshard(  # noqa: PLR0913 - one for each option
    ckpt: One,
    out: Out,
    plan: PlanFile = None,
    nproc: Nproc = None,
    row_type: Annotated[RowType | None, typer.Option(help="The type of all rows; without it, as they are.")] = None,
    no_state: Annotated[bool, typer.Option("--no-state", help="Weights only: no state of optimizers.")] = False,
    tables: TableTypes = None,
) -> None:
    """Write a checkpoint anew, with the files that the ranks of another plan would have written.

    No plan needs this to be loaded: every checkpoint loads at every plan. Rows whose type stays are the same bits.

    Example: rowwise ckpt reshard runs/dlrm-synthetic/1 eight --nproc 8

    Example: rowwise ckpt reshard runs/dlrm-synthetic/1 small --nproc 1 --row-type int8 --table user=fp16 --no-state
    """
    from rowwise.checkpoint.named import open_named
    from rowwise.checkpoint.rewrite import retype_tables, rewrite

    if (plan is None) == (nproc is None):
        raise SpecError("want either --plan FILE or --nproc N: it says who would have written what")
    checkpoint = open_named(ckpt)
    wanted = retype_tables(checkpoint, row_type, _types(tables or ()))
    chosen = _plan(plan, nproc or 1, list(wanted.values()))
    with splits_bar(terminal(stderr=True), "writing") as tell:
        manifest = rewrite(checkpoint, out, chosen, wanted, state=not no_state, tell=tell)
    written = sum(file.size_bytes for file in manifest.files.values())
    say(f"{out}: {len(manifest.tensors)} tensors of {checkpoint.folder}, {of_bytes(written)}, for {chosen.world} ranks")


def export(  # noqa: PLR0913 - one for each option
    ckpt: One,
    parquet: Annotated[Path | None, typer.Option(metavar="DIR", help="A Parquet file for each table.")] = None,
    dcp: Annotated[Path | None, typer.Option(metavar="DIR", help="A folder for torch.distributed.checkpoint.")] = None,
    torchrec: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A state dict of TorchRec's collections of tables.")
    ] = None,
    torch: Annotated[Path | None, typer.Option(metavar="FILE", help="A dict of tensors for torch.load.")] = None,
    tables: Tables = None,
    state: Annotated[bool, typer.Option("--state", help="The state of optimizers, too.")] = False,
    sequence: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="TorchRec: a table of an EmbeddingCollection.")
    ] = None,
    prefix: Annotated[str, typer.Option(help="TorchRec: the path of the collection in your model.")] = "",
) -> None:
    """Give a checkpoint to other programs. Rows become float32, which loses nothing.

    Parquet files have the columns id and vector. The others have the names of the model's state dict.

    Example: rowwise ckpt export runs/dlrm-synthetic/1 --parquet vectors --table user

    Example: rowwise ckpt export runs/dlrm-synthetic/1 --torchrec tables.pt --prefix model.sparse_arch
    """
    from rowwise.checkpoint.export import export_parquet, export_torch, own_names, torchrec_names
    from rowwise.checkpoint.named import open_named

    given = [(kind, place) for kind, place in zip(KINDS, (parquet, dcp, torchrec, torch), strict=True) if place]
    if len(given) != 1:
        raise SpecError(f"want one of {', '.join(KINDS)}, each with a place to write")
    ((kind, place),) = given
    _check_export(kind, state=state, other=bool(sequence or prefix))
    checkpoint, chosen = open_named(ckpt), tables or ()
    with splits_bar(terminal(stderr=True), "writing") as tell:
        if kind == "--parquet":
            told = [str(file) for file in export_parquet(checkpoint, place, chosen, state=state, tell=tell)]
        elif kind == "--dcp":
            from rowwise.checkpoint.dcp import export_dcp

            told = list(export_dcp(checkpoint, place, own_names(checkpoint, chosen, state=state), tell))
        elif kind == "--torchrec":
            lead = f"{prefix.rstrip('.')}." if prefix else ""
            told = list(export_torch(checkpoint, place, torchrec_names(checkpoint, chosen, sequence or (), lead), tell))
        else:
            told = list(export_torch(checkpoint, place, own_names(checkpoint, chosen, state=state), tell))
    say("\n".join([f"{place}: of {checkpoint.folder}", *(f"  {name}" for name in told)]))


def import_(
    source: Annotated[Path, typer.Argument(help="A .pt, .pth or .safetensors file, or a DCP folder.")],
    out: Out,
    maps: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="OLD=NEW", help="NEW is table:NAME, or a name in the state dict."),
    ] = None,
    path: Annotated[str, typer.Option(help="Where the model has its tables.")] = "embeddings",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be taken over; write nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint of the weights of another program, to start training from: rowwise train --init-from OUT.

    TorchRec's tables are known by their names. Of others a map says which they are; a * in it stands for anything.

    Example: rowwise ckpt import torchrec.pt start

    Example: rowwise ckpt import dlrm.pt start --map 'emb_l.*.weight=table:C*' --map top_l.0.weight=top.layers.0.weight
    """
    from rowwise.checkpoint.foreign import import_matched, match, open_source

    if out.exists() and not dry_run:
        raise SpecError(f"{out} is there already; give another name")
    if path and not all(path.split(".")):
        raise SpecError(f"--path {path}: want the path of a module, such as embeddings or sparse.tables")
    opened = open_source(source)
    found = match(opened, maps or (), path)
    if as_json:
        _print_json(found)
    else:
        show_match(source, found)
    if dry_run:
        return
    with splits_bar(terminal(stderr=True), "writing") as tell:
        import_matched(opened, found, out, tell)
    if not as_json:
        say(f"{out}: start from it: rowwise train RECIPE --init-from {out}")


def remap(
    ckpt: One,
    out: Out,
    table: Annotated[str, typer.Option("--table", metavar="NAME", help="The table that gets another id map.")],
    file: Annotated[
        Path, typer.Option("--map", metavar="FILE", help="That map, such as smaller/maps/user.safetensors.")
    ],
    counts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="How often each id comes: probe.safetensors of rowwise compress; else alike."
        ),
    ] = None,
) -> None:
    """Give a table another id map: its rows and their optimizer state move along, so that training goes on.

    A new row is the mean of what its ids were, or an old row to the bit, if its ids all had that one. Rows that no id
    has begin at 0. The table of the linear part that goes with it, if there is one, moves, too.

    Example: rowwise ckpt remap runs/mine/1 fresh --table user --map smaller/maps/user.safetensors

    Example: rowwise ckpt remap runs/mine/1 fresh --table user --map user.map --counts smaller/probe.safetensors
    """
    from rowwise.checkpoint.named import open_named
    from rowwise.checkpoint.remap import remap as write_remapped

    checkpoint = open_named(ckpt)
    with splits_bar(terminal(stderr=True), "writing") as tell:
        found = write_remapped(checkpoint, out, table, file, counts, tell)
    say(f"{out}: {checkpoint.folder} with the id map {file}")
    for one in found:
        means = one.rows - one.kept - one.empty
        what = f"{one.kept:,} as they were, {means:,} means of what their ids were, {one.empty:,} that no id has"
        say(f"  {one.table}: {one.rows:,} rows for {one.ids:,} ids: {what}")
    say(f"train on: a recipe with this id_map: rowwise train RECIPE --init-from {out}")


KINDS = ("--parquet", "--dcp", "--torchrec", "--torch")


def _check_export(kind: str, *, state: bool, other: bool) -> None:
    if state and kind == "--torchrec":
        raise SpecError("--torchrec has no --state: TorchRec's optimizers lay theirs out in their own way")
    if other and kind != "--torchrec":
        raise SpecError(f"--sequence and --prefix belong to --torchrec, not to {kind}")


def _types(given: "Sequence[str]") -> dict[str, RowType]:
    found: dict[str, RowType] = {}
    for text in given:
        name, kind = _typed(text)
        if name in found:
            raise SpecError(f"--table {text}: --table {name}={found[name]} is given, too: want one of them")
        found[name] = kind
    return found


def _typed(text: str) -> tuple[str, RowType]:
    name, _, kind = text.partition("=")
    try:
        return name, RowType(kind)
    except ValueError:
        want = ", ".join(RowType)
        raise SpecError(f"--table {text}: want NAME=ROWTYPE, with one of {want}") from None


def _plan(file: Path | None, ranks: int, tables: "list[Table]") -> "Plan":
    from rowwise.plan import Plan
    from rowwise.planner import simple_plan
    from rowwise.spec import Topology

    if file is None:
        return simple_plan(tables, Topology(devices=ranks))
    return Plan.from_json(read_bytes(file))


def _print_json(found: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(found)).decode())
