"""What do the kernels for GPUs compile to, and how many bytes do they move?

    python benchmarks/gpu_static.py [--quick | --smoke] [--save]

Compiles the variants of every kernel for NVIDIA (sm_80, sm_90, sm_100) and AMD (gfx942), and reads registers, spills,
widths of loads, atomics and inexact instructions off the machine code. Counts the bytes that lookups and updates move
in Triton's interpreter, beside the least that the work needs. Times nothing, needs no GPU. The last printed line is
one JSON object.

Takes: 8 minutes; --quick 2 minutes (sm_90 alone)
Needs: Triton (`pip install triton==3.7.1`)
"""

import json
import os
from concurrent.futures import ProcessPoolExecutor

from parts.command import run_part
from parts.gpu_budget import faults, machine_code_of
from parts.gpu_compile import TARGETS
from parts.gpu_variants import variants
from parts.report import at_most, exactly, finish, options, parsed
from rich.progress import track

SMOKE_VARIANTS = ("pool 20 ids fp32 dim 128", "apply rowwise_adagrad fp32 dim 128")
TRAFFIC = {"lookup": 1.05, "update": 1.10}  # bytes moved over the least
HOT_UPDATE = 1.3
WIDE_LOADS = {"v4.b32", "v2.b64", "dwordx4"}  # of 16 bytes


def compiled(job: tuple[str, str]) -> dict:
    name, arch = job
    variant = variants()[name]
    code = machine_code_of(variant, arch)
    return {"section": "code", "kernel": name, "arch": arch, **code._asdict(), "faults": faults(variant, code, arch)}


def code_rows(args) -> list[dict]:
    archs = ["sm_90"] if args.quick else list(TARGETS)
    names = SMOKE_VARIANTS if args.smoke else list(variants())
    jobs = [(name, arch) for arch in archs for name in names]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return list(track(pool.map(compiled, jobs, chunksize=4), "compiling", len(jobs)))


def summary(code: list[dict]) -> list[dict]:
    """A row for each GPU."""
    rows = []
    for arch in dict.fromkeys(row["arch"] for row in code):
        mine = [row for row in code if row["arch"] == arch]
        wide = [row for row in mine if "fp32 dim 128" in row["kernel"] and not row["kernel"].startswith("interact")]
        rows.append(
            {
                "section": "code",
                "arch": arch,
                "variants": len(mine),
                "spills": sum(row["spills"] > 0 for row in mine),
                "atomics": sum(row["atomics"] for row in mine),
                "inexact": sum(bool(row["inexact"]) for row in mine),
                "wide": len(wide),
                "wide_16_bytes": sum(bool(WIDE_LOADS & row["loads"].keys()) for row in wide),
                "faults": [f"{row['kernel']}: {fault}" for row in mine for fault in row["faults"]],
                "registers": {row["kernel"]: row["registers"] for row in mine},
            }
        )
    return rows


def floors_of(code: list[dict], traffic: list[dict]) -> list[dict]:
    floors = []
    for row in code:
        floors += [
            exactly(f"{row['arch']}: faults of {row['variants']} kernels", len(row["faults"]), 0),
            at_most(f"{row['arch']}: registers", max(row["registers"].values()), None),
        ]
    for row in traffic:
        most = HOT_UPDATE if "hot" in row["case"] and row["operator"] == "update" else TRAFFIC[row["operator"]]
        floors.append(at_most(f"{row['operator']}, {row['case']}: bytes moved over the least", row["ratio"], most))
    floors.append(exactly("atomics", sum(row["atomics"] for row in traffic), 0))
    floors.append(exactly("launches in which programs share memory", sum(bool(row["races"]) for row in traffic), 0))
    return floors


def main() -> None:
    args = parsed(options("gpu_static", __doc__))
    code = summary(code_rows(args))
    traffic = json.loads(run_part("gpu_traffic", *(["--smoke"] if args.smoke else []), env={"TRITON_INTERPRET": "1"}))
    for row in code:
        for fault in row["faults"]:
            print(f"{row['arch']} {fault}")
    finish("gpu_static", code + traffic, floors_of(code, traffic), args)


if __name__ == "__main__":
    main()
