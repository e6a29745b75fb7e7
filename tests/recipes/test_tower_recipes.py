"""Recipes of towers over a graph, and with pictures: they learn, are reported, and are served or refused."""

import copy
import io
import json
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from key_recipes import write_small_pictures
from PIL import Image
from pyarrow import parquet as pq
from report.markup_check import check
from small import tensors, train_on_ranks
from test_two_tower_recipe import BASE, ITEMS, KINDS, USERS, recipe, write_meetings

from rowwise import SpecError
from rowwise.base.errors import TableMemoryError
from rowwise.ingest.pictures import PictureFolder, write_pictures
from rowwise.parallel.comm.solo import solo
from rowwise.recipes.export import export
from rowwise.recipes.outlook import dry_run
from rowwise.recipes.predict import predict
from rowwise.recipes.rows import RowSelection, open_reader
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.served import open_predictor, open_version
from rowwise.recipes.table_memory import measure_memory, raise_if_short
from rowwise.recipes.text import decode
from rowwise.recipes.trained import evaluate, load_trained, predict_rows
from rowwise.serve.retrieval import RetrieveBody
from rowwise.tables.spec import RowType

GRAPH = {"kind": "graph", "user": "user", "item": "item", "ks": [5, 20]}


def trained(folder, model, **changes):
    """A run of the recipe of two towers with another model."""
    folder.mkdir(exist_ok=True)
    if not (folder / "rows.parquet").exists():
        write_meetings(folder / "rows.parquet")
    run = TrainingRun.start(recipe(folder, model=model, **changes), folder / "runs")
    run.go()
    return run


def measured(run):
    return run.folder.path, evaluate(run.folder.path).tasks["met"]


def same_weights(a, b):
    first, second = (load_trained(run.folder.path, "last")[1].state_dict() for run in (a, b))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "more",
    [{}, {"encoder": "graphsage", "sizes": [16]}, {"layers": 2, "sampled": 8, "loss": "bpr"}],
    ids=["lightgcn", "graphsage", "sampled"],
)
def test_a_graph_of_users_and_items_finds_what_users_like(tmp_path, more):
    run = trained(tmp_path, GRAPH | more, train={"epochs": 4})
    path, metrics = measured(run)
    assert metrics["recall@20"] > 2.5 * 20 / ITEMS  # by chance 20 of the items
    page = (path / "report.html").read_text()
    check(page)
    table = pq.read_table(tmp_path / "rows.parquet")
    edges = int(re.search(r">pairs</span><span[^>]*>([\d,]+)", page).group(1).replace(",", ""))
    assert 0 < edges < table.num_rows
    assert ("edges in evaluation" in page) == ("sampled" in more)


@pytest.mark.slow
def test_the_same_run_has_the_same_bits_and_goes_on(tmp_path):
    whole = trained(tmp_path, GRAPH, train={"epochs": 2})
    assert same_weights(whole, trained(tmp_path, GRAPH, train={"epochs": 2}))
    short = trained(tmp_path, GRAPH, train={"epochs": 2, "steps": 9}, save={"every": 9})
    again = TrainingRun.resume(short.folder.path, changes=["train.steps=null"])
    again.go()
    assert same_weights(whole, again)


