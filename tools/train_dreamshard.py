"""Make dreamshard.json in src/rowwise/planning/planner/methods again: the policy that `dreamshard.py` there loads.

python tools/train_dreamshard.py [--minutes 6] [--seed 0] [--out FILE]

It trains on half of the made-up tables of benchmarks/parts/planner_tasks.py, each with every number of columns, on 2 to
8 devices like an A100; benchmarks/parts/calibrate_dreamshard.py judges it on the other half. The same minutes (a number
of steps, about so long on one core) and seed give the same file on the same machine.
"""

import argparse
import time
from pathlib import Path

import msgspec
from dreamshard.train import PolicyProgress, PolicyTraining, train_policy
from from_benchmarks import part

from rowwise.planning.planner.methods.dreamshard import SHIPPED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=SHIPPED)
    args = parser.parse_args()
    begin_s, judged = time.monotonic(), part("calibrate_dreamshard")

    def show(p: PolicyProgress) -> None:
        print(
            f"{time.monotonic() - begin_s:6.1f} s  iteration {p.iteration}: cost network off by {p.cost_error:.2%} of"
            f" a rank and {p.overall_error:.2%} of a placement, reward {p.reward:.4f}, entropy {p.entropy:.3f}",
            flush=True,
        )

    about = {"by": f"tools/train_dreamshard.py --minutes {args.minutes:g} --seed {args.seed}", "pool": judged.ABOUT}
    saved = train_policy(judged.training(), PolicyTraining().lasting(args.minutes), args.seed, show, about)
    args.out.write_bytes(msgspec.json.encode(saved) + b"\n")
    print(f"{args.out}: {args.out.stat().st_size / 1e3:.0f} kB in {time.monotonic() - begin_s:.0f} s")


if __name__ == "__main__":
    main()
