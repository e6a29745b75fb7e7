"""Machines by name: `8xa100-like` is a host of 8 devices, `16x8xzionex` are 16 such hosts; or a JSON file.

A file is named by its path or URL.

`8+8x8xzionex` are two groups of 8 hosts, each behind an uplink.

Memory can be overridden after a colon: `8xa100-like:device=40GB,host=1.5TB`. Not supported: different devices in one
machine.
"""

import re
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from rowwise.base.errors import SpecError
from rowwise.base.storage.folder import parse_folder, read_file
from rowwise.base.textfile import MAX_BYTES, decode_json, read_bytes
from rowwise.planning.perf.hardware import PRESETS, Hardware, Machine, hardware_named, read_hardware
from rowwise.tables.spec import Topology

COUNTED = re.compile(r"(?:(?P<hosts>[0-9]{1,9}(?:\+[0-9]{1,9}){0,4095})x)?(?:(?P<devices>[0-9]{1,9})x)(?P<name>.+)")
SIZE = re.compile(r"(?P<number>[0-9]+\.?[0-9]*|\.[0-9]+)\s*(?P<unit>[kMGTP]?i?B?)", re.IGNORECASE)
POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
TIERS = {"device": "device_bytes", "host": "host_bytes", "disk": "disk_bytes"}
TOPOLOGIES = (
    "a machine such as 8xa100-like, 16x8xzionex (16 hosts of 8), 8+8x8xzionex (in two groups),"
    " 8xa100-like:device=40GB,host=1.5TB, or a JSON file or its URL"
)
MAX_SIZE = 1 << 60


def machine_named(text: str) -> Machine:
    """A machine by its name, or from its file."""
    name, colon, changes = text.rpartition(":")
    if not colon or ("=" not in changes and changes) or changes.startswith("//"):  # the colon of a URL
        name, changes, colon = text, "", ""
    machine = (
        _read_machine(name) if name.endswith(".json") and not _counts_profile_devices(name) else _parse_counted(name)
    )
    if not colon:
        return machine
    return structs.replace(machine, hardware=_with_memory(machine.hardware, changes, text))


def parse_size(text: str, what: str) -> int:
    """A size such as 40GB (of 1000 MB), 36GiB (of 1024 MiB) or 40000000000."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise SpecError(f"{what}={text!r}", "a size such as 40GB, 36GiB or 1.5TB")
    unit = match["unit"].lower().removesuffix("b")
    base = 1024 if unit.endswith("i") else 1000
    size = float(match["number"]) * base ** POWERS[unit.removesuffix("i")]
    if size > MAX_SIZE:
        raise SpecError(f"{what}={text!r}", f"less than {MAX_SIZE:,} bytes")
    return int(size)


def _counts_profile_devices(name: str) -> bool:
    """Whether a name counts devices whose profile is in a file (8xmine.json), and is not itself a file."""
    return COUNTED.fullmatch(name) is not None and not Path(name).is_file()


def _parse_counted(name: str) -> Machine:
    match = COUNTED.fullmatch(name)
    hosts, devices, kind = (match["hosts"] or "1", match["devices"], match["name"]) if match else ("1", "1", name)
    hardware = _read_profile(kind) if kind.endswith(".json") else _find_preset(kind, name)
    sizes = tuple(map(int, hosts.split("+")))
    if min(sizes) < 1 or int(devices) < 1:
        raise SpecError(f"topology {name!r}: {hosts} hosts of {devices} devices", "at least one of each")
    topology = Topology(hosts=sum(sizes), devices=int(devices), groups=sizes if len(sizes) > 1 else ())
    return Machine(topology=topology, hardware=hardware)


def _find_preset(kind: str, name: str) -> Hardware:
    if kind in PRESETS:
        return hardware_named(kind)
    import difflib  # slow to import, and only errors need it

    near = difflib.get_close_matches(kind.lower(), PRESETS, n=len(PRESETS), cutoff=0.0)
    raise SpecError(f"topology {name!r}: no hardware preset {kind!r}; there are {', '.join(near)}", TOPOLOGIES)


def _with_memory(hardware: Hardware, changes: str, text: str) -> Hardware:
    sizes: dict[str, int] = {}
    for change in changes.split(","):
        tier, equals, size = change.partition("=")
        if tier.strip() not in TIERS or not equals:
            raise SpecError(f"topology {text!r}: {change!r}", "device=, host= or disk= and a size such as 40GB")
        sizes[TIERS[tier.strip()]] = parse_size(size, f"topology {text!r}: {tier.strip()}")
    return structs.replace(hardware, **sizes)


def _read_machine(path: str) -> Machine:
    """From a file {"topology": {...}, "hardware": {...} or the name of a preset}."""
    try:
        document: Any = decode_json(_read(path), object)
    except msgspec.DecodeError as error:
        raise SpecError(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict) or document.keys() != {"topology", "hardware"}:
        keys = ", ".join(document) if isinstance(document, dict) else type(document).__name__
        raise SpecError(
            f"{path}: {keys or 'nothing'}",
            '{"topology": {"hosts": 2, "devices": 8}, "hardware": {...} or the name of a preset}',
            hint=f"write 8x{path.rpartition('/')[2]} if it is a hardware profile",
        )
    if isinstance(document["hardware"], str):
        document["hardware"] = _find_preset(document["hardware"], str(path))
    try:
        return Machine(
            topology=msgspec.convert(document["topology"], Topology),
            hardware=msgspec.convert(document["hardware"], Hardware),
        )
    except (msgspec.ValidationError, SpecError) as error:
        raise SpecError(f"{path}: {error}") from None


def _read(path: str) -> bytes:
    """A file by its path or URL."""
    if "://" not in path:
        return read_bytes(path)
    folder, _, name = path.rpartition("/")
    return read_file(parse_folder(folder), name, MAX_BYTES)


def _read_profile(path: str) -> Hardware:
    try:
        return read_hardware(_read(path))
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None
