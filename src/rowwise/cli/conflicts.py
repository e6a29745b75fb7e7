"""Conflicts and requirements between the options of all commands, checked before a command runs.

Names are as typed, with arguments in capitals. Commands check the values of their options themselves.
"""

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from rowwise.base.errors import SpecError


class Excludes(NamedTuple):
    """None of `options` may be combined with any of `others`."""

    options: str
    others: str
    hint: str = ""
    unless: str = ""  # an option that lifts the conflict


class Needs(NamedTuple):
    """Each of `options` requires one of `others`."""

    options: str
    others: str
    hint: str = ""


class OneOf(NamedTuple):
    """Exactly one of `options` is required."""

    options: str
    hint: str = ""
    unless: str = ""  # an option that replaces them all


RULES: dict[str, tuple[Excludes | Needs | OneOf, ...]] = {
    "bench": (
        Excludes("--all", "NAME --list"),
        Excludes("--list", "NAME"),
        Excludes("--quick", "--smoke"),
        Needs("--quick --smoke", "NAME --all"),
    ),
    "calibrate": (Needs("--dim", "--tables"),),
    "ckpt export": (
        Excludes("--state", "--torchrec", "TorchRec's optimizers store their state differently"),
        Needs("--sequence --prefix", "--torchrec"),
        OneOf("--parquet --dcp --torchrec --torch", "each takes a path to write to"),
    ),
    "ckpt reshard": (OneOf("--plan --nproc", "both set the number of ranks"),),
    "compress": (
        Excludes("--minutes", "--rows", "both limit the training of trials"),
        OneOf("--ratio --budget", "for example --ratio 10 or --budget 100MB"),
    ),
    "data inspect": (Excludes("--recipe", "--json", "--json writes no recipe"),),
    "export": (
        Excludes("--follow", "--explain --which", "--follow writes each checkpoint"),
        Excludes("--onnx", "--pt2 --mlflow --triton", "each writes another file or folder"),
        Excludes("--pt2", "--mlflow --triton", "each writes another file or folder"),
        Excludes("--mlflow", "--triton", "each writes another folder"),
        Excludes(
            "--onnx --pt2 --mlflow --triton",
            "--items --recall --explain --follow --full --cache --kserve",
            "these are of versions that rowwise serves",
        ),
        Excludes("--onnx --pt2", "--side", "a graph takes all columns: join them before"),
        Excludes("--follow", "--kserve", "the manifest serves each version that is exported to the URL"),
        Needs("--kserve", "--image", "the container image with rowwise"),
        Needs("--image", "--kserve"),
        Needs("--explain", "--rows", "nothing is rounded without it: give int8, int4, fp16 or bf16"),
    ),
    "fleet": (Needs("--redis", "--memory", "all rows are in memory without it"),),
    "plan": (
        Excludes("--tables", "--set", "--set changes values of a recipe"),
        Excludes("--recipe", "--dim", "a recipe has --set tables.all.dim=8"),
        Excludes("--recipe", "--wire", "a recipe has --set wire.network.forward=int8"),
        Excludes("--memory", "--tiers"),
        Excludes("--measure", "--replan --certify"),
        Excludes("--replan", "--certify", "--replan stays near the old plan, which is rarely optimal"),
        Excludes("--method", "--measure --replan --certify --seconds", "a method does not search"),
        OneOf("--tables --recipe"),
    ),
    "serve": (
        Excludes("--expect", "--redis", "rows from Redis are in no digest"),
        Needs("--redis --hit-rate", "--memory", "all rows are in memory without it"),
        Needs("--default-row", "--hit-rate", "answers wait for all rows without it"),
        Needs("--device-memory", "--device", "rows are in the memory of the host without it"),
        Needs("--record-share", "--record"),
    ),
    "simulate": (
        Excludes("--tables", "--set", "--set changes values of a recipe"),
        Excludes("RECIPE", "--dense --dim", "a recipe has its own"),
        Excludes("--even", "--plan"),
        Excludes("--trace", "--vary", "a trace shows one combination"),
        OneOf("RECIPE --tables", unless="--check"),
    ),
    "train": (
        Excludes("--run", "--runs --seeds"),
        Excludes("--baseline", "--json", "--json prints one object: run rowwise baseline RUN afterwards"),
        Excludes("--seeds", "--json", "--json prints one object: run rowwise eval RUN RUN --json afterwards"),
        Excludes("--dry-run", "--runs --run --timeout", "a dry run trains and writes nothing", unless="--on"),
        Excludes("--dry-run --on", "--baseline --no-baseline --seeds"),
        Excludes("--on", "--json"),
        Needs("--nodes --job --detach", "--on", "for example --on slurm"),
    ),
    "tune": (Excludes("--ratio", "--trials --minutes --nproc", "dims are chosen by one trained model"),),
    "watch": (
        Excludes("--once", "--port", "--port answers until Ctrl-C"),
        Needs("--host", "--port", "nothing listens without it"),
    ),
}


def check_conflicts(command: str, given: AbstractSet[str]) -> None:
    """Raise for the first rule of a command, such as `data inspect`, that the given options break."""
    for rule in RULES.get(command, ()):
        options = rule.options.split()
        present = [option for option in options if option in given]
        match rule:
            case Needs(others=others):
                if present and given.isdisjoint(others.split()):
                    required = " or ".join(others.split())
                    raise SpecError(f"{present[0]} without {required}", required, hint=rule.hint)
            case _ if rule.unless in given:
                pass
            case Excludes(others=others):
                conflicting = [option for option in others.split() if option in given]
                if present and conflicting:
                    raise SpecError(f"{present[0]} with {conflicting[0]}", "one of them", hint=rule.hint)
            case OneOf():
                if len(present) != 1:
                    problem = f"none of {', '.join(options)}" if not present else f"{present[0]} with {present[1]}"
                    raise SpecError(problem, "one of them", hint=rule.hint)
