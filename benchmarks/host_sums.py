"""What do orders of hosts gain for all-reduces by ring, halving and doubling and tree, by size?

    python benchmarks/host_sums.py [--quick | --smoke] [--save]

Eight hosts in two racks on this machine, as network namespaces behind shaped links: real all-reduces of several sizes,
in a bad order of hosts and in the order found on the probed network, and by the algorithm that is chosen by size.
Without namespaces or iproute2 there is nothing to measure.

Takes: 4 minutes; --quick 2 minutes
Needs: Linux with network namespaces, iproute2, and 3 GB of memory
"""

from parts.network_sums import sums_floors
from parts.report import finish, options, parsed


def main() -> None:
    args = parsed(options("host_sums", __doc__))
    floors, rows = sums_floors(args)
    finish("host_sums", rows, floors, args)


if __name__ == "__main__":
    main()
