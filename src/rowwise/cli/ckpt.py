"""`rowwise ckpt`: list, verify, compare, reshard, remap, export and import checkpoints."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rowwise.base.errors import SpecError
from rowwise.base.quantity import format_bytes
from rowwise.base.storage.folder import parse_folder
from rowwise.base.textfile import read_bytes
from rowwise.cli.ckpt_show import show_checkpoints, show_differences, show_match, show_tensors, show_verdict
from rowwise.cli.options import AsJson
from rowwise.cli.progress import splits_bar
from rowwise.cli.terminal import make_terminal, print_json, print_line
from rowwise.cli.text_options import parse_pairs
from rowwise.tables.spec import RowType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rowwise.base.storage.folder import Folder
    from rowwise.checkpoint.read import DamagedChunk
    from rowwise.parallel.plan import Plan
    from rowwise.tables.spec import Table

RunOrCheckpoint = Annotated[str, typer.Argument(metavar="RUN|CKPT", help="Folder or URL of a run or a checkpoint.")]
CheckpointFolder = Annotated[
    str, typer.Argument(metavar="CKPT", help="Folder or URL of a checkpoint, or of a run for its last checkpoint.")
]
NewFolder = Annotated[Path, typer.Argument(help="Checkpoint folder to write; must not exist yet.")]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", metavar="FILE", help="Sharding plan (JSON, from rowwise plan).")
]
Nproc = Annotated[int | None, typer.Option(min=1, help="Number of ranks, instead of --plan, with table-wise sharding.")]
TableTypes = Annotated[
    list[str] | None,
    typer.Option(
        "--table", metavar="NAME=ROWTYPE", help="Row type of one table, instead of --row-type; may be repeated."
    ),
]
Tables = Annotated[
    list[str] | None, typer.Option("--table", metavar="NAME", help="Export only this table; may be repeated.")
]


def ls(path: RunOrCheckpoint, as_json: AsJson = False) -> None:
    """List the checkpoints of a run, or the tensors of a checkpoint.

    Example: rowwise ckpt ls runs/dlrm-synthetic/1

    Example: rowwise ckpt ls runs/dlrm-synthetic/1/ckpt/step-000000200 --json
    """
    from rowwise.checkpoint.listing import list_checkpoints, list_tensors
    from rowwise.checkpoint.manifest import CheckpointManifest
    from rowwise.checkpoint.named import is_checkpoint

    folder = parse_folder(path)
    if is_checkpoint(folder):
        tensors = list_tensors(CheckpointManifest.read(folder))
        if as_json:
            print_json(tensors)
        else:
            show_tensors(tensors)
    else:
        checkpoints = list_checkpoints(folder)
        if as_json:
            print_json(checkpoints)
        else:
            show_checkpoints(folder, checkpoints)


def verify(path: RunOrCheckpoint, as_json: AsJson = False) -> None:
    """Verify the checksums of all data of checkpoints, and list every damaged tensor and file.

    For versions of rowwise export in local folders, the SHA-256 of each file is verified, too.

    Exits with 1 if there is damage, and names the newest intact checkpoint of the run before it.

    Example: rowwise ckpt verify runs/dlrm-synthetic/1

    Example: rowwise ckpt verify runs/dlrm-synthetic/1/ckpt/step-000000200
    """
    from rowwise.checkpoint.check import verify as read_all

    def check_version(folder: "Folder") -> "Sequence[DamagedChunk]":
        if not isinstance(folder, Path) or not (folder / "model.json").is_file():
            return ()
        from rowwise.serve.items import damaged_files

        return damaged_files(folder)

    with splits_bar(make_terminal(stderr=True), "reading") as tell:
        result = read_all(parse_folder(path), tell, check_version)
    if as_json:
        print_json(result)
    else:
        show_verdict(path, result)
    if not result.good:
        raise typer.Exit(1)


def diff(
    first: CheckpointFolder,
    second: Annotated[str, typer.Argument(metavar="CKPT", help="Checkpoint to compare with.")],
    as_json: AsJson = False,
) -> None:
    """Compare the tensors of two checkpoints bit for bit, and their training state; times are ignored.

    Exits with 0 if they are equal, else with 1.

    Example: rowwise ckpt diff runs/dlrm-synthetic/1 runs/dlrm-synthetic/2
    """
    from rowwise.checkpoint.diff import diff as compare
    from rowwise.checkpoint.named import open_named

    a, b = open_named(parse_folder(first)), open_named(parse_folder(second))
    with splits_bar(make_terminal(stderr=True), "comparing") as tell:
        differences = compare(a, b, tell)
    if as_json:
        print_json(differences)
    else:
        show_differences(a.folder, b.folder, differences)
    if differences.any:
        raise typer.Exit(1)


def copy(
    ckpt: CheckpointFolder,
    into: Annotated[
        str,
        typer.Argument(metavar="FOLDER|URL", help="Target: a folder, or a URL such as s3://bucket/runs/1."),
    ],
) -> None:
    """Copy a checkpoint into a folder or an object store, under its own name, and verify every byte.

    An interrupted copy is not a valid checkpoint; the same command resumes it. URLs begin with s3://,
    gs:// or az://; credentials come from the environment, as the tutorial on object stores shows.

    Example: rowwise ckpt copy runs/dlrm-synthetic/1 s3://models/dlrm

    Example: rowwise ckpt copy s3://models/dlrm/step-000000200 runs/dlrm-synthetic/1/ckpt
    """
    from rowwise.checkpoint.copy import copy_checkpoint
    from rowwise.checkpoint.named import open_named

    target, checkpoint = parse_folder(into), open_named(parse_folder(ckpt))
    with splits_bar(make_terminal(stderr=True), "copying") as tell:
        copied = copy_checkpoint(checkpoint, target, tell)
    size_bytes = sum(file.size_bytes for file in checkpoint.manifest.files.values())
    print_line(f"wrote {copied}: {len(checkpoint.manifest.tensors)} tensors, {format_bytes(size_bytes)}")


def reshard(  # noqa: PLR0913 - one for each option
    ckpt: CheckpointFolder,
    out: NewFolder,
    plan: PlanFile = None,
    nproc: Nproc = None,
    row_type: Annotated[RowType | None, typer.Option(help="Row type of all tables (default: unchanged).")] = None,
    no_state: Annotated[bool, typer.Option("--no-state", help="Write weights only, without optimizer state.")] = False,
    tables: TableTypes = None,
) -> None:
    """Rewrite a checkpoint for another sharding plan, or with other row types.

    Loading does not need it: any checkpoint loads with any plan. Rows of an unchanged type stay bitwise equal.

    Example: rowwise ckpt reshard runs/dlrm-synthetic/1 eight --nproc 8

    Example: rowwise ckpt reshard runs/dlrm-synthetic/1 small --nproc 1 --row-type int8 --table user=fp16 --no-state
    """
    from rowwise.checkpoint.named import open_named
    from rowwise.checkpoint.rewrite import retype_tables, rewrite

    checkpoint = open_named(parse_folder(ckpt))
    new_tables = retype_tables(checkpoint, row_type, _parse_types(tables or ()))
    new_plan = _read_plan(plan, nproc or 1, list(new_tables.values()))
    with splits_bar(make_terminal(stderr=True), "writing") as tell:
        manifest = rewrite(checkpoint, out, new_plan, new_tables, state=not no_state, tell=tell)
    written = sum(file.size_bytes for file in manifest.files.values())
    summary = f"{len(manifest.tensors)} tensors of {checkpoint.folder}, {format_bytes(written)}"
    print_line(f"wrote {out}: {summary}, for {new_plan.world} ranks")


def export(  # noqa: PLR0913 - one for each option
    ckpt: CheckpointFolder,
    parquet: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a Parquet file for each table.")] = None,
    dcp: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a folder for torch.distributed.checkpoint.")
    ] = None,
    torchrec: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a state dict for TorchRec's EmbeddingBagCollection or EmbeddingCollection."
        ),
    ] = None,
    torch: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a dict of tensors for torch.load.")] = None,
    tables: Tables = None,
    state: Annotated[bool, typer.Option("--state", help="Also export optimizer state.")] = False,
    sequence: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="With --torchrec: a table of an EmbeddingCollection; may be repeated."),
    ] = None,
    prefix: Annotated[str, typer.Option(help="With --torchrec: path of the collection in your model.")] = "",
) -> None:
    """Export a checkpoint to Parquet, torch.distributed.checkpoint, TorchRec or torch.load, as exact float32.

    Parquet files have the columns id and vector. The other formats use the names of the model's state dict.

    Example: rowwise ckpt export runs/dlrm-synthetic/1 --parquet vectors --table user

    Example: rowwise ckpt export runs/dlrm-synthetic/1 --torchrec tables.pt --prefix model.sparse_arch
    """
    from rowwise.checkpoint.export import export_parquet, export_torch, own_names, torchrec_names
    from rowwise.checkpoint.named import open_named

    targets = {"--parquet": parquet, "--dcp": dcp, "--torchrec": torchrec, "--torch": torch}
    kind, path = next((kind, path) for kind, path in targets.items() if path is not None)
    checkpoint, names = open_named(parse_folder(ckpt)), tables or ()
    with splits_bar(make_terminal(stderr=True), "writing") as tell:
        if kind == "--parquet":
            written = [str(file) for file in export_parquet(checkpoint, path, names, state=state, tell=tell)]
        elif kind == "--dcp":
            from rowwise.checkpoint.dcp import export_dcp

            written = list(export_dcp(checkpoint, path, own_names(checkpoint, names, state=state), tell))
        elif kind == "--torchrec":
            lead = f"{prefix.rstrip('.')}." if prefix else ""
            written = list(
                export_torch(checkpoint, path, torchrec_names(checkpoint, names, sequence or (), lead), tell)
            )
        else:
            written = list(export_torch(checkpoint, path, own_names(checkpoint, names, state=state), tell))
    print_line("\n".join([f"wrote {path} from {checkpoint.folder}", *(f"  {name}" for name in written)]))


def import_(
    source: Annotated[Path, typer.Argument(help="A .pt, .pth or .safetensors file, or a DCP folder.")],
    out: NewFolder,
    maps: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="OLD=NEW",
            help="Map a source tensor to table:NAME or to a name in the state dict; * matches anything.",
        ),
    ] = None,
    path: Annotated[str, typer.Option(help="Path of the embedding module in the model.")] = "embeddings",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the matches; write nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert weights of other frameworks into a checkpoint for rowwise train --init-from OUT.

    TorchRec tables are recognised by their names. For other models, map tensors to tables with --map.

    Example: rowwise ckpt import torchrec.pt start

    Example: rowwise ckpt import dlrm.pt start --map 'emb_l.*.weight=table:C*' --map top_l.0.weight=top.layers.0.weight
    """
    from rowwise.checkpoint.foreign import import_matched, match, open_source

    if out.exists() and not dry_run:
        raise SpecError(f"{out} exists", "another name")
    if path and not all(path.split(".")):
        raise SpecError(f"--path {path}", "the path of a module, such as embeddings or sparse.tables")
    weights = open_source(source)
    matched = match(weights, maps or (), path)
    if as_json:
        print_json(matched)
    else:
        show_match(source, matched)
    if dry_run:
        return
    with splits_bar(make_terminal(stderr=True), "writing") as tell:
        import_matched(weights, matched, out, tell)
    if not as_json:
        print_line(f"wrote {out}; start from it with: rowwise train RECIPE --init-from {out}")


