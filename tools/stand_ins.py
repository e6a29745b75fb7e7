"""Libraries in place of NVIDIA's, which torch's ARM wheel loads and a machine without a GPU never calls.

python tools/stand_ins.py TORCH FOLDER: every name that the libraries of TORCH look for there is a function that
returns 0.
"""

import re
import subprocess
import sys
from pathlib import Path

torch, out = map(Path, sys.argv[1:])
SYSTEM = re.compile(r"(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|z)|ld-linux.*)\.so")


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


libraries = [path for path in torch.rglob("*.so*") if path.is_file()]
defined, wanted = set(), set()  # names; names with the version that they need
needed, versions = set(), {}  # libraries, and the versions that they must have
for library in map(str, libraries):
    for line in run("nm", "-D", library).splitlines():
        *_, kind, name = line.split()
        if kind in "Uvw":
            wanted.add(name)
        else:
            defined.add(name.partition("@")[0])
    needed |= set(re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", "-W", library)))
    for part in run("readelf", "-V", "-W", library).split("File: ")[1:]:
        versions.setdefault(part.split()[0], set()).update(re.findall(r"Name: (\S+)  Flags", part))

names: dict[str, list[str]] = {}  # by version
for name in sorted(wanted):
    plain, _, version = name.partition("@")
    if plain not in defined and not version.startswith(("GLIBC", "GCC", "CXXABI")):
        names.setdefault(version, []).append(plain)

out.mkdir(parents=True, exist_ok=True)
missing = sorted(name for name in needed - {path.name for path in libraries} if not SYSTEM.match(name))
for library in missing:
    of_version = {version: names.get(version, []) for version in versions.get(library, ())}
    own = [name for found in of_version.values() for name in found]
    if library == missing[0]:
        own += names.get("", [])
    labels = "".join(f".globl {name}\n.type {name},%function\n{name}:\n" for name in own)
    (out / "code.s").write_text(f'.text\n{labels}mov x0, #0\nret\n.section .note.GNU-stack,"",@progbits\n')
    lists = (f"{version} {{ global: {'; '.join([*found, ''])}}};\n" for version, found in of_version.items())
    (out / "versions").write_text("".join(lists))
    versioned = [f"-Wl,--version-script={out}/versions"] if library in versions else []
    made = ["-shared", "-nostdlib", f"-Wl,--soname={library}", *versioned, f"{out}/code.s", "-o", f"{out}/{library}"]
    run("aarch64-linux-gnu-gcc", *made)
