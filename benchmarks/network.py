"""How near are predictions of networks to measurements, and what do orders and wires that fit a network gain?

    python benchmarks/network.py [--only accuracy lab wires] [--runs FOLDER] [--quick | --smoke] [--save]

Simulated steps beside measured ones of two ranks (`accuracy`); eight hosts in two racks on this machine, as network
namespaces behind shaped links, probed and ordered, with all-reduces and training in bad orders and in the order found
(`lab`); sums over a slow uplink (`wires`). Hosts share this machine's cores, so rates are low: what the lab measures is
links. Without namespaces or iproute2 the parts that need it are left out.

Takes: 35 minutes; --quick 11 minutes
Needs: Linux with network namespaces, iproute2, and 4 GB of memory
"""

import importlib
from pathlib import Path

from parts.report import finish, options, parsed

PARTS = {"accuracy": "accuracy_floors", "lab": "lab_floors", "wires": "wire_floors"}


def main() -> None:
    parser = options("network", __doc__, only=tuple(PARTS))
    parser.add_argument(
        "--runs", type=Path, help="a folder in which accuracy keeps its profile and runs, and lab finds them"
    )
    args = parsed(parser)
    floors, rows = [], []
    for part in args.only:
        of_part, measured = getattr(importlib.import_module(f"parts.network_{part}"), PARTS[part])(args)
        floors += of_part
        rows.append({"part": part, **measured})
    finish("network", rows, floors, args)


if __name__ == "__main__":
    main()
