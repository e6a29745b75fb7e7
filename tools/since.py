"""What has changed since the whole suite was last green: since.py [--native].

`make test-nightly` writes `tests/nightly.json`; the commit that it names is where a change begins. Prints that commit;
with --native it ends with status 0 if native code or its tests have changed since, or if nobody knows.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NIGHTLY = ROOT / "tests" / "nightly.json"
NATIVE = (
    "/_cpp/",
    "/_c/",
    "CMakeLists.txt",
    "cmake/",
    "tools/arm.sh",
    "tools/fuzz.sh",
    "tools/sanitize.sh",
    "tests/fuzz/",
    "tests/native_tests.txt",
)


def base() -> str:
    """The commit at which the whole suite was last green; empty before the first."""
    return json.loads(NIGHTLY.read_text()).get("green", {}).get("commit", "") if NIGHTLY.exists() else ""


def changed_files(commit: str) -> list[str] | None:
    """Paths that differ from a commit, files that git does not know yet included; None where git cannot say."""
    if not commit:
        return None
    found: list[str] = []
    for command in (["diff", "--name-only", commit, "--"], ["ls-files", "--others", "--exclude-standard"]):
        try:
            done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        if done.returncode:
            return None
        found += done.stdout.splitlines()
    return found


def is_native(path: str) -> bool:
    """Whether the sanitizers and the emulated ARM can tell a difference."""
    tests = (ROOT / "tests" / "native_tests.txt").read_text().split()
    return any(part in path for part in NATIVE) or path.startswith(tuple(tests))


def main() -> int:
    if "--native" not in sys.argv:
        print(base())
        return 0
    changed = changed_files(base())
    found = ["unknown, so all"] if changed is None else [path for path in changed if is_native(path)]
    print("native code and its tests since", base()[:10] or "never", "-", ", ".join(found[:5]) or "no change")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
