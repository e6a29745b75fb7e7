"""Recipes whose columns are shared: training ends with the bits that it ends with without, and less travels."""

import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet as pq
from small import recipe, same, saved, trained

from rowwise import SpecError
from rowwise.parallel.comm.thread import run_threads
from rowwise.recipes.runs import TrainingRun
from rowwise.train.saved import CheckpointFolder
from rowwise.train.settings import Training

SHARED = ["user", "seen"]
MODELS = {
    "dlrm": {"kind": "dlrm", "bottom": [8], "top": [8]},
    "dcn": {"kind": "dcn", "rank": 4, "crosses": 2, "deep": [8]},
}
TWO_TOWERS = {
    "kind": "two_tower",
    "item": "item",
    "user_features": ["user", "seen"],
    "user_dense": ["d0"],
    "item_dense": ["d1"],
    "sizes": [8],
    "ks": [5],
}


pytestmark = pytest.mark.usefixtures("models_one_after_the_other")


def write_sessions(path):
    """Ten rows a session, one after another; the user and what it has seen are the session's."""
    g, rows, session = np.random.default_rng(0), 3000, 10
    number = np.arange(rows) // session
    seen = [g.integers(0, 20, g.integers(0, 12)) for _ in range(rows // session)]
    user, item = (number * 7) % 50, g.integers(0, 30, rows)
    table = {
        "row": np.arange(rows),
        "session": number,
        "label": ((user + item + g.integers(0, 20, rows)) % 3 == 0).astype(int),
        "d0": g.random(rows),
        "d1": g.random(rows),
        "user": user,
        "item": item,
        "seen": pa.array([seen[n] for n in number], pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(table), path, row_group_size=500)


def changes_for(shared, **more):
    return {"name": f"shared{len(shared)}", "data": {"together": "session"}, "columns": {"shared": shared}, **more}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*MODELS, "two towers"])
def test_one_rank_ends_with_the_same_bits(tmp_path, kind):
    """In two towers a batch's own items are the wrong answers, and both look shared bags up."""
    write_sessions(tmp_path / "rows.parquet")
    found = []
    how = {"model": MODELS[kind]} if kind in MODELS else {"model": TWO_TOWERS, "evaluate": {"metric": "recall@5"}}
    for shared in ([], SHARED, ["item"], ["item", *SHARED]):
        run, result = trained(tmp_path, **changes_for(shared, **how))
        found.append((saved(run.folder.path), result.test))
    for tensors, test in found[1:]:
        assert same(tensors, found[0][0])
        assert test == found[0][1]


def on_two_ranks(folder, train, shared, model):
    """What a run on two threads saves, and the bytes that they sent of what."""
    # Whole tables on a rank each, so that ids and vectors travel.
    tiles = [
        {"table": name, "rank": rank, "rows": [0, rows], "cols": [0, 8]}
        for name, rows, rank in (("user", 50, 0), ("item", 30, 1), ("seen", 20, 1))
    ]
    (folder / "plan.json").write_text(json.dumps({"world": 2, "tiles": tiles}))
    how = recipe(folder, **changes_for(shared, model=model, train=train, plan=str(folder / "plan.json")))
    sent = Counter()

    def on_a_rank(comm):
        run = TrainingRun.start(how, folder / "runs", comm=comm)
        result = run.go()
        sent.update({what: n for (what, *_), n in comm.sent.counts.items()})
        return run.folder.path, result

    (path, result), _ = run_threads(2, on_a_rank, timeout_s=60)
    opened = CheckpointFolder(path / "ckpt").open()
    names = [n for n in opened.names() if n.startswith(("model/", "rows/", "optimizer/"))]
    return {name: opened.load(name) for name in names}, result.test, sent


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("elastic", [False, True])
def test_two_ranks_end_with_the_same_bits_and_send_less(tmp_path, kind, elastic):
    write_sessions(tmp_path / "rows.parquet")
    train = {"batch": 1024, "epochs": 2} | ({"determinism": "elastic", "virtual_shards": 4} if elastic else {})
    plain, test, sent = on_two_ranks(tmp_path, train, [], MODELS[kind])
    shared, shared_test, shared_sent = on_two_ranks(tmp_path, train, SHARED, MODELS[kind])
    assert same(shared, plain)
    assert shared_test == test
    assert shared_sent["ids"] < 0.5 * sent["ids"]
    assert shared_sent["pooled"] < 0.7 * sent["pooled"]
    assert shared_sent["gradients"] == sent["gradients"]


@pytest.mark.slow
def test_merged_gradients_end_nearly_there(tmp_path):
    write_sessions(tmp_path / "rows.parquet")
    plain, _ = trained(tmp_path, **changes_for(SHARED))
    merged, _ = trained(tmp_path, **changes_for(SHARED, train={"merge_shared": True}))
    one, other = saved(plain.folder.path), saved(merged.folder.path)
    trained_names = [name for name in one if name.startswith(("model/", "rows/", "optimizer/"))]
    floats = [name for name in trained_names if one[name].is_floating_point()]
    assert floats
    assert not same(one, other)
    assert all(torch.allclose(one[name], other[name], rtol=1e-3, atol=1e-4) for name in floats)


def test_merged_gradients_are_not_elastic():
    with pytest.raises(SpecError, match=r"train.merge_shared=true"):
        Training(merge_shared=True, determinism="elastic")
