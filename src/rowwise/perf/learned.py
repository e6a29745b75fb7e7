"""The cost model of a machine that was measured: set networks for its kernels, rates for its links.

Two networks, one for the lookup and one for backward with update; a rank's operators take the sum of both. Rows of
lower tiers were not measured, and add what the roofline says. Known limits: kinds of rows and links that the machine
did not have.
"""

from dataclasses import dataclass

import numpy as np

from rowwise.perf.access import Curves, Floats
from rowwise.perf.cost import CostModel, CostStage, Hinges, Phi, Shards
from rowwise.perf.features import features, work
from rowwise.perf.hardware import Hardware
from rowwise.perf.network import SetNetwork, block_diagonal
from rowwise.perf.roofline import Roofline
from rowwise.spec import FLOATS, Topology, Wire

STAGES = ("lookup", "update")
BELOW = len(STAGES)  # loads of lower tiers, the first ones


@dataclass(frozen=True, slots=True)
class LearnedModel:
    """A model whose networks are part of a hardware profile."""

    hardware: Hardware
    topology: Topology
    networks: tuple[SetNetwork, ...]  # in the order of STAGES
    phi: Phi
    stages: tuple[CostStage, ...]
    beside: Roofline  # for links and lower tiers

    @classmethod
    def of(cls, hardware: Hardware, topology: Topology, wire: Wire = FLOATS) -> "LearnedModel":
        assert hardware.kernels is not None
        networks = (hardware.kernels.lookup, hardware.kernels.update)
        beside = Roofline(hardware, topology, wire)
        assert len({network.form for network in networks}) == 1
        parts = [hinges for network in networks if (hinges := network.phi.hinges)]
        hinges = Hinges(
            block_diagonal([np.zeros((0, BELOW)), *(part.weights_HK for part in parts)]),
            np.concatenate([part.offsets_H for part in parts]),
            np.concatenate([part.outs_H for part in parts]),
        )
        constant = sum(n.constant_s for n in networks) + beside.phi.constant - 2 * hardware.launch_s
        begins = np.cumsum([BELOW, *(n.width for n in networks)]).tolist()
        stages = tuple(
            CostStage(name, (index, *range(begins[index], begins[index + 1])), networks[index].constant_s)
            for index, name in enumerate(STAGES)
        )
        scaled = [(begins[i + 1], network.power) for i, network in enumerate(networks) if network.is_scaled]
        ends, powers = zip((BELOW, 1.0), *scaled, strict=True)
        phi = Phi(constant=constant, ends=ends, powers=powers, hinges=hinges)
        return cls(hardware, topology, networks, phi, stages, beside)

    @property
    def wire(self) -> Wire:
        return self.beside.wire

    @property
    def name(self) -> str:
        return f"networks learned on {self.hardware.name}"

    def on(self, topology: Topology) -> "LearnedModel":
        """By the same networks, with the links of more or fewer devices."""
        return LearnedModel.of(self.hardware, topology, self.wire)

    def loads(self, shards: Shards, curves: Curves) -> Floats:
        """Seconds of lower tiers, and what each network makes of a piece."""
        seen_NF = features(shards, curves)
        below = self.beside.below_s(shards, curves)
        made = [
            network.psi(seen_NF, work(stage, shards, curves))
            for stage, network in zip(STAGES, self.networks, strict=True)
        ]
        return np.concatenate([np.stack(below, axis=1), *made], axis=1)

    def links_s(self, shards: Shards, curves: Curves) -> Floats:
        return self.beside.links_s(shards, curves)


def model_of(hardware: Hardware, topology: Topology, wire: Wire = FLOATS) -> CostModel:
    """What a profile says costs are: its networks if it has some that can be trusted, else a roofline of its rates."""
    trusted = hardware.kernels is not None and not hardware.kernels.doubt
    return LearnedModel.of(hardware, topology, wire) if trusted else Roofline(hardware, topology, wire)


def doubts_of(hardware: Hardware) -> tuple[str, ...]:
    """One line where costs are by rates although a profile has networks."""
    if hardware.kernels is None or not hardware.kernels.doubt:
        return ()
    why = f"the networks of {hardware.name} are not to be trusted: {hardware.kernels.doubt}"
    return (f"costs are a roofline of fitted rates, because {why}",)
