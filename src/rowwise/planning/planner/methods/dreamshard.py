"""DreamShard: a learned policy that places whole tables one after another, and the learned costs that it uses.

[Note: DreamShard] Both networks see 21 features of a table (columns, rows, ids per sample, bytes, and how often rows
repeat). The cost network sums a vector for each table over the tables of a rank, and predicts from the sum seconds of
forward, links and backward. The policy places tables in falling order of predicted cost. Its inputs are each rank's
predicted costs before and after, and the sum of a second vector for each table there. Training samples from a softmax
over the ranks that have room; here the largest logit wins. No cost model is called on the way. Source: Zha et al. 2022,
with these changes, so that one policy serves any number of tables and ranks, and machines it was not trained for:

- Features are logarithms on one scale, not z-scores within a task, which lose the scale of costs.
- Vectors of tables are exponentials and heads predict costs as a multiple of their mean: twice the tables, twice the
  cost. The policy gets costs as shares of an even rank's.
- Predictions are scaled so that those of single tables add up to the cost model's, in each of the three parts: these
  factors differ most between machines.
- No table takes the last space for the largest later table, if that can be avoided.
- A piece of a table's columns is a table with fewer columns. Tasks to train on have such pieces.
- The policy's inputs include each rank's costs with the table, its fill, and how much is left to place. Beside its
  hidden layers there is a linear path, which starts as greedy placement by predicted cost.

Several features of a table count as one. As a method it also cuts columns, see `dreamshard_cuts`; as a start of the
search it places whole tables only. tools/train_dreamshard.py makes the weights.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from rowwise.base.errors import SpecError
from rowwise.base.textfile import decode_json, read_bytes
from rowwise.planning.perf.access import Curves, Floats
from rowwise.planning.perf.reuse import BINS, reuse_bins
from rowwise.planning.planner.problem import NO_UNIT, Index, Placement, PlacementProblem, PlanRequest
from rowwise.tables.spec import Value

Reals = NDArray[np.floating[Any]]  # 64 bits; 32 in training
SHIPPED = Path(__file__).with_name("dreamshard.json")
FEATURES = 4 + BINS
COSTS = 3  # forward, links, backward
INPUTS = 20  # numbers per rank that the policy gets
# Columns of INPUTS: costs with the table; excess of the step over that of the best rank; fill of memory with the table.
WITH, WORSE, FILL = slice(3, 6), 8, 11
HIDDEN, WIDTH, SUMS = 128, 64, 32  # as published: table networks, heads, vectors that are summed
LARGEST = 12.0  # logarithm of the largest entry of a table's vector
MAX_ITEMS = 256  # with more, a roll-out takes longer than annealing needs to make up for a worse start
EPSILON = 1e-12
FULL = 1 + 1e-13  # limit on sums of shares of memory: 1, and less than a byte for rounding

# (inputs, outputs) of each layer. The heads of the three predicted costs are one layer, side by side.
LAYERS: dict[str, tuple[int, int]] = {
    "table": (FEATURES, HIDDEN), "loads": (HIDDEN, SUMS),
    "heads": (SUMS + 1, COSTS * WIDTH), "costs": (COSTS, WIDTH),
    "kind": (FEATURES, HIDDEN), "kinds": (HIDDEN, SUMS),
    "seen": (INPUTS, WIDTH), "state": (WIDTH, SUMS), "join": (3 * SUMS, WIDTH), "logit": (WIDTH, 1),
    "straight": (INPUTS, 1),
}  # fmt: skip


class Layer(Value, frozen=True):
    """A weight matrix and a bias."""

    weight: tuple[tuple[float, ...], ...]
    bias: tuple[float, ...]


class PolicyFile(Value, frozen=True):
    """The file of weights: both networks, and how they were trained."""

    format: Literal["rowwise dreamshard 1"]
    trained: Mapping[str, str | int | float]  # pools, steps, seed
    unit_s: float  # seconds of a unit of the cost network
    mean: tuple[float, ...]  # of the features of training tables
    deviation: tuple[float, ...]
    layers: Mapping[str, Layer]


@dataclass(frozen=True, slots=True)
class Policy:
    """Both networks as arrays. Methods keep leading axes."""

    unit_s: float
    mean_F: Reals
    deviation_F: Reals
    layers: Mapping[str, tuple[Reals, Reals]]

    def normal(self, features_TF: Reals) -> Reals:
        """Features, normalised and clipped."""
        return np.clip((features_TF - self.mean_F) / self.deviation_F, -6.0, 6.0)

    def loads(self, normal_TF: Reals) -> Reals:
        return np.exp(np.minimum(self._linear("loads", self._relu("table", normal_TF)), LARGEST))

    def kinds(self, normal_TF: Reals) -> Reals:
        return self._linear("kinds", self._relu("kind", normal_TF))

    def costs(self, loads_NH: Reals) -> Reals:
        """Seconds (N, 3) of ranks with these sums of table vectors; 0 for an empty rank."""
        mean_N1 = loads_NH.mean(-1, keepdims=True)
        positive_N1 = np.maximum(mean_N1, EPSILON)
        hidden = self._relu("heads", np.concatenate([loads_NH / positive_N1, np.log(positive_N1)], axis=-1))
        weight_CW, bias_C = self.layers["costs"]
        out_NC = (hidden.reshape(*hidden.shape[:-1], COSTS, WIDTH) * weight_CW).sum(-1) + bias_C
        return self.unit_s * mean_N1 * np.logaddexp(0.0, out_NC)

    def logits(self, inputs_NS: Reals, rank_NH: Reals, table_NH: Reals) -> Reals:
        """A table's logit for each rank, from inputs, the sum of the rank's vectors, and the table's own vector."""
        state_NH = self._linear("state", self._relu("seen", inputs_NS))
        joined = np.maximum(np.concatenate([state_NH, rank_NH, table_NH], axis=-1), 0.0)
        out_N1 = self._linear("logit", self._relu("join", joined)) + self._linear("straight", inputs_NS)
        return out_N1[..., 0]

    def _linear(self, name: str, x: Reals) -> Reals:
        weight, bias = self.layers[name]
        return x @ weight + bias

    def _relu(self, name: str, x: Reals) -> Reals:
        return np.maximum(self._linear(name, x), 0.0)


