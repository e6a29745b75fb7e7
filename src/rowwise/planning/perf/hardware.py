"""Hardware profiles: rates of a device, memory by tier, and links between devices, as numbers.

Profiles are presets, measured ones that come with the package, or files; each names the source of its numbers. Not
supported: different devices in one machine.
"""

import functools
import re
from pathlib import Path
from typing import Literal, get_args

import msgspec
from msgspec import structs

from rowwise.base.errors import SpecError
from rowwise.base.value import check_max, parse_json
from rowwise.planning.perf.exchange import Exchanges
from rowwise.planning.perf.linear_times import LinearTimes, SumTimes
from rowwise.planning.perf.network import SetNetwork
from rowwise.tables.spec import LINKS, FarType, Link, Topology, Value, WireType

MAX_BYTES = 1 << 60
MAX_s = 1e6
FLOAT_bytes = 4
SECONDS = ("launch_s", "forward_issue_s", "backward_issue_s")
NUMBERS = re.compile(r"\[[^][{}\"]*\]")
GiB = 1 << 30
Collective = Literal["all_to_all", "reduce_scatter", "all_reduce"]


class LinkRates(Value, frozen=True, kw_only=True):
    """A class of links: latency, and bytes a second that each device sends by collective, as a ring counts them.

    A reduce-scatter of S bytes on W devices, or an all-gather, sends (W - 1) / W S, an all-reduce 2 (W - 1) / W S:
    rates are bus bandwidths. The algorithm bandwidth of an all-reduce, S over its time, is half to all of that.
    """

    latency_s: float = 0.0
    all_to_all_Bps: float  # bytes for other devices
    reduce_scatter_Bps: float  # bus bandwidth, also of an all-gather
    all_reduce_Bps: float  # bus bandwidth

    def seconds_a_byte(self, collective: Collective) -> float:
        return 1.0 / getattr(self, f"{collective}_Bps")

    def times(self, factor: float) -> "LinkRates":
        """Links with all rates multiplied by `factor`, and the same latency."""
        rates = {
            f"{collective}_Bps": getattr(self, f"{collective}_Bps") * factor for collective in get_args(Collective)
        }
        return structs.replace(self, **rates)


def _equal_rates(rate_Bps: float, latency_s: float = 0.0) -> LinkRates:
    return LinkRates(latency_s=latency_s, all_to_all_Bps=rate_Bps, reduce_scatter_Bps=rate_Bps, all_reduce_Bps=rate_Bps)


class CodecRates(Value, frozen=True, kw_only=True):
    """Bytes of floats a second that a device encodes and decodes."""

    encode_Bps: float
    decode_Bps: float


class Coding(Value, frozen=True, kw_only=True):
    """Rates of codecs by type of the wire."""

    fp16: CodecRates
    bf16: CodecRates
    int8: CodecRates


class StageOverhead(Value, frozen=True):
    """Seconds of a stage of any training step, beside those of its tables, layers and transfers."""

    stage: str
    seconds: float


class MakingTimes(Value, frozen=True, kw_only=True):
    """Processor seconds of making a batch, for each column of its samples."""

    cores: int  # of a host
    read_s: float  # of all samples, on each rank
    encode_s: float  # of a rank's own samples

    def __post_init__(self) -> None:
        if self.cores < 1 or not 0 <= self.read_s < MAX_s or not 0 <= self.encode_s < MAX_s:
            raise SpecError(f"batches={self}", f"at least 1 core, and seconds from 0 to {MAX_s:g}")


