"""The cost model of a measured machine: set networks for its kernels, rates for its links.

One network predicts the lookup, one backward with update; a rank's operators take the sum of both. Rows of lower tiers
are not measured; the roofline estimates them. See [Note: Cost]. Not supported: row types and links that the machine
was not measured with.
"""

from dataclasses import dataclass

import numpy as np

from rowwise.base.errors import SpecError
from rowwise.planning.perf.access import Curves, Floats
from rowwise.planning.perf.cost import CostModel, CostStage, Hinges, Phi, Shards
from rowwise.planning.perf.features import FEATURES, WORK, nominal_work, piece_features
from rowwise.planning.perf.hardware import MEASURED, Hardware
from rowwise.planning.perf.network import SetNetwork, block_diagonal
from rowwise.planning.perf.roofline import Roofline
from rowwise.tables.spec import FLOATS, Topology, Wire

STAGES = ("lookup", "update")
LOWER_TIER_LOADS = len(STAGES)  # the first loads are seconds of lower tiers, one for each stage


@dataclass(frozen=True, slots=True)
class LearnedModel:
    """A cost model whose networks are part of a hardware profile."""

    hardware: Hardware
    topology: Topology
    networks: tuple[SetNetwork, ...]  # in the order of STAGES
    phi: Phi
    stages: tuple[CostStage, ...]
    roofline: Roofline  # for links and lower tiers

    @classmethod
    def of(cls, hardware: Hardware, topology: Topology, wire: Wire = FLOATS) -> "LearnedModel":
        assert hardware.kernels is not None
        networks = (hardware.kernels.lookup, hardware.kernels.update)
        roofline = Roofline(hardware, topology, wire)
        for stage, network in zip(STAGES, networks, strict=True):
            fits = not network.is_scaled or network.width == WORK
            if len(network.mean) != FEATURES or not fits or network.form != networks[0].form:
                raise SpecError(
                    f"hardware {hardware.name!r}: kernels.{stage}",
                    f"{FEATURES} features, {WORK} kinds of work, and the form of the other network",
                )
        parts = [hinges for network in networks if (hinges := network.phi.hinges)]
        hinges = Hinges(
            block_diagonal([np.zeros((0, LOWER_TIER_LOADS)), *(part.weights_HK for part in parts)]),
            np.concatenate([part.offsets_H for part in parts]),
            np.concatenate([part.outs_H for part in parts]),
        )
        constant = sum(n.constant_s for n in networks) + roofline.phi.constant - 2 * hardware.launch_s
        begins = np.cumsum([LOWER_TIER_LOADS, *(n.width for n in networks)]).tolist()
        stages = tuple(
            CostStage(name, (index, *range(begins[index], begins[index + 1])), networks[index].constant_s)
            for index, name in enumerate(STAGES)
        )
        scaled = [(begins[i + 1], network.power) for i, network in enumerate(networks) if network.is_scaled]
        ends, powers = zip((LOWER_TIER_LOADS, 1.0), *scaled, strict=True)
        phi = Phi(constant=constant, ends=ends, powers=powers, hinges=hinges)
        return cls(hardware, topology, networks, phi, stages, roofline)

    @property
    def wire(self) -> Wire:
        return self.roofline.wire

    @property
    def name(self) -> str:
        return f"networks learned on {self.hardware.name}"

    @property
    def lower_tiers(self) -> tuple[int, int]:
        return 0, 1

    def on(self, topology: Topology) -> "LearnedModel":
        return LearnedModel.of(self.hardware, topology, self.wire)

    def loads(self, shards: Shards, curves: Curves) -> Floats:
        """Seconds of lower tiers, then the outputs of each network for a piece."""
        features_NF = piece_features(shards, curves)
        below = self.roofline.lower_tier_s(shards, curves)
        outputs = [
            network.psi(features_NF, nominal_work(stage, shards, curves))
            for stage, network in zip(STAGES, self.networks, strict=True)
        ]
        return np.concatenate([np.stack(below, axis=1), *outputs], axis=1)

    def links_s(self, shards: Shards, curves: Curves) -> Floats:
        return self.roofline.links_s(shards, curves)


def model_of(hardware: Hardware, topology: Topology, wire: Wire = FLOATS) -> CostModel:
    """The cost model of a profile: its networks if it has trusted ones, else a roofline of its rates."""
    trusted = hardware.kernels is not None and not hardware.kernels.doubt
    return LearnedModel.of(hardware, topology, wire) if trusted else Roofline(hardware, topology, wire)


def profile_warnings(hardware: Hardware) -> tuple[str, ...]:
    """One line if costs are by rates although a profile has networks."""
    if hardware.kernels is None or not hardware.kernels.doubt:
        return ()
    reason = f"the networks of {hardware.name} are not to be trusted: {hardware.kernels.doubt}"
    return (f"costs are a roofline of fitted rates, because {reason}",)


def unmeasured_note(hardware: Hardware, model: CostModel) -> tuple[str, ...]:
    """One line if a method that was published with learned costs runs on a roofline, as there are no networks."""
    if hardware.kernels is not None or not isinstance(model, Roofline):
        return ()
    known = ", ".join(MEASURED)
    return (
        f"costs are the {model.name}, as no networks were trained for it: {known} and profiles of rowwise calibrate "
        "have networks",
    )
