"""Chooses wire types link by link: the least lossy with which a step takes at most 2 % longer than with the fastest.

A link that limits nothing keeps floats, as narrower types save nothing there. Types that are tried, the least lossy
first, are those whose quality was measured to be within the noise of seeds: see the table in docs/tutorials/wires.md.
"""

from collections.abc import Callable, Iterable
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from msgspec import structs

from rowwise.base.quantity import format_duration
from rowwise.tables.spec import Codecs, Topology, Wire, WireType

MIN_GAIN = 1.005
SLACK = 1.02  # of the seconds of a step
VECTORS = (WireType.FP32, WireType.FP16, WireType.INT8)
SUMS = ("fp32", "bf16", "int8", "int4", "topk:1%")  # bf16, as sums have no loss scale that keeps fp16 in its range
Predict = Callable[[Wire], float]
Change = dict[str, Any]  # fields of a wire and their new values


class WireChoice(NamedTuple):
    """The wire of a run, with the predicted seconds of a step."""

    wire: Wire
    step_s: float
    floats_s: float  # with floats on all links, and one sum over all ranks
    topology: Topology

    def text(self) -> str:
        """One line: the types, and how much faster a step is."""
        far = "" if self.wire.far is None else f"in two levels, {self.wire.far} between them"
        gain = self.floats_s / self.step_s
        return "; ".join(
            (
                f"vectors {self.wire.in_words(self.topology)}",
                f"dense sums {far or self.wire.dense}",
                f"predicted {format_duration(self.step_s)} a step",
                f"{gain:.2f}x as fast as floats" if gain >= MIN_GAIN else "narrower types gain nothing",
            )
        )


def choose_wire(topology: Topology, predict: Predict, *, sums: bool = True) -> WireChoice:
    """The wire of a run; `predict` gives the seconds of a step. Without `sums`, dense gradients keep their wire."""
    predict = cache(predict)  # ladders meet the same wires again
    ladders: list[list[tuple[Change, ...]]] = [
        [({link: Codecs(kind, kind)},) for kind in VECTORS] for link in topology.links
    ]
    ladders += [[_ways_to_sum(kind) for kind in SUMS]] if sums else []
    floats_s = predict(Wire())
    wire = Wire()
    for ladder in ladders:
        wire = _fastest(wire, chain.from_iterable(ladder), predict)
    limit_s = SLACK * predict(wire)
    for ladder in ladders:
        candidates = (_fastest(wire, ways, predict) for ways in ladder)
        wire = next((candidate for candidate in candidates if predict(candidate) <= limit_s), wire)
    return WireChoice(wire, predict(wire), floats_s, topology)


def fastest_sums(wire: Wire, predict: Predict) -> Wire:
    """The wire with sums of dense gradients in one level or two, whichever is faster, in their present type."""
    return _fastest(wire, _ways_to_sum(wire.far or wire.dense, feedback=wire.error_feedback), predict)


def _ways_to_sum(kind: str, *, feedback: bool = True) -> tuple[Change, ...]:
    """One sum over all ranks, if its type allows it; and a sum in two levels."""
    feedback &= kind != WireType.FP32
    near: Change = {"dense": WireType.FP32, "far": kind, "error_feedback": feedback}
    if kind not in list(WireType):
        return (near,)
    return {"dense": WireType(kind), "far": None, "error_feedback": feedback}, near


def _fastest(wire: Wire, ways: Iterable[Change], predict: Predict) -> Wire:
    """The wire with the fastest of these changes; ties go to the first."""
    return min((structs.replace(wire, **changes) for changes in ways), key=predict)
