"""RecShard's program as published, for whole tables: a cut and a device for each table, seconds that add up.

min C    the cuts of a table and its devices: one bit for each pair, of which one is set
         seconds of each device <= C
         bytes of each device and tier <= its memory
"""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from rowwise.planning.planner.native import MethodResult
from rowwise.planning.planner.problem import PlacementProblem


def piece_seconds(problem: PlacementProblem) -> np.ndarray:
    """Seconds of each piece alone on a device."""
    return problem.phi(problem.pieces.load_NK) - problem.phi.constant + problem.pieces.link_N


def slowest_s(problem: PlacementProblem, result: MethodResult) -> float:
    """Seconds of the slowest device, by sums."""
    seconds_S = piece_seconds(problem)[result.piece_S]
    return float(np.bincount(result.rank_S, seconds_S, problem.topology.world).max())


def optimum_s(problem: PlacementProblem) -> float:
    """The least seconds of the slowest device."""
    world, seconds_N, item_N = problem.topology.world, piece_seconds(problem), problem.item_of_O[problem.option_of_N]
    whole = [n for n, o in enumerate(problem.option_of_N) if problem.kind_of(int(o)).layout.is_whole]
    pairs = [(piece, rank) for piece in whole for rank in range(world)]
    scale = seconds_N[whole].max()
    chosen = [[item_N[p] == item for p, _ in pairs] + [0] for item in range(len(problem.members))]
    busy = [[seconds_N[p] / scale * (r == rank) for p, r in pairs] + [-1] for rank in range(world)]
    taken = [
        [problem.pieces.bytes_NM[p, m] * (r == rank) / limit for p, r in pairs] + [0]
        for m, limit in enumerate(problem.limit_M)
        if limit
        for rank in range(world)
    ]
    solved = milp(
        [0.0] * len(pairs) + [1.0],
        constraints=[
            LinearConstraint(np.array(chosen, float), 1, 1),
            LinearConstraint(np.array(busy), -np.inf, 0),
            LinearConstraint(np.array(taken), -np.inf, 1),
        ],
        integrality=[1] * len(pairs) + [0],
        bounds=Bounds(0, [1] * len(pairs) + [np.inf]),
    )
    return float(solved.fun * scale)