def policy_of(saved: PolicyFile, source: str) -> Policy:
    """The arrays of a file. Raises `SpecError` where shapes are wrong."""
    arrays: dict[str, tuple[Reals, Reals]] = {}
    for name, shape in LAYERS.items():
        if name not in saved.layers:
            raise SpecError(f"{source}: layer {name!r} is missing", ", ".join(LAYERS))
        layer = saved.layers[name]
        wide = {len(row) for row in layer.weight}
        biases = 1 if name == "straight" else shape[0] if name == "costs" else shape[1]
        if len(layer.weight) != shape[0] or wide != {shape[1]} or len(layer.bias) != biases:
            raise SpecError(
                f"{source}: layer {name!r} is {len(layer.weight)} x {max(wide, default=0)} and {len(layer.bias)}",
                f"{shape[0]} x {shape[1]} and {biases}",
            )
        arrays[name] = np.array(layer.weight), np.array(layer.bias)
    if len(saved.mean) != FEATURES or len(saved.deviation) != FEATURES or min(saved.deviation) <= 0:
        raise SpecError(source, f"means and positive deviations of {FEATURES} features")
    return Policy(saved.unit_s, np.array(saved.mean), np.array(saved.deviation), arrays)


@functools.cache
def load_policy(path: Path = SHIPPED) -> Policy:
    try:
        saved = decode_json(read_bytes(path), PolicyFile)
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}", "a policy, as tools/train_dreamshard.py writes it") from None
    except msgspec.DecodeError as error:
        raise SpecError(
            f"{path}: not a placement policy: {error}", hint="tools/train_dreamshard.py writes one"
        ) from None
    return policy_of(saved, str(path))