class Kernels(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Networks for sets of tables, learned from measurements on a device."""

    lookup: SetNetwork
    update: SetNetwork  # backward and update
    error: float  # mean absolute relative error of their sum, on sets held out
    noise: float  # the same for a set that was measured again
    sets: int  # number of measured sets
    doubt: str = ""  # why the networks are not trusted; if set, rates predict instead


class Hardware(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Devices of one kind, and their links."""

    name: str
    source: str  # of the numbers
    device_bytes: int  # memory of a device for tables
    host_bytes: int = 0  # memory of a host for tables, shared by its devices
    disk_bytes: int = 0  # of a host
    device_Bps: float  # gathering rows from a device's memory
    cache_Bps: float  # gathering rows from its cache
    cache_bytes: int
    host_Bps: float = 12e9  # each device, from its host's memory
    disk_reads_s: float = 50e3  # random reads of 4 KiB a second, of a host's disks; assumed unless measured
    disk_write_Bps: float = 1e9  # long writes to a host's disks; assumed unless measured
    launch_s: float  # start of a fused operator, forward or backward
    forward_issue_s: float  # seconds of a lookup of up to 128 columns if nothing else limited it
    backward_issue_s: float
    id_bytes: int = 8  # of an id on links; 0 leaves ids out
    flops: float = 1e12  # per second, in dense layers
    host: LinkRates
    network: LinkRates
    uplink: LinkRates | None = None  # of each device, if all of a group send to other groups; None takes `network`
    coding: Coding | None = None  # None assumes device_Bps for 16 bits, and half of it for int8
    kernels: Kernels | None = None  # networks that predict instead of rates, if measured
    exchanges: Exchanges | None = None
    linears: LinearTimes | None = None  # None estimates dense layers by `flops`
    sums: SumTimes | None = None  # of dense gradients inside a host; None takes the rates of all-reduces
    cpu_s_per_byte: float = 0.0  # computation lost to a byte sent or received: on CPUs
    overheads: tuple[StageOverhead, ...] = ()  # of any step, beside its tables, layers and transfers; empty if unknown
    batches: MakingTimes | None = None  # made by the processors of ranks, beside steps; None counts no time
    copies_inside: bool = False  # ranks of a host share memory: a transfer inside it is copies, by the ranks themselves

    def __post_init__(self) -> None:
        positive = ("device_Bps", "cache_Bps", "host_Bps", "disk_reads_s", "disk_write_Bps", "flops")
        rates = [(name, getattr(self, name)) for name in positive]
        for link in LINKS:
            rates += [(f"{link}.{field}", getattr(self.link(link), field)) for field in LinkRates.__struct_fields__]
        for kind in Coding.__struct_fields__ if self.coding else ():
            rates += [(f"coding.{kind}.{k}", v) for k, v in structs.asdict(getattr(self.coding, kind)).items()]
        for name, value in rates:
            if value < 0 or (value == 0 and not name.endswith("latency_s")):
                raise SpecError(f"hardware {self.name!r}: {name}={value}", "more than 0")
        for name in ("device_bytes", "host_bytes", "disk_bytes", "cache_bytes", "id_bytes", "cpu_s_per_byte", *SECONDS):
            if getattr(self, name) < 0:
                raise SpecError(f"hardware {self.name!r}: {name}={getattr(self, name)}", "0 or more")
        for overhead in self.overheads:
            if not 0 <= overhead.seconds < MAX_s:
                raise SpecError(
                    f"hardware {self.name!r}: overheads of {overhead.stage!r} are {overhead.seconds} s",
                    f"0 or more, and less than {MAX_s:g}",
                )
        limits = dict.fromkeys(("device_bytes", "host_bytes", "disk_bytes", "cache_bytes"), MAX_BYTES)
        check_max(f"hardware {self.name!r}: ", self, **limits, id_bytes=1 << 20)

    def link(self, name: Link) -> LinkRates:
        """Rates between devices of one host, of two hosts, or of two groups."""
        match name:
            case "host":
                return self.host
            case "network":
                return self.network
            case "uplink":
                return self.uplink or self.network

    def slowest_link(self, topology: Topology) -> LinkRates:
        """The links of the widest class in use, which bound a collective of all ranks."""
        return self.link(topology.links[-1] if topology.links else "host")

    def coding_s(self, kind: WireType | FarType) -> float:
        """Seconds to encode a float at its sender and decode it at its receiver."""
        facts = kind.facts
        if facts.exact:
            return 0.0
        usual_Bps = self.device_Bps / 2 if facts.coded_as == "int8" else self.device_Bps
        usual = CodecRates(encode_Bps=usual_Bps, decode_Bps=usual_Bps)
        rates = usual if self.coding is None else getattr(self.coding, facts.coded_as)
        return facts.coding * (FLOAT_bytes * (1 / rates.encode_Bps + 1 / rates.decode_Bps))

    def to_json(self) -> str:
        text = msgspec.json.format(msgspec.json.encode(self), indent=2).decode()
        return NUMBERS.sub(lambda match: " ".join(match[0].split()), text)  # a row of a network is one line


class Machine(Value, frozen=True):
    """Hosts with equal devices."""

    topology: Topology
    hardware: Hardware

    @property
    def memory_bytes(self) -> tuple[int, int, int]:
        """Bytes of each rank by tier: its device, and its share of host memory and disks."""
        devices = self.topology.devices
        return self.hardware.device_bytes, self.hardware.host_bytes // devices, self.hardware.disk_bytes // devices


_A100_LIKE = Hardware(
    name="a100-like",
    source="round figures for comparing planners, near an A100 of 40 GB with 25 GB/s between devices; disks assumed;"
    " not measured",
    device_bytes=36 * GiB,
    device_Bps=1.35e12,
    cache_Bps=4e12,
    cache_bytes=40 << 20,
    host_Bps=20e9,
    launch_s=15e-6,
    forward_issue_s=0.1e-9,
    backward_issue_s=0.2e-9,
    id_bytes=0,
    flops=100e12,
    host=_equal_rates(25e9),
    network=_equal_rates(25e9),
)
_H100_LIKE = msgspec.structs.replace(
    _A100_LIKE,
    name="h100-like",
    source="data sheet of an H100 SXM of 80 GB, at the shares usually reached; disks assumed; copies on the device"
    " (3.0 TB/s) and from the host (55 GB/s) agree with it, the rest is not measured",
    device_bytes=72 * GiB,
    host_bytes=int(1.5e12),
    device_Bps=2.8e12,
    cache_Bps=7e12,
    cache_bytes=50 << 20,
    host_Bps=45e9,
    launch_s=10e-6,
    forward_issue_s=0.06e-9,
    backward_issue_s=0.12e-9,
    id_bytes=8,
    flops=400e12,
    host=_equal_rates(350e9, 10e-6),
    network=_equal_rates(40e9, 15e-6),
)
_PRESETS = {
    "a100-like": _A100_LIKE,
    "zionex": msgspec.structs.replace(
        _A100_LIKE,
        name="zionex",
        source="rates published for hosts of 8 A100 of 40 GB with 1.5 TB of memory; disks assumed; not measured here",
        host_bytes=int(1.5e12),
        device_Bps=1.3e12,
        id_bytes=8,
        flops=110e12,
        host=_equal_rates(200e9, 10e-6),
        # 60 GB/s of an all-reduce are published as bytes over time, on 128 devices: rings cross each host's 8 adapters.
        network=LinkRates(latency_s=20e-6, all_to_all_Bps=7e9, reduce_scatter_Bps=119e9, all_reduce_Bps=119e9),
    ),
    "h100-like": _H100_LIKE,
    "a100-80gb-like": msgspec.structs.replace(
        _H100_LIKE,
        name="a100-80gb-like",
        source="data sheet of an A100 SXM of 80 GB (2.04 TB/s, NVLink of 600 GB/s), shares as h100-like; not measured",
        device_Bps=1.7e12,
        cache_Bps=4e12,
        cache_bytes=40 << 20,
        host_Bps=20e9,
        launch_s=15e-6,
        forward_issue_s=0.1e-9,
        backward_issue_s=0.2e-9,
        flops=130e12,
        host=_equal_rates(230e9, 10e-6),
        network=_equal_rates(20e9, 15e-6),
    ),
    "h200-like": msgspec.structs.replace(
        _H100_LIKE,
        name="h200-like",
        source="data sheet of an H200 SXM (141 GB, 4.8 TB/s, NVLink of 900 GB/s), shares as h100-like; not measured",
        device_bytes=126 * GiB,
        device_Bps=4.0e12,
    ),
    "mi300x-like": msgspec.structs.replace(
        _H100_LIKE,
        name="mi300x-like",
        source="data sheet of an MI300X (192 GB, 5.3 TB/s, links of 896 GB/s), shares as h100-like; not measured",
        device_bytes=170 * GiB,
        device_Bps=4.4e12,
        cache_Bps=11e12,
        cache_bytes=256 << 20,
        host=_equal_rates(340e9, 10e-6),
    ),
    "cpu": Hardware(
        name="cpu",
        source="round figures for processes of a server without GPUs, 1 to 4 cores each; disks assumed; not measured",
        device_bytes=16 * GiB,
        device_Bps=8e9,
        cache_Bps=40e9,
        cache_bytes=16 << 20,
        host_Bps=8e9,
        launch_s=50e-6,
        forward_issue_s=10e-9,
        backward_issue_s=25e-9,
        flops=100e9,
        host=_equal_rates(2e9, 50e-6),
        network=_equal_rates(1e9, 100e-6),
    ),
}
PROFILE_FOLDER = Path(__file__).parent / "profiles"  # measured by `rowwise calibrate`
MEASURED = tuple(sorted(path.stem for path in PROFILE_FOLDER.glob("*.json")))
PRESETS = (*_PRESETS, *MEASURED)


@functools.cache
def hardware_named(name: str) -> Hardware:
    """A preset, or a measured profile that comes with the package."""
    if name not in PRESETS:
        raise SpecError(f"hardware {name!r}: no such preset", f"one of {', '.join(PRESETS)}, or a JSON file")
    return _PRESETS[name] if name in _PRESETS else read_hardware((PROFILE_FOLDER / f"{name}.json").read_bytes())


def read_hardware(text: str | bytes) -> Hardware:
    return parse_json(text, Hardware, "a hardware profile")