def halves(table, rows, *, columns=False):
    """A table of dim 16 cut in two, by rows or by columns."""
    for rank in range(2):
        cut = [8 * rank, 8 * rank + 8] if columns else [rows // 2 * rank, rows // 2 * (rank + 1)]
        whole = {"rows": [0, rows], "cols": [0, 16]}
        yield {"table": table, "rank": rank, **whole, "cols" if columns else "rows": cut}


@pytest.mark.slow
@pytest.mark.usefixtures("models_one_after_the_other")
@pytest.mark.parametrize("encoder", ["lightgcn", "graphsage"])
def test_two_ranks_learn_what_one_learns_of_a_graph(tmp_path, encoder):
    """Each has half of every table and half of a batch, and sums over the whole graph."""
    tiles = [*halves("user", USERS), *halves("item", ITEMS, columns=True)]
    (tmp_path / "plan.json").write_text(json.dumps({"world": 2, "tiles": tiles}))
    made = copy.deepcopy(BASE) | {"model": GRAPH | {"encoder": encoder, "sizes": [16]}}
    learn_the_same(tmp_path, made, {"plan": str(tmp_path / "plan.json")})


@pytest.mark.slow
@pytest.mark.usefixtures("models_one_after_the_other")
@pytest.mark.parametrize("choose", [None, {"price": 0.2, "similar": 0.999}], ids=["largest", "chosen"])
def test_two_ranks_learn_what_one_learns_of_pictures(tmp_path, choose):
    """They draw the same sizes, and the scale model's loss is a mean over samples."""
    model = with_choice(tmp_path / "pictures", **(choose or {}))
    if choose is None:
        del model["item_pictures"]["choose"]
    # Rounding turns a ReLU off, or a picture's label round, now and then.
    learn_the_same(tmp_path, copy.deepcopy(BASE) | {"model": model}, atol=1e-3)


def learn_the_same(folder, made, more=None, atol=1e-5):
    """Two ranks come to the weights and metrics of one, up to rounding; `more` is of their recipe."""
    sgd = {"kind": "sgd", "lr": 0.3}  # Adam would enlarge rounding where a gradient is 0
    write_meetings(folder / "rows.parquet")
    made["data"]["dataset"] = f"parquet:{folder / 'rows.parquet'}"
    made["tables"] = {"list": [{**table, "optimizer": sgd} for table in made["tables"]["list"]]}
    made["train"] |= {"batch": 512, "epochs": 2, "optimizer": sgd}

    ((alone, one),) = train_on_ranks(1, decode(made, "my.yaml"), folder / "one")
    (result, two), _ = train_on_ranks(2, decode(made | (more or {}), "my.yaml"), folder / "two")
    wanted, found = (tensors(path, state=False) for path in (one, two))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=atol)
    assert result.test["met"] == pytest.approx(alone.test["met"], abs=1e-2)
    assert evaluate(two).tasks["met"] == pytest.approx(result.test["met"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{}, {"encoder": "graphsage", "sizes": [8]}, {"sampled": 4, "sampled_by": "stride"}], ids=str
)
def test_a_version_of_a_graph_needs_no_graph(tmp_path, more):
    """It answers with the logits of the run, and finds the items that the run ranks first."""
    run = trained(tmp_path, GRAPH | more, train={"epochs": 2})
    path, rows = run.folder.path, pq.read_table(tmp_path / "rows.parquet").slice(0, 300)
    pq.write_table(rows, tmp_path / "some.parquet")
    exported = export(path, tmp_path / "served", warn=lambda _: None)
    assert exported.items.items == len(set(pq.read_table(tmp_path / "rows.parquet")["item"].to_pylist()))
    small = export(path, tmp_path / "small", rows=RowType.INT8, warn=lambda _: None)
    assert small.served.parts.tables[0].row_type is RowType.INT8
    (tmp_path / "rows.parquet").unlink()
    version = open_version(tmp_path / "served")
    assert version.identity == "exact"
    predict(
        open_predictor(tmp_path / "served"),
        RowSelection(open_reader(f"parquet:{tmp_path}/some.parquet")),
        tmp_path / "a.parquet",
    )
    towers = run.model.eval().towers
    with torch.inference_mode():
        users_UD, items_ID = towers.node_vectors()
        scores_UI = towers.scores(users_UD, items_ID)
    users_R, items_R = (torch.tensor(rows[name].to_pylist()) for name in ("user", "item"))
    logits_R = torch.tensor(pq.read_table(tmp_path / "a.parquet")["met_logit"].to_pylist())
    torch.testing.assert_close(logits_R, scores_UI[users_R, items_R], rtol=1e-6, atol=1e-6)
    query = version.retriever.read(RetrieveBody({"user": 3}, 5, None, [], True))
    found = version.retriever.answer(query)
    assert set(found.items) <= set(scores_UI[3].topk(20).indices.tolist())
    torch.testing.assert_close(torch.tensor(found.scores) / towers.temperature, scores_UI[3, torch.tensor(found.items)])


def test_a_graph_of_mapped_ids_is_exported_with_a_row_for_each_id(tmp_path):
    tables = copy.deepcopy(BASE["tables"])
    tables["list"][0]["id_map"] = {"kind": "hash", "rows": 50}
    run = trained(tmp_path, GRAPH, train={"epochs": 1, "steps": 4}, tables=tables)
    export(run.folder.path, tmp_path / "served", which="last", warn=lambda _: None)
    assert open_version(tmp_path / "served").identity == "exact"


def test_what_a_graph_cannot_be_is_refused(tmp_path):
    for changes, text in (
        ({"user": "nobody"}, "graph: no feature nobody; there are user, item, kind"),
        ({"user": "item"}, "graph: feature item is in both towers"),
        ({"layers": 0}, "model.layers=0: expected at least 1"),
        ({"sampled": 0}, "model.sampled=0: expected at least 1"),
        ({"sampled": 5_000_000}, "max_edges=5000000: expected 1 to 4,194,304 edges into a node"),
    ):
        with pytest.raises(SpecError, match=text):
            trained(tmp_path, GRAPH | changes)
    with pytest.raises(SpecError, match=r"train.determinism=elastic"):
        trained(tmp_path, GRAPH, train={"determinism": "elastic"})