def table_features(request: PlanRequest, halvings: int = 0) -> Floats:
    """Features of each table: logarithms of columns, rows, ids per sample and bytes, and 17 bins of reuse.

    After `halvings`, a table has that part of its columns and bytes, and all of its rows and ids.
    """
    tables, part = [w.table for w in request.workloads], 0.5**halvings
    curves = Curves.of(request.workloads, request.batch)
    shape_TF = np.array(
        [
            (t.dim * part, t.rows, max(p, 1e-3), t.rows * t.row_bytes * part)
            for t, p in zip(tables, curves.pooling_T, strict=True)
        ]
    )
    return np.concatenate([np.log(shape_TF), reuse_bins(curves)], axis=1)


def split_costs(problem: PlacementProblem, load_NK: Floats, link_N: Floats) -> Floats:
    """Seconds (N, 3) of sums of loads: of the lookup, of links, and the rise by the other loads.

    The lookup has the first half of the loads where a cost model has no stages.
    """
    stages, width = problem.request.model.stages, problem.phi.width
    lookup = stages[0].loads if stages else tuple(range((width + 1) // 2))
    first_NK = np.zeros_like(load_NK)
    first_NK[..., lookup] = load_NK[..., lookup]
    forward_N = problem.phi(first_NK)
    return np.stack([forward_N - problem.phi.constant, link_N, problem.phi(load_NK) - forward_N], axis=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemDeck:
    """Items in placement order, for E roll-outs with equally many items and ranks."""

    loads_EIH: Reals
    kinds_EIH: Reals
    single_EIC: Reals  # predicted seconds of each item alone
    factor_EC: Reals  # on predictions of the cost network
    share_EIM: Reals  # of a rank's memory
    allowed_EIU: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PolicyStep:
    """The policy's inputs when it places one item."""

    item: int
    inputs_EUS: Reals
    here_EUH: Reals  # sum of the policy's vectors of the tables on a rank
    legal_EU: NDArray[np.bool_]


def placement_order(single_EIC: Reals) -> NDArray[np.int64]:
    """Items in falling order of predicted seconds; equal ones keep their order."""
    return np.argsort(-single_EIC.sum(-1), axis=-1, kind="stable")


def roll_out(policy: Policy, deck: ItemDeck, choose: Callable[[PolicyStep], NDArray[np.int64]]) -> NDArray[np.int64]:
    """The rank (E, I) of each item: `choose` picks it, item by item."""
    runs, items, units = deck.allowed_EIU.shape
    kind = deck.loads_EIH.dtype
    loads_EUH, kinds_EUH = np.zeros((2, runs, units, SUMS), kind)
    cost_EUC = np.zeros((runs, units, COSTS), kind)
    share_EUM = np.zeros((runs, units, deck.share_EIM.shape[-1]))
    total = _DeckTotals.of(deck)
    unit_EI = np.zeros((runs, items), dtype=np.int64)
    run_E = np.arange(runs)
    for i in range(items):
        after_EUC = policy.costs(loads_EUH + deck.loads_EIH[:, i, None]) * deck.factor_EC[:, None]
        full_EUM = share_EUM + deck.share_EIM[:, i, None]
        legal_EU = (full_EUM <= FULL).all(-1) & deck.allowed_EIU[:, i]
        kept_EU = legal_EU & _leaves_room(share_EUM, full_EUM, total.later_EI[:, i])
        legal_EU = np.where(kept_EU.any(1, keepdims=True), kept_EU, legal_EU)
        inputs_EUS = _policy_inputs(total, i, cost_EUC, after_EUC, (share_EUM, full_EUM))
        unit_E = choose(PolicyStep(i, inputs_EUS, kinds_EUH * (units / items), legal_EU))
        unit_EI[:, i] = unit_E
        loads_EUH[run_E, unit_E] += deck.loads_EIH[:, i]
        kinds_EUH[run_E, unit_E] += deck.kinds_EIH[:, i]
        cost_EUC[run_E, unit_E] = after_EUC[run_E, unit_E]
        share_EUM[run_E, unit_E] = full_EUM[run_E, unit_E]
    return unit_EI


@dataclass(frozen=True, slots=True)
class _DeckTotals:
    """Totals of a deck: seconds of an even rank, and each item's and the rest's shares of it."""

    even_E: Reals
    item_EIF: Reals
    left_EIM: Reals  # shares of a rank's memory, summed over this item and later ones
    later_EI: Reals  # the largest share of memory of a later item

    @classmethod
    def of(cls, deck: ItemDeck) -> "_DeckTotals":
        units = deck.allowed_EIU.shape[-1]
        even_EC = deck.single_EIC.sum(1) / units
        even_E = np.maximum(even_EC.sum(-1), EPSILON)
        seconds_EI = deck.single_EIC.sum(-1)
        left_EI = np.cumsum(seconds_EI[:, ::-1], axis=1)[:, ::-1] / (units * even_E[:, None])
        wide = np.ones_like(seconds_EI)
        columns = (
            seconds_EI / even_E[:, None],
            deck.single_EIC[..., 1] / even_E[:, None],
            left_EI,
            wide * (even_EC[:, 1] / even_E)[:, None],
            wide * np.log(units),
        )
        left_EIM = np.cumsum(deck.share_EIM[:, ::-1], axis=1)[:, ::-1]
        max_EI = np.maximum.accumulate(deck.share_EIM.max(-1)[:, ::-1], axis=1)[:, ::-1]
        later_EI = np.concatenate([max_EI[:, 1:], np.zeros_like(max_EI[:, :1])], axis=1)
        return cls(even_E, np.stack(columns, axis=-1), left_EIM, later_EI)


def _leaves_room(share_EUM: Reals, full_EUM: Reals, later_E: Reals) -> NDArray[np.bool_]:
    """Whether some rank still has room for the largest later item if this one goes to a rank."""
    used_EU, full_EU = share_EUM.max(-1), full_EUM.max(-1)
    absent_E1 = np.full_like(used_EU[:, :1], np.inf)  # with one rank there is no other
    # The least used rank other than each: the second least for the least one, the least for all others.
    min_EL = np.partition(np.concatenate([used_EU, absent_E1], axis=1), 1, axis=1)[:, :2]
    others_EU = np.where(used_EU <= min_EL[:, :1], min_EL[:, 1:], min_EL[:, :1])
    return np.minimum(others_EU, full_EU) + later_E[:, None] <= FULL


def _policy_inputs(
    total: _DeckTotals, item: int, cost_EUC: Reals, after_EUC: Reals, shares: tuple[Reals, Reals]
) -> Reals:
    """For each rank, in shares of an even rank: costs before and after, and how they compare with other ranks'."""
    before_EUC, with_EUC = cost_EUC / total.even_E[:, None, None], after_EUC / total.even_E[:, None, None]
    work_EU, link_EU = before_EUC[..., 0] + before_EUC[..., 2], before_EUC[..., 1]
    worked_EU, linked_EU = with_EUC[..., 0] + with_EUC[..., 2], with_EUC[..., 1]
    most_work_E1, most_link_E1 = work_EU.max(1, keepdims=True), link_EU.max(1, keepdims=True)
    worst_EU = np.maximum(most_work_E1, worked_EU) + np.maximum(most_link_E1, linked_EU)
    full_EU = np.minimum(shares[1].max(-1), 2.0)
    room_EM = np.maximum(np.maximum(1 - shares[0], 0).sum(1), EPSILON)
    pressure_E = np.minimum((total.left_EIM[:, item] / room_EM).max(-1), 2.0)
    inverse = 1.0 / cost_EUC.shape[1]
    inputs_EUS = np.empty((*full_EU.shape, INPUTS), cost_EUC.dtype)
    inputs_EUS[..., :3] = before_EUC
    inputs_EUS[..., WITH] = with_EUC
    inputs_EUS[..., 6] = worked_EU - work_EU.sum(1, keepdims=True) * inverse
    inputs_EUS[..., 7] = linked_EU - link_EU.sum(1, keepdims=True) * inverse
    inputs_EUS[..., WORSE] = worst_EU - worst_EU.min(1, keepdims=True)
    inputs_EUS[..., 9] = worked_EU - most_work_E1
    inputs_EUS[..., 10] = linked_EU - most_link_E1
    inputs_EUS[..., FILL] = full_EU
    inputs_EUS[..., 12] = full_EU - full_EU.sum(1, keepdims=True) * inverse
    inputs_EUS[..., 13] = pressure_E[:, None]
    inputs_EUS[..., 14] = worst_EU
    inputs_EUS[..., 15:] = total.item_EIF[:, item, None]
    return inputs_EUS


def whole_pieces(problem: PlacementProblem) -> NDArray[np.int64]:
    """The piece of each item that is the whole item."""
    first_O = problem.item_begin[:-1]
    kinds = [problem.kind_of(int(option)) for option in first_O]
    cut = [problem.name_of(item) for item, kind in enumerate(kinds) if not kind.layout.is_whole]
    if cut:
        raise SpecError(f"published methods place whole tables, and {cut[0]!r} may not be one", hint="allow table_wise")
    return problem.option_begin[first_O].astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceVectors:
    """What the policy knows of each item (I) whose columns were halved L times."""

    loads_ILH: Reals
    kinds_ILH: Reals
    single_ILC: Reals  # predicted seconds of a piece alone
    share_ILM: Floats  # of a rank's memory
    factor_C: Reals  # on predictions of the cost network
    allowed_IU: NDArray[np.bool_]

    @classmethod
    def of(cls, problem: PlacementProblem, policy: Policy, piece_IL: Index) -> "PieceVectors":
        """`piece_IL` is an item's piece after L halvings, or -1; vectors of pieces that do not exist mean nothing."""
        whole, world = problem.pieces.take(piece_IL[:, 0].astype(np.int64)), problem.topology.world
        items, levels = piece_IL.shape
        item_T = np.zeros(len(problem.request.workloads), dtype=np.int64)
        for item, group in enumerate(problem.members):
            item_T[list(group)] = item
        loads_ILH, kinds_ILH = np.zeros((2, items, levels, SUMS))
        for level in range(levels):
            normal_TF = policy.normal(table_features(problem.request, level))
            np.add.at(loads_ILH[:, level], item_T, policy.loads(normal_TF))
            np.add.at(kinds_ILH[:, level], item_T, policy.kinds(normal_TF))
        predicted_ILC = np.stack([policy.costs(loads_ILH[:, level]) for level in range(levels)], axis=1)
        modelled_IC = split_costs(problem, whole.load_NK, whole.link_N)
        factor_C = modelled_IC.sum(0) / np.maximum(predicted_ILC[:, 0].sum(0), EPSILON)
        return cls(
            loads_ILH=loads_ILH,
            kinds_ILH=kinds_ILH,
            single_ILC=predicted_ILC * factor_C,
            share_ILM=problem.pieces.bytes_NM[piece_IL] / np.maximum(problem.limit_M, EPSILON),
            factor_C=factor_C,
            allowed_IU=np.array([problem.allowed_units(item)[:world] for item in range(items)]),
        )

    def deck(self, item_ES: NDArray[np.int64], level_ES: NDArray[np.int64]) -> tuple[ItemDeck, NDArray[np.int64]]:
        """E sets of equally many pieces for roll-outs, and the order of the pieces in them."""
        order_ES = placement_order(self.single_ILC[item_ES, level_ES])
        placed = tuple(np.take_along_axis(index_ES, order_ES, axis=1) for index_ES in (item_ES, level_ES))
        deck = ItemDeck(
            loads_EIH=self.loads_ILH[placed],
            kinds_EIH=self.kinds_ILH[placed],
            single_EIC=self.single_ILC[placed],
            factor_EC=np.tile(self.factor_C, (len(item_ES), 1)),
            share_EIM=self.share_ILM[placed],
            allowed_EIU=self.allowed_IU[placed[0]],
        )
        return deck, order_ES


def make_deck(problem: PlacementProblem, policy: Policy) -> tuple[ItemDeck, NDArray[np.int64]]:
    """A problem's whole items for one roll-out, and their numbers."""
    vectors = PieceVectors.of(problem, policy, whole_pieces(problem)[:, None].astype(np.int32))
    item_1I = np.arange(len(problem.members))[None]
    deck, order_1I = vectors.deck(item_1I, np.zeros_like(item_1I))
    return deck, order_1I[0]


def play(policy: Policy, deck: ItemDeck, *, costs_alone: bool = False) -> NDArray[np.int64]:
    """The rank (E, I) with the largest logit among those with room; the least full one where none has room.

    With `costs_alone`, the one where predicted costs are then least: AutoShard's network without its policy.
    """

    def choose(step: PolicyStep) -> NDArray[np.int64]:
        if costs_alone:
            score_EU = -step.inputs_EUS[..., WITH].sum(-1)
        else:
            item_EUH = np.broadcast_to(deck.kinds_EIH[:, step.item, None], step.here_EUH.shape)
            score_EU = policy.logits(step.inputs_EUS, step.here_EUH, item_EUH)
        no_room_E1 = ~step.legal_EU.any(1, keepdims=True)
        least_full_EU = np.where(no_room_E1 & deck.allowed_EIU[:, step.item], -step.inputs_EUS[..., FILL], -np.inf)
        return np.where(step.legal_EU, score_EU, least_full_EU).argmax(1)

    return roll_out(policy, deck, choose)


def excess_memory(deck: ItemDeck, unit_EI: NDArray[np.int64]) -> Floats:
    """Shares of a rank's memory (E) that a roll-out exceeds, summed over ranks; infinite on a forbidden rank."""
    units = deck.allowed_EIU.shape[-1]
    here_EUI = (unit_EI[:, None] == np.arange(units)[:, None]).astype(float)
    over_EUM = here_EUI @ deck.share_EIM - 1
    allowed_E = np.take_along_axis(deck.allowed_EIU, unit_EI[..., None], axis=2).all((1, 2))
    return np.where(allowed_E, np.where(over_EUM > FULL - 1, over_EUM, 0.0).sum((1, 2)), np.inf)


def place_by_policy(problem: PlacementProblem, policy: Policy, *, costs_alone: bool = False) -> Index | None:
    """A unit for each piece, each item whole and on the rank that `play` chooses; None if an item fits nowhere."""
    deck, order = make_deck(problem, policy)
    unit_EI = play(policy, deck, costs_alone=costs_alone)
    if excess_memory(deck, unit_EI)[0]:
        return None
    unit_N = np.full(len(problem.pieces.link_N), NO_UNIT, dtype=np.int32)
    unit_N[whole_pieces(problem)[order]] = unit_EI[0]
    return unit_N


def policy_start(problem: PlacementProblem) -> Placement | None:
    """The shipped policy's placement; None if an item may not be whole or fits nowhere, or there are too many items."""
    first_I = problem.item_begin[:-1]
    whole = all(problem.kind_of(int(option)).layout.is_whole for option in first_I)
    if not whole or len(first_I) > MAX_ITEMS:
        return None
    unit_N = place_by_policy(problem, load_policy())
    return None if unit_N is None else Placement(first_I.astype(np.int32), unit_N)