def remap(
    ckpt: CheckpointFolder,
    out: NewFolder,
    table: Annotated[str, typer.Option("--table", metavar="NAME", help="Table to change.")],
    file: Annotated[
        Path, typer.Option("--map", metavar="FILE", help="New id map, such as smaller/maps/user.safetensors.")
    ],
    counts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Id counts: probe.safetensors of rowwise compress (default: all equal)."),
    ] = None,
) -> None:
    """Change the id map of a table: rows and optimizer state are converted, so that training can continue.

    A new row is the mean of the old rows of its ids, weighted by --counts; a single old row is copied bit for bit.
    Rows without ids are zero. The table's weights in a wide (linear) part are converted, too.

    Example: rowwise ckpt remap runs/mine/1 fresh --table user --map smaller/maps/user.safetensors

    Example: rowwise ckpt remap runs/mine/1 fresh --table user --map user.map --counts smaller/probe.safetensors
    """
    from rowwise.checkpoint.named import open_named
    from rowwise.checkpoint.remap import remap as write_remapped

    checkpoint = open_named(parse_folder(ckpt))
    with splits_bar(make_terminal(stderr=True), "writing") as tell:
        remapped = write_remapped(checkpoint, out, table, file, counts, tell)
    print_line(f"wrote {out}: {checkpoint.folder} with the id map {file}")
    for change in remapped:
        means = change.rows - change.kept - change.empty
        row_counts = f"{change.kept:,} unchanged, {means:,} means of old rows, {change.empty:,} without ids"
        print_line(f"  {change.table}: {change.rows:,} rows for {change.ids:,} ids: {row_counts}")
    print_line(f"train with a recipe that has this id_map: rowwise train RECIPE --init-from {out}")


def _parse_types(texts: "Sequence[str]") -> dict[str, RowType]:
    expected = f"NAME=ROWTYPE, where ROWTYPE is one of {', '.join(RowType)}"
    types: dict[str, RowType] = {}
    for name, kind in parse_pairs("--table", texts, expected).items():
        if kind not in tuple(RowType):
            raise SpecError(f"--table {name}={kind}", expected)
        types[name] = RowType(kind)
    return types


def _read_plan(file: Path | None, ranks: int, tables: "list[Table]") -> "Plan":
    from rowwise.parallel.plan import Plan
    from rowwise.planning.planner import simple_plan
    from rowwise.tables.spec import Topology

    if file is None:
        return simple_plan(tables, Topology(devices=ranks))
    return Plan.from_json(read_bytes(file))