def test_users_and_items_without_a_pair_have_a_vector(tmp_path):
    folder = tmp_path / "few"
    folder.mkdir()
    columns = {"user": [0, 1, 0, 2] * 50, "item": [3, 3, 4, 7] * 50, "kind": [0] * 200, "met": [1, 1, 1, 0] * 50}
    numbers = {name: [0.5] * 200 for name in ("price", "age")} | {"row": list(range(200))}
    pq.write_table(pa.table(columns | numbers), folder / "rows.parquet")
    run = trained(folder, GRAPH, train={"epochs": 1, "batch": 16}, evaluate={"metric": "recall@5"})
    users_UD, items_ID = run.model.towers.node_vectors()
    assert (len(users_UD), len(items_ID)) == (USERS, ITEMS)
    assert users_UD.isfinite().all()
    page = (run.folder.path / "report.html").read_text()
    assert f"<td>0</td><td>{USERS - 2}</td><td>{ITEMS - 2}</td>" in page


@pytest.mark.parametrize("label", [0, 1])
def test_rows_whose_labels_are_all_equal(tmp_path, label):
    """Without a pair there is no edge, and nothing to learn or to rank."""
    write_meetings(tmp_path / "rows.parquet", 1500)
    rows = pq.read_table(tmp_path / "rows.parquet")
    place = rows.column_names.index("met")
    pq.write_table(rows.set_column(place, "met", pa.array([label] * len(rows))), tmp_path / "rows.parquet")
    run = trained(tmp_path, GRAPH, train={"epochs": 1})
    users_UD, items_ID = run.model.towers.node_vectors()
    assert users_UD.isfinite().all()
    assert items_ID.isfinite().all()
    assert (len(run.model.towers.graph.sources_E) > 0) == (label == 1)
    page = (run.folder.path / "report.html").read_text()
    check(page)
    assert (evaluate(run.folder.path).tasks["met"]["count"] > 0) == (label == 1)


def with_pictures(folder):
    model = copy.deepcopy(BASE["model"])
    return model | {"item_features": [], "item_pictures": {"folder": str(folder), "dim": 8, "widths": [8, 8]}}


def test_pictures_tell_what_users_like(tmp_path):
    """Items have no feature but their picture, whose colour is their kind; half of the items are in no training row."""
    pictures, colours = [], np.random.default_rng(1).integers(0, 256, (KINDS, 3), dtype=np.uint8)
    for item in range(ITEMS - 1):  # the last one has none
        file = io.BytesIO()
        Image.new("RGB", (20, 20), tuple(colours[item % KINDS].tolist())).save(file, "PNG")
        pictures.append((item, file.getvalue()))
    write_pictures(tmp_path / "pictures", pictures, (8, 16))
    run = trained(tmp_path, with_pictures(tmp_path / "pictures"), train={"epochs": 4})
    path, metrics = measured(run)
    assert metrics["recall@20"] > 2.5 * 20 / ITEMS
    page = (path / "report.html").read_text()
    check(page)
    assert "1 items have no picture" in page
    assert "<td>8 x 8</td>" in page


def with_choice(folder, **choose):
    """A recipe over pictures of which half are of one colour, and the others need their largest size."""
    draw, pictures = np.random.default_rng(2), []
    for item in range(ITEMS):
        pixels = np.full((32, 32, 3), item * 2, np.uint8)
        if item % 2:
            pixels[::2, ::2] = draw.integers(0, 256, 3)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        pictures.append((item, file.getvalue()))
    write_pictures(folder, pictures, (8, 16, 32), similar=0.999)
    model = with_pictures(folder)
    model["item_pictures"] |= {"sizes": [8, 32], "choose": {"widths": [8], **choose}}
    return model


