"""What rows become where their table gets another id map, written out id by id."""

import numpy as np
from tables.ids.maps import make_maps

from rowwise.base.errors import SpecError
from rowwise.tables.ids.remap import check_movable
from rowwise.tables.ids.rows import look_up_rows

KINDS = tuple(make_maps(40))
SEVERAL = ("double_hash", "three hashes", "quotient_remainder")  # rows of one part
MOVABLE = tuple(kind for kind in KINDS if kind not in (*SEVERAL, "product"))


def movable_to(new, ids, seed, dim):
    """Maps from which rows can be moved to this one."""

    def fits(old):
        try:
            check_movable(old.shape, new.shape, dim)
        except SpecError:
            return False
        return True

    return [old for old in make_maps(ids, seed).values() if fits(old)]


def rows_in(id_map, index):
    """The rows of each id in a part."""
    begin = sum(part.rows for part in id_map.shape.parts[:index])
    rows_NC = look_up_rows(id_map, np.arange(id_map.shape.ids)) - begin
    return [[row for row in its if 0 <= row < id_map.shape.parts[index].rows] for its in rows_NC.tolist()]


def by_loops(old, new, index, rows_RD, weights_N, state):
    """What the rows of a part become, and which are old ones."""
    had, has = rows_in(old, index), rows_in(new, index)
    found = np.zeros((new.shape.parts[index].rows, rows_RD.shape[1]))
    same = [-1] * len(found)
    for row in range(len(found)):
        total = 0.0
        its = [k for k, some in enumerate(has) if some == [row]]
        if its and all(had[k] == had[its[0]] for k in its) and len(had[its[0]]) == 1:
            same[row] = had[its[0]][0]
        for k in its:
            were = [rows_RD[other].astype(np.float64) for other in had[k]]
            if state and not were:
                continue
            found[row] += weights_N[k] * sum(were) / (len(were) if state else 1) if were else 0.0
            total += weights_N[k]
        found[row] /= total or 1.0
    return found, same
