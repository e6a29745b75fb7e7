"""What does `train.compile` gain, by kind of model?

    python benchmarks/compiled.py [--quick | --smoke] [--save]

Training steps of models with 26 tables, with and without, interleaved in one process; a time is the minimum of the
repeats. First both sides take two steps from the same weights, whose losses have to agree; the time of the first is
that of the compilation.

Takes: 6 minutes; --quick 4 minutes
Needs: a C++ compiler
"""

import time

import torch
from parts.batches import clicks_of, tables_of
from parts.report import at_least, at_most, finish, options, parsed, show

from rowwise import (
    DCN,
    DHEN,
    DLRM,
    AutoInt,
    DeepFM,
    Embeddings,
    FinalMLP,
    MaskNet,
    Wukong,
    XDeepFM,
)
from rowwise.train.breakdown import Breakdown
from rowwise.train.objective import Clicks
from rowwise.train.settings import Training
from rowwise.train.step import StepContext, step

FEATURES, ROWS, DIM, DENSE = 26, 1000, 32, 13
MODELS = {
    "DLRM": lambda e: DLRM(e, DENSE, (512, 256, DIM)),
    "DeepFM": lambda e: DeepFM(e, DENSE),
    "DCN": lambda e: DCN(e, DENSE),
    "DHEN": lambda e: DHEN(e, DENSE),
    "Wukong": lambda e: Wukong(e, DENSE),
    "MaskNet": lambda e: MaskNet(e, DENSE),
    "FinalMLP": lambda e: FinalMLP(e, DENSE),
    "AutoInt": lambda e: AutoInt(e, DENSE),
    "xDeepFM": lambda e: XDeepFM(e, DENSE),
}


def measure(name: str, size: int, repeats: int) -> dict:
    contexts, batch, number = {}, clicks_of(size, FEATURES, ROWS, DENSE), 0
    for compiled in (False, True):
        torch.manual_seed(1)
        model = MODELS[name](Embeddings(tables_of([ROWS] * FEATURES, DIM)))
        settings = Training(batch=size, compile=compiled)
        contexts[compiled] = StepContext.create(model, Clicks(model), settings, Breakdown())
    seconds, losses = {False: [], True: []}, {False: [], True: []}
    for number in range(1, repeats + 3):
        for compiled, context in contexts.items():
            begin = time.perf_counter()
            losses[compiled].append(step(context, [batch], number).loss)
            seconds[compiled].append(time.perf_counter() - begin)
    plain_s, compiled_s = (min(seconds[one][2:]) for one in (False, True))
    return {
        "model": name, "batch": size, "threads": torch.get_num_threads(), "plain_samples_s": size / plain_s,
        "compiled_samples_s": size / compiled_s, "ratio": plain_s / compiled_s, "compile_s": seconds[True][0],
        "off": max(abs(a - b) / a for a, b in zip(losses[False][:2], losses[True][:2], strict=True)),
    }  # fmt: skip


def main() -> None:
    args = parsed(options("compiled", __doc__))
    size, repeats = (16, 1) if args.smoke else (512, 5 if args.quick else 20)
    rows = []
    for name in ("DLRM", "xDeepFM") if args.smoke else MODELS:
        rows.append(row := measure(name, size, repeats))
        show(row)
    floors = [at_most("relative difference of losses, most", max(row["off"] for row in rows), 1e-5)]
    if not args.smoke:
        floors.append(at_least("speed of xDeepFM, without is 1", rows[-1]["ratio"], 1.2))
    finish("compiled", rows, floors, args)


if __name__ == "__main__":
    main()
