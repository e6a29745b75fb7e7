"""Prints the results of `rowwise ckpt`: checkpoints, tensors, damage, differences and imported tensors."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from rowwise.base.quantity import format_bytes
from rowwise.cli.terminal import make_table, make_terminal, print_line

if TYPE_CHECKING:
    from rowwise.base.storage.folder import Folder
    from rowwise.checkpoint.check import CheckResult
    from rowwise.checkpoint.diff import Difference, Differences
    from rowwise.checkpoint.foreign import ImportMatch
    from rowwise.checkpoint.listing import ListedCheckpoint, ListedTensor

MAX_CHARACTERS = 50  # of a printed value
MAX_VALUES = 12  # printed differences of the training state


def show_checkpoints(path: "Folder", checkpoints: "list[ListedCheckpoint]") -> None:
    if not checkpoints:
        print_line(f"{path}: no checkpoints yet")
        return
    columns = ("step", "samples", "size", "written", "tensors", "ranks")
    table = make_table(("checkpoint", ""), columns, ("saved", "how"))
    for line in checkpoints:
        numbers = ["" if x is None else f"{x:,}" for x in (line.step, line.samples)]
        sizes = [format_bytes(line.size_bytes), format_bytes(line.written_bytes), str(line.tensors), str(line.ranks)]
        sizes = ["", "", "", ""] if line.problem else sizes
        table.add_row(line.name, ", ".join(line.marks), *numbers, *sizes, line.saved_at, line.problem or line.how)
    _print(table)


def show_tensors(tensors: "list[ListedTensor]") -> None:
    table = make_table(("tensor", "type"), ("shape", "size", "chunks"))
    for tensor in tensors:
        shape = " x ".join(f"{size:,}" for size in tensor.shape)
        table.add_row(tensor.name, tensor.kind, shape, format_bytes(tensor.size_bytes), str(tensor.chunks))
    _print(table)
    total = sum(tensor.size_bytes for tensor in tensors)
    print_line(f"{len(tensors)} tensors, {format_bytes(total)}")


def show_verdict(path: str, result: "CheckResult") -> None:
    for line in result.checked:
        print_line(f"{line.name}: {f'{len(line.damage)} damaged chunks' if line.damage else 'intact'}")
        if not line.damage:
            continue
        table = make_table(("tensor", "place", "file", "damage"))
        for chunk in line.damage:
            # Tensor and file are in other columns: drop them from the message.
            reason = chunk.why.removesuffix("; use another checkpoint")
            is_checksum = chunk.tensor and chunk.tensor in reason
            problem = "wrong checksum" if is_checksum else reason.rpartition(f"{chunk.file} ")[2]
            table.add_row(chunk.tensor, chunk.place, chunk.file, problem)
        _print(table)
    if not result.good:
        print_line(f"{result.whole} is intact" if result.whole else f"no intact checkpoint in {path}")


def show_differences(first: "Folder", second: "Folder", differences: "Differences") -> None:
    if not differences.any:
        print_line(f"equal: {differences.equal} tensors, bit for bit")
        return
    if differences.tensors:
        table = make_table(("tensor", "differs in"), ("rows", "largest difference"))
        for tensor in differences.tensors:
            table.add_row(tensor.name, _difference_kind(tensor, first, second), *_difference_size(tensor))
        _print(table)
    if differences.data:
        table = make_table(("data", "first", "second"))
        for key, values in list(differences.data.items())[:MAX_VALUES]:
            table.add_row(key, *(_shorten(value) for value in values))
        _print(table)
        if len(differences.data) > MAX_VALUES:
            print_line(f"and {len(differences.data) - MAX_VALUES} more; --json shows all")
    print_line(f"{len(differences.tensors)} tensors differ, {differences.equal} are equal, bit for bit")


def show_match(source: Path, matched: "ImportMatch") -> None:
    table = make_table(("tensor", "becomes", "type"), ("shape",))
    for tensor in matched.taken:
        shape = " x ".join(f"{size:,}" for size in tensor.shape)
        role = f"table {tensor.table}" if tensor.table else "dense"
        table.add_row(tensor.source, tensor.target, f"{tensor.kind}, {role}", shape)
    _print(table)
    for name in matched.left:
        print_line(f"not imported: {name}")
    print_line(f"{source}: {len(matched.taken)} tensors imported, {len(matched.left)} not")


def _difference_kind(difference: "Difference", first: "Folder", second: "Folder") -> str:
    match difference.kind:
        case "only in the first":
            return f"only in {first}"
        case "only in the second":
            return f"only in {second}"
        case "values":
            return "values"
        case "shape" | "type":
            return f"{difference.kind}: {difference.first}, {difference.second}"


def _difference_size(difference: "Difference") -> tuple[str, str]:
    if difference.rows is None:
        return "", ""
    return f"{difference.rows:,} of {difference.of_rows:,}", f"{difference.largest:.6g}"


def _shorten(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."


def _print(table: Table) -> None:
    make_terminal().print(table, markup=False)
