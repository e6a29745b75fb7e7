"""Fits a hardware profile to measurements: networks and rates that predict them, and the quality of both.

Errors are those on sets that are held out. The noise is the error of a perfect prediction: one measurement as a
prediction of another of the same set, divided by the square root of two, as both err.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from msgspec import structs

from rowwise.base.errors import SpecError
from rowwise.base.quantity import round_digits
from rowwise.base.records import ModelError, ProfileQuality
from rowwise.planning.calibrate.dense_times import DenseTimes
from rowwise.planning.calibrate.disk import DiskRates, ROW_bytes
from rowwise.planning.calibrate.drift import estimate_slowness
from rowwise.planning.calibrate.fit_links import FittedLinks, fit_links
from rowwise.planning.calibrate.fit_rates import fit_rates
from rowwise.planning.calibrate.samples import LinkSample, Sample, SetSample
from rowwise.planning.calibrate.set_arrays import MeasuredSets, stack_sets
from rowwise.planning.calibrate.train_exchange import train_exchanges
from rowwise.planning.calibrate.train_network import (
    NetworkShape,
    kendall_tau,
    mean_relative_error,
    predict_s,
    train_network,
)
from rowwise.planning.calibrate.trust import MAX_WAITED, find_doubts, select_undisturbed
from rowwise.planning.calibrate.wire_costs import WireShares, fit_wire_costs
from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.exchange import Exchanges
from rowwise.planning.perf.hardware import Coding, Hardware, Kernels, hardware_named
from rowwise.planning.perf.learned import STAGES
from rowwise.planning.perf.network import SetNetwork
from rowwise.planning.perf.roofline import Roofline
from rowwise.tables.spec import Topology, Value

MIN_SETS = 60  # sets that learning needs
HELD_OUT = 7  # every seventh set is held out
BOUNDED_NETWORKS, FREE_NETWORKS = "networks that keep bounds", "networks as published"
FITTED_ROOFLINE = "roofline of fitted rates"
REMEDY = "plans are made by the roofline of fitted rates; measure again into a new folder while nothing else runs"
DRIFT_SHAPE = NetworkShape(steps=800)
MIN_STEPS = 500  # of training; small numbers of sets need no more
SHAPES = {
    BOUNDED_NETWORKS: NetworkShape(),
    FREE_NETWORKS: NetworkShape(form="published", bounded=False, hidden=128, hinges=64),
}


class MachineDescription(Value, frozen=True, kw_only=True):
    """The measured machine, as its profile describes it."""

    name: str
    machine: str  # processor, cores, versions
    device: str
    world: int
    threads: int  # of each rank
    device_bytes: int
    host_bytes: int = 0
    cache_bytes: int
    disk: DiskRates | None = None
    disk_bytes: int = 0
    coding: Coding | None = None
    dense: DenseTimes | None = None  # None if not measured
    copies_inside: bool = False  # whether ranks exchanged through shared memory
    narrow: tuple[WireShares, ...] = ()  # added cost of narrow wires; empty if not measured


@dataclass(frozen=True, slots=True)
class FittedProfile:
    """A profile with its quality."""

    hardware: Hardware
    quality: ProfileQuality

    def lines(self) -> list[str]:
        """Counts, errors and doubts of the profile, one line each."""
        quality = self.quality
        lines = [f"{quality.sets} sets of tables, {quality.held_out} of them held out; {quality.links} exchanges"]
        lines += [
            f"{row.model}: error {row.error:.1%} ({row.raw_error:.1%} with drift), rank correlation {row.tau:.3f}"
            for row in quality.errors
        ]
        noise = f"{quality.noise:.1%} ({quality.raw_noise:.1%} with drift), from {quality.again} sets measured twice"
        lines.append(f"noise of a measurement: {noise}; the machine's speed varied by {quality.drift:.1%}")
        if quality.links_error is not None:
            lines.append(
                f"exchanges of ranks that begin together, by latency and rates: error {quality.links_error:.1%}"
            )
        if quality.networks_error is not None:
            lines.append(f"exchanges of all ranks, by networks: error {quality.networks_error:.1%}")
        if quality.doubts:
            lines.append(f"NOT TO BE TRUSTED: {'; '.join(quality.doubts)}: {REMEDY}")
        return lines


ReportProgress = Callable[[str, float], None]


def fit_profile(
    samples: Sequence[Sample],
    machine: MachineDescription,
    report: ReportProgress = lambda what, share: None,
    shapes: Mapping[str, NetworkShape] = SHAPES,
) -> FittedProfile:
    """Fit a profile; the same measurements and shapes give the same one."""
    all_sets = [s for s in samples if isinstance(s, SetSample)]
    if len(all_sets) < MIN_SETS:
        raise SpecError(
            f"{len(all_sets)} sets of tables were measured", f"at least {MIN_SETS}", hint="measure for more minutes"
        )
    sets = select_undisturbed(all_sets, MIN_SETS)
    raw = stack_sets(sets)
    held_out_S = np.array([s.number % HELD_OUT == 0 for s in sets])
    drift_S = _estimate_drift(raw, sets, ~held_out_S, partial(report, "drift"))
    corrected = CorrectedSets(sets, raw, raw.without_drift(np.exp(drift_S)), held_out_S, drift_S)
    networks = {name: _train_stages(corrected, shape, report, name) for name, shape in shapes.items()}
    report("rates", 0.0)
    link_samples = [s for s in samples if isinstance(s, LinkSample)]
    links = fit_links(
        link_samples, fit_rates(corrected.steady.take(corrected.training_index), _preset_with_memory(machine))
    )
    exchanges = train_exchanges(link_samples, partial(report, "exchanges"))
    if exchanges is not None and machine.narrow:
        exchanges = fit_wire_costs(exchanges, machine.narrow, machine.world)
    quality = _assess_quality(corrected, networks, links, exchanges)
    kernels = Kernels(
        **networks[BOUNDED_NETWORKS],
        error=quality.errors[0].error,
        noise=quality.noise,
        sets=len(sets),
        doubt="; ".join(quality.doubts),
    )
    learned = {"kernels": kernels, "exchanges": exchanges, "source": _describe_source(machine, quality)}
    return FittedProfile(structs.replace(links.hardware, **learned), quality)


@dataclass(frozen=True, slots=True)
class CorrectedSets:
    """Sets as measured, and with the drift removed; some are held out."""

    sets: Sequence[SetSample]
    raw: MeasuredSets
    steady: MeasuredSets  # with the drift removed
    held_out_S: np.ndarray  # mask
    drift_S: Floats  # log of the slowdown of each set

    @property
    def training_index(self) -> np.ndarray:
        return np.flatnonzero(~self.held_out_S)


def _assess_quality(
    corrected: CorrectedSets,
    networks: dict[str, dict[str, SetNetwork]],
    links: FittedLinks,
    exchanges: Exchanges | None,
) -> ProfileQuality:
    sets, raw, steady = corrected.sets, corrected.raw, corrected.steady
    held_out = np.flatnonzero(corrected.held_out_S)
    by_stage = {name: _predict_stages(steady, held_out, stage_networks) for name, stage_networks in networks.items()}
    predicted: dict[str, Floats] = {name: np.sum(list(stages.values()), axis=0) for name, stages in by_stage.items()}
    predicted[FITTED_ROOFLINE] = _predict_by_roofline(links.hardware, steady, held_out)
    truth_S, raw_S = steady.sets.seconds_S[held_out], raw.sets.seconds_S[held_out]
    errors = tuple(_model_error(name, p, truth_S, raw_S) for name, p in predicted.items())
    noise, drift = estimate_noise(sets, corrected.drift_S), float(corrected.drift_S.std())
    disturbed = sum(s.waited > MAX_WAITED for s in sets) / len(sets)
    return ProfileQuality(
        sets=len(sets),
        held_out=len(held_out),
        again=sum(s.again for s in sets),
        noise=noise,
        raw_noise=estimate_noise(sets, np.zeros(len(sets))),
        drift=drift,
        errors=errors,
        links=links.count,
        links_error=links.error,
        networks_error=None if exchanges is None else exchanges.error,
        disturbed=disturbed,
        doubts=find_doubts(disturbed=disturbed, tau=errors[0].tau, error=errors[0].error, noise=noise, drift=drift),
        predicted_s=tuple(predicted[BOUNDED_NETWORKS].tolist()),
        measured_s=tuple(truth_S.tolist()),
        stages={
            stage: _model_error(BOUNDED_NETWORKS, p, steady.stage_s[stage][held_out], raw.stage_s[stage][held_out])
            for stage, p in by_stage[BOUNDED_NETWORKS].items()
        },
    )


def _model_error(name: str, predicted_S: Floats, steady_S: Floats, raw_S: Floats) -> ModelError:
    errors = mean_relative_error(predicted_S, steady_S), mean_relative_error(predicted_S, raw_S)
    return ModelError(model=name, error=errors[0], tau=kendall_tau(predicted_S, steady_S), raw_error=errors[1])


def _estimate_drift(
    raw: MeasuredSets, sets: Sequence[SetSample], known_S: np.ndarray, report: Callable[[float], None]
) -> Floats:
    """The drift: the common part of the residuals of neighbours, by a first network."""
    network = train_network(raw.all_stages().take(np.flatnonzero(known_S)), DRIFT_SHAPE, report)
    residual_S = np.log(raw.sets.seconds_S / predict_s(network, raw.all_stages()))
    return estimate_slowness(residual_S, np.array([s.rank for s in sets]), known_S)


def count_steps(shape: NetworkShape, training: int) -> int:
    """Steps of a training on `training` sets."""
    return min(shape.steps, max(MIN_STEPS, training))


def _train_stages(
    corrected: CorrectedSets, shape: NetworkShape, report: ReportProgress, name: str
) -> dict[str, SetNetwork]:
    sets, training = corrected.steady, corrected.training_index
    shortened = replace(shape, steps=count_steps(shape, len(training)))
    return {
        stage: train_network(sets.of_stage(stage).take(training), shortened, partial(report, f"{name}, {stage}"))
        for stage in STAGES
    }


def _predict_stages(measured: MeasuredSets, index_S: np.ndarray, networks: dict[str, SetNetwork]) -> dict[str, Floats]:
    return {stage: predict_s(network, measured.of_stage(stage).take(index_S)) for stage, network in networks.items()}


def _predict_by_roofline(hardware: Hardware, measured: MeasuredSets, index_S: np.ndarray) -> Floats:
    model = Roofline(hardware, Topology())
    return np.array([float(model.phi(model.loads(*measured.shards[s]).sum(0))) for s in index_S])


def estimate_noise(sets: Sequence[SetSample], drift_S: Floats) -> float:
    """The error of a perfect prediction, from sets measured twice; 0 if there are none."""
    seconds_S = np.array([s.lookup_s + s.update_s for s in sets]) / np.exp(drift_S)
    first = {(s.rank, s.number): index for index, s in enumerate(sets) if not s.again}
    pairs = [(first[s.rank, s.number], i) for i, s in enumerate(sets) if s.again and (s.rank, s.number) in first]
    if not pairs:
        return 0.0
    first_s, second_s = seconds_S[np.array(pairs)].T
    return float(np.mean(np.abs(first_s - second_s) / second_s)) / math.sqrt(2)


def _preset_with_memory(machine: MachineDescription) -> Hardware:
    """The preset that is nearest to the machine, with the machine's memory."""
    preset = hardware_named("cpu" if machine.device == "cpu" else "h100-like")
    if machine.disk is not None and not machine.disk.refused:
        reads_s = machine.disk.reads_s[ROW_bytes]
        preset = structs.replace(preset, disk_reads_s=reads_s, disk_write_Bps=machine.disk.write_Bps)
    return structs.replace(
        preset,
        name=machine.name,
        device_bytes=machine.device_bytes,
        host_bytes=machine.host_bytes,
        disk_bytes=machine.disk_bytes,
        cache_bytes=machine.cache_bytes,
        coding=machine.coding,
        flops=round_digits(machine.dense.linears.flops) if machine.dense else preset.flops,
        linears=machine.dense and machine.dense.linears,
        sums=machine.dense and machine.dense.sums,
        cpu_s_per_byte=machine.dense.cpu_s_per_byte if machine.dense else 0.0,
        copies_inside=machine.copies_inside,
    )


def _describe_source(machine: MachineDescription, quality: ProfileQuality) -> str:
    processes = f"{machine.world} process{'es' * (machine.world != 1)}"
    ranks = f"{processes} of {machine.threads} threads on {machine.device}"
    amount = f"{quality.sets} sets of tables and {quality.links} exchanges"
    rest = [*(() if machine.disk and not machine.disk.refused else ("disks",)), "host memory"]
    rest += [] if machine.dense else ["dense layers"]
    listed = rest[0] if len(rest) == 1 else f"{', '.join(rest[:-1])} and {rest[-1]}"
    return (
        f"measured on {machine.machine}, {ranks}: {amount}; {listed} {'is' if len(rest) == 1 else 'are'} not measured"
    )
