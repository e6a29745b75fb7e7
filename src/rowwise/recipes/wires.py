"""Decides a recipe's wire: types of `wire: auto` per link, and the all-reduce of dense gradients on a known network.

Steps are predicted by rates: tables by the cost model and a short search, dense layers by their multiplications, sums
by the formulas of collectives, one after the other. Known limits: no overlap; models with unknown multiplications count
as without dense computation, so types are chosen as if a step waited for links only.
"""

from dataclasses import replace

import numpy as np
from msgspec import structs
from torch import nn

from rowwise.planning.perf.hardware import Hardware
from rowwise.planning.perf.links import LinkArrays, uniform_network
from rowwise.planning.perf.roofline import Roofline
from rowwise.planning.perf.sums import SumCosts
from rowwise.planning.perf.wire_choice import Predict, WireChoice, choose_wire, fastest_sums
from rowwise.planning.planner.options import make_problem
from rowwise.planning.planner.problem import PlanRequest
from rowwise.planning.planner.search import search
from rowwise.recipes.compose import make_model
from rowwise.recipes.operations import multiplications
from rowwise.recipes.resolved import ResolvedRecipe
from rowwise.recipes.sharding import SEARCH_s, make_request, tables_of, usual_hardware
from rowwise.tables.spec import Topology, Wire
from rowwise.train.dense import bucket_numbers
from rowwise.train.step import dense_parameters


def decide_wire(
    resolved: ResolvedRecipe, topology: Topology, net: LinkArrays | None = None, hardware: Hardware | None = None
) -> ResolvedRecipe:
    """The recipe with types in place of `wire: auto`; a recipe that names types keeps them.

    On a known network, with hosts in the order of ranks, a flat all-reduce of dense gradients becomes a two-level one
    if that is faster. Never rounds more than the recipe asks for. `hardware` defaults to the recipe's.
    """
    recipe = resolved.recipe
    if topology.world == 1 or (recipe.wire != "auto" and net is None):
        return resolved if recipe.wire != "auto" else _with_wire(resolved, None)
    model = make_model(resolved, on_meta=True, reads=False)
    predict = predict_step(resolved, model, topology, net, hardware or usual_hardware(recipe))
    is_replicated = recipe.train.dense_parallel.kind == "replicate" and recipe.train.determinism != "elastic"
    if recipe.wire == "auto":
        return _with_wire(resolved, choose_wire(topology, predict, sums=is_replicated))
    if not is_replicated or recipe.wire.far is not None:
        return resolved
    wire = fastest_sums(recipe.wire, predict)
    return _with_wire(resolved, WireChoice(wire, predict(wire), predict(recipe.wire), topology))


def _with_wire(resolved: ResolvedRecipe, choice: WireChoice | None) -> ResolvedRecipe:
    wire = Wire() if choice is None else choice.wire
    return replace(resolved, recipe=structs.replace(resolved.recipe, wire=wire), wire_choice=choice)


def predict_step(
    resolved: ResolvedRecipe, model: nn.Module, topology: Topology, net: LinkArrays | None, hardware: Hardware
) -> Predict:
    """A function from a wire to the seconds of a step; tables are placed by a short search with fp32."""
    recipe = resolved.recipe
    if net is None:
        net = uniform_network(topology, hardware).arrays()
    else:
        hardware = hardware_on(net, topology, hardware)
    request = make_request(structs.replace(recipe, wire=Wire()), tables_of(model), topology, hardware)
    problem = make_problem(_with_roofline(request, Wire()))
    placement = search(problem, seconds=SEARCH_s, prove=False).placement
    numbers = bucket_numbers(dense_parameters(model))
    sums = SumCosts(topology, net, hardware, tuple(numbers))
    dense = multiplications(resolved.parts.model, resolved.tables, len(resolved.columns.dense)) or 0
    compute_s = (
        6 * dense * request.batch / topology.world / hardware.flops
    )  # 2 operations per multiplication; backward costs two forwards

    def seconds(wire: Wire) -> float:
        priced = make_problem(_with_roofline(request, wire))
        return priced.cost(placement) + compute_s + sums.seconds(wire)

    return seconds


def _with_roofline(request: PlanRequest, wire: Wire) -> PlanRequest:
    return replace(request, model=Roofline(request.machine.hardware, request.machine.topology, wire))


def hardware_on(net: LinkArrays, topology: Topology, hardware: Hardware) -> Hardware:
    """The profile with the median links of a network, divided among the devices of a host."""
    if net.hosts < 2:
        return hardware
    off_HH = ~np.eye(net.hosts, dtype=bool)
    near_HH = off_HH & (net.group_H[:, None] == net.group_H[None, :])
    far_HH = off_HH & ~near_HH
    rates = {}
    for name, pairs_HH in (("network", near_HH), ("uplink", far_HH)):
        if not pairs_HH.any():
            continue
        host_Bps = ring_Bps = float(np.median(net.rate_HH[pairs_HH]))
        if name == "uplink":  # the hosts of a group share it; a ring sends one message at a time
            host_Bps = min(host_Bps, float((net.uplink_G / np.bincount(net.group_H)).min()))
            ring_Bps = min(ring_Bps, float(net.uplink_G.min()))
        each_Bps = host_Bps / topology.devices
        rates[name] = structs.replace(
            hardware.network, latency_s=float(np.median(net.latency_HH[pairs_HH])), all_to_all_Bps=each_Bps,
            reduce_scatter_Bps=each_Bps, all_reduce_Bps=ring_Bps,
        )  # fmt: skip
    return structs.replace(hardware, **rates)
