"""A store of rows outside the library: runs and checkpoints have the bits of rows in memory."""

from contextlib import contextmanager

import pytest
import torch
from ranked import Ranked, tensors, train
from trainings import fast

from rowwise.tables.store.row_store import RecordStore, StoreUse
from rowwise.train.settings import Saving


class DictRows(RecordStore):
    """Rows in dictionaries, as a server of parameters might have them."""

    place = "in dictionaries"

    def __init__(self, slots):
        super().__init__(slots.tables)
        self.known = [{} for _ in slots.tables]

    @contextmanager
    def pin(self, ids, *, changes, counts):
        slots_N, bounds, pinned = ids.values_N.clone(), ids.bounds_F1.tolist(), []
        for number, table in enumerate(self.tables):
            spans = [slice(*bounds[f : f + 2]) for f, of in enumerate(ids.tables_F) if of == number]
            rows_U = torch.cat([ids.values_N[:0], *(ids.values_N[span] for span in spans)]).unique()
            count = len(rows_U)
            if count and not 0 <= rows_U[0] <= rows_U[-1] < table.rows:
                raise RuntimeError(f"an id is outside table {table.name!r}")
            table.slot_rows[:count] = rows_U
            table.row_memory[:count], table.state_memory[:count] = self.read(number, rows_U)
            for span in spans:
                slots_N[span] = torch.searchsorted(rows_U, ids.values_N[span])
            pinned.append(rows_U)
        try:
            yield slots_N
        finally:
            for number, (table, rows_U) in enumerate(zip(self.tables, pinned, strict=True)):
                if changes:
                    self.write(number, rows_U, table.row_memory[: len(rows_U)], table.state_memory[: len(rows_U)])

    def use(self):
        return StoreUse()

    def read(self, number, rows_U):
        stored, state = (x.clone() for x in self.tables[number].initial(rows_U.long()))
        for k, row in enumerate(rows_U.tolist()):
            stored[k], state[k] = self.known[number].get(row, (stored[k], state[k]))
        return stored, state

    def write(self, number, rows_U, stored, state):
        for k, row in enumerate(rows_U.tolist()):
            self.known[number][row] = stored[k].clone(), state[k].clone()

    def written(self, number, first, last):
        return torch.tensor(sorted(row for row in self.known[number] if first <= row < last)).long()

    def forget(self, number):
        self.known[number].clear()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_and_its_resumption_have_the_bits_of_rows_in_memory(tmp_path, ranks):
    own = {"on_disk": ("user", "words"), "cache_rows": 4, "open_store": DictRows}
    for name, more in {"memory": {}, "own": own}.items():
        for epochs, which in ((1, None), (2, "last")):
            how = fast(train={"epochs": epochs}, save=Saving(every=3))
            train(Ranked(how, tmp_path / name, dropout=0.0, count=30, **more), ranks, which=which)
    found, expected = (tensors(tmp_path / name) for name in ("own", "memory"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
