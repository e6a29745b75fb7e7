"""How near are predictions of networks to measurements, and what do orders and wires that fit a network gain?

    python benchmarks/network.py [--only simulate lab wires] [--quick | --smoke] [--save]

Simulated steps beside measured ones and published figures (`simulate`); eight hosts in two racks on this machine, as
network namespaces behind shaped links, probed and ordered, with all-reduces and training in bad orders and in the order
found (`lab`); sums and wire types over a slow uplink (`wires`). Hosts share this machine's cores, so rates are low:
what the lab measures is links. Without namespaces or iproute2 the parts that need it are left out.

Takes: 25 minutes; --quick 6 minutes
Needs: Linux with network namespaces, iproute2, and 4 GB of memory
"""

import importlib
from importlib.util import find_spec

from parts.report import environment, finish, options, parsed

PARTS = {"simulate": "simulate_floors", "lab": "lab_floors", "wires": "wire_floors"}


def main() -> None:
    parser = options("network", __doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    args = parsed(parser)
    floors, rows = [], []
    for part in args.only:
        name = f"parts.network_{part}"
        if find_spec(name) is None:
            continue
        of_part, measured = getattr(importlib.import_module(name), PARTS[part])(args)
        floors += of_part
        rows.append({"part": part, **measured})
    finish({"benchmark": "network", "environment": environment(), "rows": rows, "floors": floors}, args)


if __name__ == "__main__":
    main()