@pytest.mark.slow
def test_a_scale_model_chooses_sizes_and_goes_on_to_the_same_bits(tmp_path):
    model = with_choice(tmp_path / "pictures", price=1.0, similar=0.999)
    whole = trained(tmp_path, model, train={"epochs": 3})
    short = trained(tmp_path, model, train={"epochs": 3, "steps": 9}, save={"every": 9})
    again = TrainingRun.resume(short.folder.path, changes=["train.steps=null"])
    again.go()
    assert same_weights(whole, again)
    for run in (whole, again):
        page = (run.folder.path / "report.html").read_text()
        check(page)
        assert "in evaluation the size that the scale model chooses" in page
        assert "of the largest size" in page
        assert "16 x 16" not in page
    chosen = json.loads((whole.folder.path / "towers.json").read_text())["pictures"]["chosen"]
    item = whole.model.towers.item
    item.eval()
    places = item.pictures.choose(item.copies.read(torch.arange(ITEMS), 8))
    assert chosen["shares"] == pytest.approx([float((places == place).float().mean()) for place in (0, 1)])
    bytes_N = [int(item.copies.folder.bytes_of(np.array([n]), (8, 32)[p])[0]) for n, p in enumerate(places.tolist())]
    assert chosen["bytes"] == np.mean(bytes_N)
    assert chosen["bytes"] <= item.copies.folder.bytes_of(np.arange(ITEMS), 32).mean()
    assert 0 < chosen["shares"][0] < 1


@pytest.mark.slow
def test_a_version_chooses_sizes_as_its_run(tmp_path):
    run = trained(tmp_path, with_choice(tmp_path / "pictures", price=0.5), train={"epochs": 1})
    predict_rows(run.folder.path, tmp_path / "run.parquet")
    exported = export(run.folder.path, tmp_path / "served", warn=lambda _: None)
    (tmp_path / "pictures").rename(tmp_path / "elsewhere")
    version = open_version(tmp_path / "served")
    assert version.identity == "exact"
    predictor = open_predictor(tmp_path / "served")
    predict(predictor, run.resolved.rows.test, tmp_path / "version.parquet")
    assert pq.read_table(tmp_path / "run.parquet").equals(pq.read_table(tmp_path / "version.parquet"))
    assert exported.items.items == ITEMS


@pytest.mark.slow
def test_a_version_has_the_pictures_of_its_items(tmp_path):
    write_small_pictures(tmp_path / "pictures", ITEMS)
    run = trained(tmp_path, with_pictures(tmp_path / "pictures"), train={"epochs": 1})
    predict_rows(run.folder.path, tmp_path / "p.parquet")
    export(run.folder.path, tmp_path / "served", warn=lambda _: None)
    (tmp_path / "pictures").rename(tmp_path / "elsewhere")
    assert open_version(tmp_path / "served").identity == "exact"


def test_pictures_need_ids_that_are_row_numbers(tmp_path):
    write_small_pictures(tmp_path / "pictures", 60)
    model, columns = with_pictures(tmp_path / "pictures"), copy.deepcopy(BASE["columns"])
    columns["sparse"][1]["ids"] = "hash"
    chooses = copy.deepcopy(model)
    chooses["item_pictures"]["choose"] = {}
    with pytest.raises(SpecError, match=r"item_pictures\.choose"):
        trained(tmp_path, chooses, train={"dense_parallel": {"kind": "full"}})
    with pytest.raises(SpecError, match="hashed or mapped ids"):
        trained(tmp_path, model, columns=columns)
    run = trained(tmp_path, model, train={"epochs": 1, "steps": 2})
    (note,) = [line for line in run.resolved.notes if "pictures" in line]
    assert "60 of 120 items have no picture" in note
    prefixes = PictureFolder.open(tmp_path / "pictures").bytes_of(np.arange(60), 16).sum()  # to be continued
    assert dry_run(run.resolved.recipe).pictures_bytes == ITEMS * 3 * (8**2 + 16**2) + prefixes
    memory = replace(measure_memory(run.resolved, solo()), free_H=(134_000,))
    assert memory.needed_bytes(0) > 134_000 > replace(memory, pictures_bytes=0).needed_bytes(0)
    with pytest.raises(TableMemoryError, match=r"129\.8 kB for decoded"):
        raise_if_short(memory)


def test_pictures_that_cannot_be(tmp_path):
    write_small_pictures(tmp_path / "pictures", 3)
    for changes, text in (
        ({"folder": str(tmp_path)}, "is no folder of pictures"),
        ({"dim": 0}, "model.item_pictures: dim=0"),
        ({"widths": []}, r"widths=\[\]: expected a dim"),
        ({"sizes": [16, 8]}, r"sizes=\[16, 8\]: expected each size once"),
        ({"sizes": [8, 64]}, "has no copies of size 64: expected some of 8, 16"),
        ({"sizes": [8], "choose": {}}, "with one size, 8: expected several of 8, 16"),
        ({"choose": {"price": 2.0}}, "price=2.0, similar=0.95: expected a price from 0 to 1"),
        ({"choose": {"widths": []}}, r"choose: widths=\[\]: expected widths of"),
    ):
        model = with_pictures(tmp_path / "pictures")
        model["item_pictures"] |= changes
        with pytest.raises(Exception, match=text):
            trained(tmp_path, model)
