"""Everything that can be tested on this machine, and a summary: nightly.py [PART ...]; by default all parts.

Each part is a target of make, with a log in build/nightly. The summary is tests/nightly.json: of each part the lines
with which pytest closed, its seconds, and whether it passed. Parts of the same commit are kept, so that one can be run
again alone. If all are green on a clean tree, changes begin at its commit from then on: commit the summary.
"""

import json
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from since import NIGHTLY, ROOT

PARTS = {  # by name the target of make
    "fast": "test",
    "slow": "test-all",
    "sanitizers and ARM": "test-native",
    "benchmarks": "bench-smoke",
    "documentation": "docs",
}
CLOSING = re.compile(r"^(=+ )?([0-9]+ [a-z]+(, )?)+ in [0-9.]+s.*")


def run_part(name: str) -> dict:
    log = ROOT / "build" / "nightly" / f"{name.replace(' ', '-')}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    begin_s = time.monotonic()
    print(f"{name}: make {PARTS[name]}; its log is {log.relative_to(ROOT)}", flush=True)
    with log.open("w") as file:
        done = subprocess.run(["make", PARTS[name]], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False)
    said = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    closing = [line for line in said if CLOSING.match(line)] or said[-1:]
    failed = [line for line in said if line.startswith(("FAILED", "ERROR"))]
    seconds = round(time.monotonic() - begin_s)
    print(f"{name}: {'passed' if done.returncode == 0 else 'failed'} in {seconds} s; {'; '.join(closing)}", flush=True)
    return {"passed": done.returncode == 0, "seconds": seconds, "said": closing, "failed": failed}


def git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")


def main() -> int:
    chosen = sys.argv[1:] or list(PARTS)
    if unknown := set(chosen) - PARTS.keys():
        print(f"no part {', '.join(sorted(unknown))}: expected some of {', '.join(PARTS)}", file=sys.stderr)
        return 2
    summary = f":!{NIGHTLY.relative_to(ROOT)}"  # what an earlier call wrote is no change
    clean = not git("status", "--porcelain", "--", "src", "tests", "tools", "CMakeLists.txt", "pyproject.toml", summary)
    commit, date = git("rev-parse", "HEAD"), datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    before = json.loads(NIGHTLY.read_text()) if NIGHTLY.exists() else {}
    print(f"last green: {describe(before.get('green'))}")
    same = clean and before.get("last", {}).get("commit") == commit
    parts = (before["last"]["parts"] if same else {}) | {name: run_part(name) for name in chosen}
    last = {"commit": commit, "date": date, "processor": processor(), "parts": parts}
    green = clean and parts.keys() == PARTS.keys() and all(part["passed"] for part in parts.values())
    found = {"green": {"commit": commit, "date": date} if green else before.get("green", {}), "last": last}
    NIGHTLY.write_text(json.dumps(found, indent=1) + "\n")
    dirty = "" if clean else "; this tree has changes that are not committed"
    print(f"last green: {describe(found['green'])}{dirty}")
    return 0 if all(part["passed"] for part in parts.values()) else 1  # also those of an earlier call


def describe(green: dict | None) -> str:
    return f"{green['commit'][:10]}, {green['date']}" if green else "never"


if __name__ == "__main__":
    sys.exit(main())
