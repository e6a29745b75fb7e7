"""Does a server stay as it is for an hour, while another version becomes current every six seconds?

    python benchmarks/serve_soak.py [--quick | --smoke] [--save]

The DLRM of `serve.py` behind `rowwise serve`. Requests of one row, and of a context and 100 candidates, arrive at
random times. All answers are compared with the logits of `rowwise predict` for the version that they name. Memory and
open files are those of the server's processes, after each half minute.

Takes: 1 hour; --quick 1 minute
Needs: the extra `serve`
"""

import sys
import tempfile
import time
from pathlib import Path

from parts.process_tree import descriptors, memory_bytes
from parts.report import at_most, exactly, finish, options, parsed, show
from parts.serve_work import changing, make_requests, measure, serving, write_versions

CLIENTS = 32  # connections
VERSION_s = 6.0
RATE = {"one row": 250.0, "1 x 100": 50.0}  # requests a second
SIZES = {  # rows of a table, dim, MLP, unused, versions; seconds of a round, and rounds
    "smoke": ((1000, 8, (16,), 0, 3), 0.5, 2),
    "quick": ((20_000, 64, (512, 256), 0, 4), 6.0, 6),
    "full": ((100_000, 64, (512, 256), 0, 8), 30.0, 118),
}
SETTLED = 10  # rounds after which memory is compared: by then each version was open once


def main() -> None:
    args = parsed(options("serve_soak", __doc__))
    size, seconds, rounds = SIZES["smoke" if args.smoke else "quick" if args.quick else "full"]
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as name:
        models, data = write_versions(Path(name), size)
        requests = make_requests(models, data, Path(name))
        with serving(models, requests) as server, changing(models, VERSION_s) as made:
            begin_s = time.monotonic()
            for number in range(rounds):
                kind = list(RATE)[number % 2]
                row = measure(server, kind, max(20, int(seconds * RATE[kind])), CLIENTS, RATE[kind])
                row |= {"memory_bytes": memory_bytes(server.pid), "descriptors": descriptors(server.pid)}
                rows.append(row | {"after_s": time.monotonic() - begin_s, "versions": len(made)})
                show(rows[-1])
                if row["wrong_logits"]:
                    sys.exit(f"{row['wrong_logits']} wrong logits")
    settled = rows[min(SETTLED, rounds - 2) :]
    halves = settled[: len(settled) // 2], settled[len(settled) // 2 :]
    memory = [max(row["memory_bytes"] for row in half) for half in halves]
    files = [max(row["descriptors"] for row in half) for half in halves]
    floors = [exactly("logits with other bits than predict's", sum(row["wrong_logits"] for row in rows), 0)]
    if not args.quick:
        floors += [
            at_most("growth of memory, second half over first", memory[1] / memory[0] - 1, 0.01),
            at_most("growth of open files, second half over first", files[1] - files[0], 0),
        ]
    finish("serve_soak", rows, floors, args)


if __name__ == "__main__":
    main()
