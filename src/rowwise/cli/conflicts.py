"""Options that do not go together, and options that need others: of all commands, checked before a command begins.

Names are as they are typed, arguments in capitals. What depends on a value of an option is checked by its command.
"""

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from rowwise.base.errors import SpecError


class Excludes(NamedTuple):
    """Each of the options goes with none of the others."""

    options: str
    others: str
    hint: str = ""
    unless: str = ""  # an option with which they do go together


class Needs(NamedTuple):
    """Each of the options has an effect only with one of the others."""

    options: str
    others: str
    hint: str = ""


class OneOf(NamedTuple):
    """Exactly one of the options is given."""

    options: str
    hint: str = ""
    unless: str = ""  # an option in place of all of them


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
    "ckpt reshard": (OneOf("--plan --nproc", "both say the ranks to write files for"),),
    "compress": (
        Excludes("--minutes", "--rows", "both say how far trials train"),
        OneOf("--ratio --budget", "for example --ratio 10 or --budget 100MB"),
    ),
    "data inspect": (Excludes("--recipe", "--json", "--json writes no recipe"),),
    "export": (
        Excludes("--follow", "--explain --which", "--follow writes each checkpoint"),
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
    "watch": (
        Excludes("--once", "--port", "--port answers until Ctrl-C"),
        Needs("--host", "--port", "nothing listens without it"),
    ),
}


def check_conflicts(command: str, given: AbstractSet[str]) -> None:
    """Raise for the first rule of a command, such as `data inspect`, that the given options break."""
    for rule in RULES.get(command, ()):
        options = rule.options.split()
        here = [option for option in options if option in given]
        match rule:
            case Needs(others=others):
                if here and given.isdisjoint(others.split()):
                    wanted = " or ".join(others.split())
                    raise SpecError(f"{here[0]} without {wanted}", f"{wanted}, too", hint=rule.hint)
            case _ if rule.unless in given:
                pass
            case Excludes(others=others):
                there = [option for option in others.split() if option in given]
                if here and there:
                    raise SpecError(f"{here[0]} with {there[0]}", "one of them", hint=rule.hint)
            case OneOf():
                if len(here) != 1:
                    got = f"none of {', '.join(options)}" if not here else f"{here[0]} with {here[1]}"
                    raise SpecError(got, "one of them", hint=rule.hint)
