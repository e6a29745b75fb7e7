"""Does `rowwise simulate` give the rates that were published for models on other machines?

    python benchmarks/simulate.py [--quick | --smoke] [--save]

Seven models on 128 GPUs, with dense layers replicated, fully sharded, and cut by tensors between hosts. A step is
counted as arXiv 2310.02784 describes it, beside what the public code of that paper prints; and by our bytes, memory and
schedule, one difference after another. Nothing is measured, so the results are those of every machine.

Takes: 10 seconds
Needs: nothing
"""

from dataclasses import replace

from parts.report import at_least, at_most, exactly, finish, options, parsed

from rowwise.planning.planner.machines import machine_named
from rowwise.planning.simulate.published_models import read_published
from rowwise.planning.simulate.simulation import SimulatedMachine, SimulatedModel, choose_dense, simulate
from rowwise.planning.simulate.step import SIMPLIFICATIONS

DENSE = ("replicated", "full", "tp:hosts")
# Millions of samples a second that the public code prints, in training and in inference, in the order of DENSE.
PRINTED = {
    "dlrm-a": ((1.214, 0.898, 0.770), (3.407, 2.297, 1.552)),
    "dlrm-i": ((3.059, 2.752, 1.619), (6.379, 5.882, 3.224)),
    "dlrm-f": ((30.981, 28.441, 15.394), (64.328, 59.924, 29.154)),
    "dlrm-a-moe": ((0.304, 0.208, 0.470), (3.163, 0.604, 0.977)),
    "dlrm-i-moe": ((1.791, 1.406, 1.049), (6.293, 3.514, 2.107)),
    "dlrm-a-transformer": ((0.883, 0.645, 0.141), (2.291, 1.747, 0.284)),
    "dlrm-i-transformer": ((1.341, 1.242, 0.156), (3.336, 3.193, 0.314)),
}
TASKS = ("training", "inference")
OFF, OFF_tp = 0.01, 0.06  # rings move less than all bytes, which the description counts
GAINS = {"training": 2.24, "inference": 5.2}  # best over fully sharded: the paper's abstract
MEASURED = {"dlrm-a": 1.2, "dlrm-i": 3.4, "dlrm-f": 1.7}  # arXiv 2104.05158
ENOUGH = "16x8xzionex:device=400GB"  # the public code has no limits of memory


def model_of(name: str) -> SimulatedModel:
    model = read_published(name)
    assert model is not None
    return model.simulated(name)


def rate(model: SimulatedModel, machine: str = "16x8xzionex") -> float:
    """Millions of samples a second."""
    place = SimulatedMachine(machine=machine_named(machine), even=True)
    return simulate(model, place, explain=False).samples_s / 1e6


def as_described() -> list[dict]:
    """Rows counted as the description does."""
    rows = []
    for name, printed in PRINTED.items():
        model = replace(model_of(name), simplified=frozenset(SIMPLIFICATIONS))
        for task, rates in zip(TASKS, printed, strict=True):
            for dense, wanted in zip(DENSE, rates, strict=True):
                chosen = choose_dense(model, dense, machine_named(ENOUGH).topology)
                ours = rate(replace(chosen, training=task == "training"), ENOUGH)
                rows.append({"model": name, "task": task, "dense": dense, "printed": wanted, "simulated": ours})
    return rows


def described_floors(rows: list[dict]) -> list[dict]:
    floors = []
    for dense, most in zip(DENSE, (OFF, OFF, OFF_tp), strict=True):
        worst = max(abs(row["simulated"] / row["printed"] - 1) for row in rows if row["dense"] == dense)
        floors.append(at_most(f"{dense}: off what the public code prints, worst of {len(rows) // 3}", worst, most))
    for task, gain in GAINS.items():
        rates = {r["dense"]: r["simulated"] for r in rows if (r["model"], r["task"]) == ("dlrm-a-moe", task)}
        found = max(rates.values()) / rates["full"]
        floors.append(at_most(f"dlrm-a-moe, {task}: best over fully sharded, off {gain}", abs(found / gain - 1), 0.1))
    for name in ("dlrm-a", "dlrm-i"):
        found = next(r["simulated"] for r in rows if (r["model"], r["dense"]) == (name, "replicated"))
        measured = MEASURED[name]
        off = abs(found / measured - 1)
        floors.append(at_most(f"{name}: off {measured} million samples/s, which were measured", off, 0.11))
    return floors


def by_our_bytes() -> list[dict]:
    """What lies between our step and that of the description."""
    rows = []
    for name, measured in MEASURED.items():
        place = SimulatedMachine(machine=machine_named("16x8xzionex"), even=True)
        found = simulate(model_of(name), place)
        steps = {"ours": found.samples_s / 1e6} | {step.what: step.samples_s / 1e6 for step in found.counted}
        rows.append({"model": name, "measured": measured, **steps})
    below = rate(model_of("dlrm-f"), "16x8xzionex:device=2GB")
    rows.append({"model": "dlrm-f, all rows in host memory", "measured": MEASURED["dlrm-f"], "ours": below})
    return rows


def our_floors(rows: list[dict]) -> list[dict]:
    ours = {row["model"]: row["ours"] for row in rows}
    bounds = {"dlrm-a": (0.36, 0.45), "dlrm-i": (1.7, 2.1), "dlrm-f": (1.7, 2.6)}
    bounds["dlrm-f, all rows in host memory"] = (1.5, 2.0)
    floors = [
        at_least(f"{name}: millions of samples/s by our bytes", ours[name], low) for name, (low, _) in bounds.items()
    ]
    floors += [
        at_most(f"{name}: millions of samples/s by our bytes", ours[name], top) for name, (_, top) in bounds.items()
    ]
    refused = rate(model_of("dlrm-f"), "16x8xzionex:host=0GB")
    return [*floors, exactly("dlrm-f without host memory has no rate", refused, 0.0)]


def main() -> None:
    args = parsed(options("simulate", __doc__))
    described, ours = as_described(), by_our_bytes()
    floors = [*described_floors(described), *our_floors(ours)]
    rows = [{"section": "described", **row} for row in described] + [{"section": "ours", **row} for row in ours]
    finish("simulate", rows, floors, args)


if __name__ == "__main__":
    main()
