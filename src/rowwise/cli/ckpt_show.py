"""Output of `rowwise ckpt`: tables of checkpoints, tensors, damage, differences and imported tensors."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from rowwise.cli.terminal import make_terminal, print_line
from rowwise.quantity import format_bytes

if TYPE_CHECKING:
    from rowwise.checkpoint.check import CheckResult
    from rowwise.checkpoint.diff import Difference, Differences
    from rowwise.checkpoint.foreign import ImportMatch
    from rowwise.checkpoint.listing import ListedCheckpoint, ListedTensor

LONGEST = 50  # characters of a value
MOST = 12  # differing values that are printed


def show_checkpoints(path: Path, found: "list[ListedCheckpoint]") -> None:
    if not found:
        print_line(f"{path}: no checkpoints yet")
        return
    table = _table(("checkpoint", ""), ("step", "samples", "size", "written", "tensors", "ranks"), ("saved", "how"))
    for one in found:
        numbers = ["" if x is None else f"{x:,}" for x in (one.step, one.samples)]
        sizes = [format_bytes(one.size_bytes), format_bytes(one.written_bytes), str(one.tensors), str(one.ranks)]
        sizes = ["", "", "", ""] if one.problem else sizes
        table.add_row(one.name, ", ".join(one.marks), *numbers, *sizes, one.saved_at, one.problem or one.how)
    _print(table)


def show_tensors(found: "list[ListedTensor]") -> None:
    table = _table(("tensor", "type"), ("shape", "size", "chunks"))
    for one in found:
        shape = " x ".join(f"{size:,}" for size in one.shape)
        table.add_row(one.name, one.kind, shape, format_bytes(one.size_bytes), str(one.chunks))
    _print(table)
    total = sum(one.size_bytes for one in found)
    print_line(f"{len(found)} tensors, {format_bytes(total)}")


def show_verdict(path: Path, found: "CheckResult") -> None:
    for one in found.checked:
        print_line(f"{one.name}: {f'{len(one.damage)} damaged chunks' if one.damage else 'intact'}")
        if not one.damage:
            continue
        table = _table(("tensor", "place", "file", "damage"), ())
        for bad in one.damage:
            # Tensor and file are in other columns: drop them from the message.
            why = bad.why.removesuffix("; use another checkpoint")
            what = "wrong checksum" if bad.tensor and bad.tensor in why else why.rpartition(f"{bad.file} ")[2]
            table.add_row(bad.tensor, bad.place, bad.file, what)
        _print(table)
    if not found.good:
        print_line(f"{found.whole} is intact" if found.whole else f"no intact checkpoint in {path}")


def show_differences(first: Path, second: Path, found: "Differences") -> None:
    if not found.any:
        print_line(f"equal: {found.equal} tensors, bit for bit")
        return
    if found.tensors:
        table = _table(("tensor", "differs in"), ("rows", "largest difference"))
        for one in found.tensors:
            table.add_row(one.name, _difference_kind(one, first, second), *_difference_size(one))
        _print(table)
    if found.data:
        table = _table(("data", "first", "second"), ())
        for key, values in list(found.data.items())[:MOST]:
            table.add_row(key, *(_shorten(value) for value in values))
        _print(table)
        if len(found.data) > MOST:
            print_line(f"and {len(found.data) - MOST} more; --json shows all")
    print_line(f"{len(found.tensors)} tensors differ, {found.equal} are equal, bit for bit")


def show_match(source: Path, found: "ImportMatch") -> None:
    table = _table(("tensor", "becomes", "type"), ("shape",))
    for one in found.taken:
        shape = " x ".join(f"{size:,}" for size in one.shape)
        what = f"table {one.table}" if one.table else "dense"
        table.add_row(one.source, one.target, f"{one.kind}, {what}", shape)
    _print(table)
    for name in found.left:
        print_line(f"not imported: {name}")
    print_line(f"{source}: {len(found.taken)} tensors imported, {len(found.left)} not")


def _difference_kind(one: "Difference", first: Path, second: Path) -> str:
    match one.kind:
        case "only in the first":
            return f"only in {first}"
        case "only in the second":
            return f"only in {second}"
        case "values":
            return "values"
        case "shape" | "type":
            return f"{one.kind}: {one.first}, {one.second}"


def _difference_size(one: "Difference") -> tuple[str, str]:
    if one.rows is None:
        return "", ""
    return f"{one.rows:,} of {one.of_rows:,}", f"{one.largest:.6g}"


def _shorten(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _table(left: tuple[str, ...], right: tuple[str, ...], last: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for names, justify in ((left, "left"), (right, "right"), (last, "left")):
        for name in names:
            table.add_column(name, justify=justify, overflow="fold", no_wrap=justify == "right")
    return table


def _print(table: Table) -> None:
    make_terminal().print(table, markup=False)
