"""From measurements to a hardware profile: networks and rates that predict them, and how well they do.

A share of the sets is never learned from; what is said of errors is said of those. The noise is what a perfect
prediction would still be wrong by: the error of one measurement as a prediction of another of the same set, over the
square root of two, as both of them err.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from msgspec import structs

from rowwise.calibrate.drift import slowness
from rowwise.calibrate.fit_links import FittedLinks, fit_links
from rowwise.calibrate.fit_rates import fit_rates
from rowwise.calibrate.measured import MeasuredSets, measured_of
from rowwise.calibrate.narrow import WireShares, fit_narrow
from rowwise.calibrate.samples import LinkSample, Sample, SetSample
from rowwise.calibrate.train_exchange import train_exchanges
from rowwise.calibrate.train_network import NetworkShape, error_of, predicted_s, tau_of, train_network
from rowwise.calibrate.trust import WAITED, reasons, undisturbed_sets
from rowwise.errors import SpecError
from rowwise.perf.access import Floats
from rowwise.perf.exchange import Exchanges
from rowwise.perf.hardware import Coding, Hardware, Kernels, hardware_named
from rowwise.perf.learned import STAGES
from rowwise.perf.network import SetNetwork
from rowwise.perf.roofline import Roofline
from rowwise.spec import Topology, Value

FEWEST = 60  # sets, below which nothing is learned
HELD_OUT = 7  # every seventh set is never learned from
BOUNDED, FREE = "networks that keep bounds", "networks as published"
FITTED = "roofline of fitted rates"
OUT = "plans are made by the roofline of fitted rates; measure again into a new folder while nothing else runs"
FIRST = NetworkShape(steps=800)
FEWEST_STEPS = 500  # of training; few sets need no more
SHAPES = {BOUNDED: NetworkShape(), FREE: NetworkShape(form="published", bounded=False, hidden=128, hinges=64)}


class MachineDescription(Value, frozen=True, kw_only=True):
    """The machine that was measured, as the profile will name it."""

    name: str
    machine: str  # processor, cores, versions
    device: str
    world: int
    threads: int  # of each rank
    device_bytes: int
    host_bytes: int = 0
    cache_bytes: int
    coding: Coding | None = None
    narrow: tuple[WireShares, ...] = ()  # what wires add to exchanges; none: not measured


class ModelError(Value, frozen=True, kw_only=True):
    """The error of a cost model on sets that it was not fitted to."""

    model: str
    error: float  # mean absolute relative, with the machine's drift taken out; see `drift`
    tau: float  # Kendall's, of the same
    raw_error: float  # of measurements as they are


class ProfileQuality(Value, frozen=True, kw_only=True):
    """The accuracy of a profile on held-out measurements."""

    sets: int
    held_out: int
    again: int  # sets that were measured twice
    noise: float  # with the drift taken out
    raw_noise: float
    drift: float  # deviation of the logarithm of the machine's speed
    errors: tuple[ModelError, ...]
    links: int  # exchanges that were measured
    links_error: float | None  # of rates, on exchanges that began together
    networks_error: float | None = None  # of the learned exchange, on all
    disturbed: float = 0.0  # share of the sets that waited for a processor
    doubts: tuple[str, ...] = ()  # why the networks are not to be trusted; none: they are
    predicted_s: tuple[float, ...]  # of each set that was held out
    measured_s: tuple[float, ...]  # with the drift taken out
    stages: dict[str, ModelError]


@dataclass(frozen=True, slots=True)
class FittedProfile:
    """A profile, and how good it is."""

    hardware: Hardware
    quality: ProfileQuality

    def lines(self) -> list[str]:
        quality = self.quality
        found = [f"{quality.sets} sets of tables, {quality.held_out} of them held out; {quality.links} exchanges"]
        found += [
            f"{one.model}: error {one.error:.1%} ({one.raw_error:.1%} with drift), rank correlation {one.tau:.3f}"
            for one in quality.errors
        ]
        noise = f"{quality.noise:.1%} ({quality.raw_noise:.1%} with drift), from {quality.again} sets measured twice"
        found.append(f"noise of a measurement: {noise}; the machine's speed varied by {quality.drift:.1%}")
        if quality.links_error is not None:
            found.append(
                f"exchanges of ranks that begin together, by latency and rates: error {quality.links_error:.1%}"
            )
        if quality.networks_error is not None:
            found.append(f"exchanges of all ranks, by networks: error {quality.networks_error:.1%}")
        if quality.doubts:
            found.append(f"NOT TO BE TRUSTED: {'; '.join(quality.doubts)}: {OUT}")
        return found


Tell = Callable[[str, float], None]


def fit_profile(
    samples: Sequence[Sample],
    about: MachineDescription,
    tell: Tell = lambda what, share: None,
    shapes: Mapping[str, NetworkShape] = SHAPES,
) -> FittedProfile:
    """The profile that these measurements say; the same one for the same measurements and shapes."""
    every = [s for s in samples if isinstance(s, SetSample)]
    if len(every) < FEWEST:
        raise SpecError(f"{len(every)} sets of tables were measured: want at least {FEWEST}; measure for more minutes")
    sets = undisturbed_sets(every, FEWEST)
    raw = measured_of(sets)
    held_S = np.array([s.number % HELD_OUT == 0 for s in sets])
    slow_S = _slowness(raw, sets, ~held_S, partial(tell, "drift"))
    told = CorrectedSets(sets, raw, raw.over(np.exp(slow_S)), held_S, slow_S)
    networks = {name: _trained(told, shape, tell, name) for name, shape in shapes.items()}
    tell("rates", 0.0)
    exchanged = [s for s in samples if isinstance(s, LinkSample)]
    links = fit_links(exchanged, fit_rates(told.steady.take(told.seen), _plain(about)))
    exchanges = train_exchanges(exchanged, partial(tell, "exchanges"))
    if exchanges is not None and about.narrow:
        exchanges = fit_narrow(exchanges, about.narrow, about.world)
    quality = _quality(told, networks, links, exchanges)
    kernels = Kernels(
        **networks[BOUNDED],
        error=quality.errors[0].error,
        noise=quality.noise,
        sets=len(sets),
        doubt="; ".join(quality.doubts),
    )
    learned = {"kernels": kernels, "exchanges": exchanges, "source": _source(about, quality)}
    return FittedProfile(structs.replace(links.hardware, **learned), quality)


@dataclass(frozen=True, slots=True)
class CorrectedSets:
    """Measured sets, with and without the drift of the machine, and which of them are held out."""

    sets: Sequence[SetSample]
    raw: MeasuredSets
    steady: MeasuredSets
    held_S: np.ndarray
    slow_S: Floats

    @property
    def seen(self) -> np.ndarray:
        return np.flatnonzero(~self.held_S)

    @property
    def kept(self) -> np.ndarray:
        return np.flatnonzero(self.held_S)


def _quality(
    told: CorrectedSets, networks: dict[str, dict[str, SetNetwork]], links: FittedLinks, exchanges: Exchanges | None
) -> ProfileQuality:
    kept, sets, raw, steady = told.kept, told.sets, told.raw, told.steady
    by_stage = {name: _predictions(steady, kept, found) for name, found in networks.items()}
    predicted = {name: _total(found) for name, found in by_stage.items()}
    predicted[FITTED] = _by_roofline(links.hardware, steady, kept)
    truth_S, raw_S = steady.sets.seconds_S[kept], raw.sets.seconds_S[kept]
    errors = tuple(_error(name, p, truth_S, raw_S) for name, p in predicted.items())
    noise, drift = noise_of(sets, told.slow_S), float(told.slow_S.std())
    disturbed = sum(one.waited > WAITED for one in sets) / len(sets)
    return ProfileQuality(
        sets=len(sets),
        held_out=len(kept),
        again=sum(s.again for s in sets),
        noise=noise,
        raw_noise=noise_of(sets, np.zeros(len(sets))),
        drift=drift,
        errors=errors,
        links=links.count,
        links_error=links.error,
        networks_error=None if exchanges is None else exchanges.error,
        disturbed=disturbed,
        doubts=reasons(disturbed=disturbed, tau=errors[0].tau, error=errors[0].error, noise=noise, drift=drift),
        predicted_s=tuple(predicted[BOUNDED].tolist()),
        measured_s=tuple(truth_S.tolist()),
        stages={
            stage: _error(BOUNDED, p, steady.stage_s[stage][kept], raw.stage_s[stage][kept])
            for stage, p in by_stage[BOUNDED].items()
        },
    )


def _error(name: str, predicted_S: Floats, steady_S: Floats, raw_S: Floats) -> ModelError:
    errors = error_of(predicted_S, steady_S), error_of(predicted_S, raw_S)
    return ModelError(model=name, error=errors[0], tau=tau_of(predicted_S, steady_S), raw_error=errors[1])


def _slowness(
    raw: MeasuredSets, sets: Sequence[SetSample], known_S: np.ndarray, tell: Callable[[float], None]
) -> Floats:
    """By a first network, whose residuals are the machine's drift where they are those of its neighbours, too."""
    network = train_network(raw.whole().take(np.flatnonzero(known_S)), FIRST, tell)
    residual_S = np.log(raw.sets.seconds_S / predicted_s(network, raw.whole()))
    return slowness(residual_S, np.array([s.rank for s in sets]), known_S)


