"""Write hardware profiles of processors whose lookups and updates were measured by `rowwise bench ops`.

python tools/profiles_from_ops.py [NAME ...] [--folder FOLDER]

A row of results is a set of 15 or 26 tables with equal columns and ids, on one thread. Networks and rates are fitted as
`rowwise calibrate` fits them, and every seventh set is held out. Exchanges are not measured there: links and memory are
those of the preset `cpu`. The same results give the same profile on the same machine.
"""

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import saved_results
from from_benchmarks import part
from msgspec import structs

from rowwise.planning.calibrate.fit import FittedProfile, MachineDescription, fit_profile
from rowwise.planning.calibrate.samples import SetSample
from rowwise.planning.perf.access import Access, Workload
from rowwise.planning.perf.hardware import PROFILE_FOLDER, Hardware, hardware_named
from rowwise.tables.ops.threads import one_thread
from rowwise.tables.spec import RowType

BATCHES, WORK = part("batches"), part("ops_work")
PROCESSORS = {"zen4": "amd-zen4-avx512", "zen5": "amd-zen5-avx512"}
ZIPF_A = 1.05  # of the ids of the benchmark


def sets_of(result: dict[str, Any]) -> list[SetSample]:
    """The rows on one thread in random order, as neighbours of equal shape would pass for drift of the machine."""
    rows = [row for row in result["rows"] if row["threads"] == 1]
    order = np.random.default_rng(0).permutation(len(rows))
    return [_as_set(rows[index], number) for number, index in enumerate(order)]


def _as_set(row: dict[str, Any], number: int) -> SetSample:
    access = Access(pooling=row["pooling"], zipf_a=ZIPF_A if row["ids"] == "zipf" else 0.0)
    kind = {"optimizer": BATCHES.OPTIMIZERS[row["optimizer"]], "row_type": RowType(row["row_type"])}
    return SetSample(
        number=number,
        rank=0,
        batch=row["batch"],
        workloads=tuple(Workload(table=t, access=access) for t in BATCHES.tables_of(_rows_of(row), row["dim"], **kind)),
        lookup_s=row["ours_forward_ms"] / 1e3,
        update_s=row["ours_rest_ms"] / 1e3,
        took_s=0.0,
    )


def _rows_of(row: dict[str, Any]) -> list[int]:
    """Rows of the tables of a section, as benchmarks/ops.py chooses them."""
    if row["section"] == "shapes":
        return WORK.rows_for(15, 1_000, 1_000_000)
    copies = row["section"] == "row types" or (row["section"] == "torch" and row["optimizer"] != "adagrad")
    return WORK.rows_for(26, 1_000, 1_000_000 if copies else 4_000_000)


def fit(name: str) -> tuple[Hardware, FittedProfile]:
    result, preset = saved_results.read("ops", PROCESSORS[name]), hardware_named("cpu")
    made = result["environment"]
    machine = MachineDescription(
        name=name,
        machine=f"{made['cpu']} ({made['processor']}), {made['cores']} cores",
        device="cpu",
        world=1,
        threads=1,
        device_bytes=preset.device_bytes,
        cache_bytes=preset.cache_bytes,
    )
    sets = sets_of(result)
    with one_thread():
        fitted = fit_profile(sets, machine)
    source = (
        f"networks and rates fitted to {len(sets)} sets of 15 or 26 equal tables that `rowwise bench ops` measured on "
        f"one thread of {machine.machine}, torch {made['versions']['torch']}; links, memory, disks and dense layers "
        "are those of the preset cpu"
    )
    assert fitted.hardware.kernels is not None
    noise = fmean(row["noise"] for row in result["rows"] if row["threads"] == 1)  # of repeats: no set is repeated
    kernels = structs.replace(fitted.hardware.kernels, noise=noise)
    return structs.replace(fitted.hardware, source=source, kernels=kernels), fitted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROCESSORS)}; default: all")
    parser.add_argument("--folder", type=Path, default=PROFILE_FOLDER)
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in PROCESSORS]
    if unknown:
        parser.error(f"{unknown[0]}: expected {', '.join(PROCESSORS)}")
    for name in args.names or PROCESSORS:
        hardware, fitted = fit(name)
        path = args.folder / f"{name}.json"
        path.write_text(hardware.to_json() + "\n")
        print(*fitted.lines(), f"{path}: {path.stat().st_size / 1e3:.0f} kB", sep="\n", flush=True)


if __name__ == "__main__":
    main()
