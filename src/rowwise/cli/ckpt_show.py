"""What `rowwise ckpt` prints for people: tables of checkpoints, tensors, damage, differences and matches."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from rowwise.cli.terminal import say, terminal
from rowwise.quantity import of_bytes

if TYPE_CHECKING:
    from rowwise.checkpoint.check import CheckResult
    from rowwise.checkpoint.diff import Difference, Differences
    from rowwise.checkpoint.foreign import ImportMatch
    from rowwise.checkpoint.listing import ListedCheckpoint, ListedTensor

LONGEST = 50  # characters of a value
MOST = 12  # of the data that differs


def show_checkpoints(path: Path, found: "list[ListedCheckpoint]") -> None:
    """One line for each."""
    if not found:
        say(f"{path}: no checkpoint was written yet")
        return
    table = _table(("checkpoint", ""), ("step", "samples", "size", "written", "tensors", "ranks"), ("saved", "how"))
    for one in found:
        numbers = ["" if x is None else f"{x:,}" for x in (one.step, one.samples)]
        sizes = [of_bytes(one.size_bytes), of_bytes(one.written_bytes), str(one.tensors), str(one.ranks)]
        sizes = ["", "", "", ""] if one.problem else sizes
        table.add_row(one.name, ", ".join(one.marks), *numbers, *sizes, one.saved_at, one.problem or one.how)
    _print(table)


def show_tensors(found: "list[ListedTensor]") -> None:
    """One line for each."""
    table = _table(("tensor", "type"), ("shape", "size", "pieces"))
    for one in found:
        shape = " x ".join(f"{size:,}" for size in one.shape)
        table.add_row(one.name, one.kind, shape, of_bytes(one.size_bytes), str(one.pieces))
    _print(table)
    total = sum(one.size_bytes for one in found)
    say(f"{len(found)} tensors, {of_bytes(total)}")


def show_verdict(path: Path, found: "CheckResult") -> None:
    """Which are whole, and what is wrong with the others."""
    for one in found.checked:
        say(f"{one.name}: {f'{len(one.damage)} bad pieces' if one.damage else 'whole'}")
        if not one.damage:
            continue
        table = _table(("tensor", "place", "file", "what was found"), ())
        for bad in one.damage:
            # The message names what stands in the other columns already.
            why = bad.why.removesuffix("; use another checkpoint")
            what = "not what was written" if bad.tensor and bad.tensor in why else why.rpartition(f"{bad.file} ")[2]
            table.add_row(bad.tensor, bad.place, bad.file, what)
        _print(table)
    if not found.good:
        say(f"{found.whole} is whole" if found.whole else f"no checkpoint that is whole was found by {path}")


def show_differences(first: Path, second: Path, found: "Differences") -> None:
    """Tensors that are not the same, and data that is not."""
    if not found.any:
        say(f"equal: {found.equal} tensors, bit for bit")
        return
    if found.tensors:
        table = _table(("tensor", "differs in"), ("rows", "largest difference"))
        for one in found.tensors:
            table.add_row(one.name, _kind(one, first, second), *_amount(one))
        _print(table)
    if found.data:
        table = _table(("data", "first", "second"), ())
        for key, values in list(found.data.items())[:MOST]:
            table.add_row(key, *(_short(value) for value in values))
        _print(table)
        if len(found.data) > MOST:
            say(f"and {len(found.data) - MOST} more; --json shows all")
    say(f"{len(found.tensors)} tensors differ, {found.equal} are equal, bit for bit")


def show_match(source: Path, found: "ImportMatch") -> None:
    table = _table(("tensor", "becomes", "type"), ("shape",))
    for one in found.taken:
        shape = " x ".join(f"{size:,}" for size in one.shape)
        what = f"table {one.table}" if one.table else "dense"
        table.add_row(one.source, one.target, f"{one.kind}, {what}", shape)
    _print(table)
    for name in found.left:
        say(f"not taken over: {name}")
    say(f"{source}: {len(found.taken)} tensors are taken over, {len(found.left)} are not")


def _kind(one: "Difference", first: Path, second: Path) -> str:
    match one.kind:
        case "only in the first":
            return f"only in {first}"
        case "only in the second":
            return f"only in {second}"
        case "values":
            return "values"
        case "shape" | "type":
            return f"{one.kind}: {one.first}, {one.second}"


def _amount(one: "Difference") -> tuple[str, str]:
    if one.rows is None:
        return "", ""
    return f"{one.rows:,} of {one.of_rows:,}", f"{one.largest:.6g}"


def _short(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _table(left: tuple[str, ...], right: tuple[str, ...], last: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for names, justify in ((left, "left"), (right, "right"), (last, "left")):
        for name in names:
            table.add_column(name, justify=justify, overflow="fold", no_wrap=justify == "right")
    return table


def _print(table: Table) -> None:
    terminal().print(table, markup=False)