def _trained(told: CorrectedSets, shape: NetworkShape, tell: Tell, name: str) -> dict[str, SetNetwork]:
    seen = told.seen
    enough = replace(shape, steps=min(shape.steps, max(FEWEST_STEPS, len(seen))))
    return {
        stage: train_network(told.steady.of(stage).take(seen), enough, partial(tell, f"{name}, {stage}"))
        for stage in STAGES
    }


def _predictions(measured: MeasuredSets, index_S: np.ndarray, networks: dict[str, SetNetwork]) -> dict[str, Floats]:
    return {stage: predicted_s(network, measured.of(stage).take(index_S)) for stage, network in networks.items()}


def _total(by_stage: dict[str, Floats]) -> Floats:
    return np.sum([by_stage[stage] for stage in STAGES], axis=0)


def _by_roofline(hardware: Hardware, measured: MeasuredSets, index_S: np.ndarray) -> Floats:
    model = Roofline(hardware, Topology())
    return np.array([float(model.phi(model.loads(*measured.shards[s]).sum(0))) for s in index_S])


def noise_of(sets: Sequence[SetSample], slow_S: Floats) -> float:
    """How far a perfect prediction would be off: what differs where a set was measured twice; 0 if none was."""
    taken_S = np.array([s.lookup_s + s.update_s for s in sets]) / np.exp(slow_S)
    first = {(s.rank, s.number): index for index, s in enumerate(sets) if not s.again}
    pairs = [(first[s.rank, s.number], i) for i, s in enumerate(sets) if s.again and (s.rank, s.number) in first]
    if not pairs:
        return 0.0
    one, two = taken_S[np.array(pairs)].T
    return float(np.mean(np.abs(one - two) / two)) / math.sqrt(2)


def _plain(about: MachineDescription) -> Hardware:
    """A preset with the memory that there is."""
    preset = hardware_named("cpu" if about.device == "cpu" else "h100-like")
    return structs.replace(
        preset,
        name=about.name,
        device_bytes=about.device_bytes,
        host_bytes=about.host_bytes,
        cache_bytes=about.cache_bytes,
        coding=about.coding,
    )


def _source(about: MachineDescription, quality: ProfileQuality) -> str:
    ranks = (
        f"{about.world} {'process' if about.world == 1 else 'processes'} of {about.threads} threads on {about.device}"
    )
    measured = f"{quality.sets} sets of tables and {quality.links} exchanges"
    return f"measured on {about.machine}, {ranks}: {measured}; disks, host memory and dense layers are not measured"
