"""Items that a version of two towers retrieves: the bits of an exact search, by an index or not, behind a server."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launching import wait_for
from mutations import flip
from pyarrow import parquet as pq
from serving import ask, quiet_server, server
from small import WORLD, trained
from towers import MANY, SETTINGS, TOWERS, contexts, tables, trained_towers, write_item_table

from rowwise import CheckpointError, DataError, RowType, SpecError
from rowwise.recipes.export import export
from rowwise.recipes.export_items import ItemOptions, describe_items
from rowwise.recipes.served import open_version
from rowwise.recipes.trained import load_trained
from rowwise.serve.client import ScoringClient
from rowwise.serve.items import FACTS, INDEX, ITEMS, RETRIEVAL, VECTORS
from rowwise.serve.package import version_folder, write_traffic
from rowwise.serve.record import REQUEST, SCORES
from rowwise.serve.traffic import Traffic
from rowwise.tables.ops import reference


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A run whose versions have the items of its training rows."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("few")
    run = trained_towers(folder)
    return run, export(run, folder / "models")


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Versions of one run with an index: as trained, and in int8."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("many")
    run, file = trained_towers(folder, MANY), write_item_table(folder / "items.parquet")
    options = ItemOptions(str(file), recall=0.95)
    first = export(run, folder / "models", items=options)
    second = export(run, folder / "models", rows=RowType.INT8, items=options)
    return run, folder / "models", first, second


@pytest.fixture(scope="module")
def netloc(many):
    """The address of a server of the second version."""
    with quiet_server(many[1]) as address:
        yield address


def all_dots(retriever, context):
    """The user's dot with each item, by the reference."""
    from rowwise.serve.retrieval import RetrieveBody

    query = retriever.read(RetrieveBody(context))
    return reference.dots(retriever.vectors([query.rows])[0][0], retriever.items.vectors_ID).numpy()


def sorted_items(retriever, context, k):
    """Keys and scores of the best items, as a sort of all dots finds them."""
    dots_I = all_dots(retriever, context)
    best = np.argsort(-dots_I, kind="stable")[:k].tolist()
    return [retriever.items.keys[place].as_py() for place in best], [float(dots_I[place]) for place in best]


def test_items_of_the_training_rows(few):
    run, written = few
    resolved, model = load_trained(run, "best")
    retriever = open_version(written.folder.path).retriever
    keys = retriever.items.keys.to_pylist()
    assert sorted(keys) == sorted(set(keys))
    assert set(keys) <= set(range(30))
    assert written.items.index is None
    assert describe_items(written.items) == [f"{len(keys)} items, vectors of 8 numbers: all are searched"]
    table = pq.read_table(written.folder.path / RETRIEVAL / ITEMS)
    assert table.column_names == ["item", "d1"]
    with torch.no_grad():
        towers, table_rows = model.towers, WORLD.rows(90_000, 20)
        rows = {name: table_rows[name].to_pylist() for name in ("user", "seen", "d0")}
        for row in range(20):
            context = {name: values[row] for name, values in rows.items()}
            found = retriever.retrieve(context, 7)
            assert (found.items, found.scores) == sorted_items(retriever, context, 7)
            assert found.exact
        # The vectors are those of the model.
        item_B, d1_B = torch.tensor(keys), torch.tensor(table["d1"].to_pylist())
        rows_BD = towers.item.embeddings.weights("item")[item_B]
        wanted_BD = torch.nn.functional.normalize(towers.item.layers(torch.cat((d1_B.float()[:, None], rows_BD), 1)))
    torch.testing.assert_close(retriever.items.vectors_ID, wanted_BD)
    assert resolved.recipe.name == "small"


def test_filters_and_sizes(few):
    retriever = open_version(few[1].folder.path).retriever
    (context,) = contexts(1)
    keys, scores = sorted_items(retriever, context, 30)
    count = len(keys)
    assert retriever.retrieve(context, 1000)[:2] == (keys, scores)  # fewer than are asked for
    found = retriever.retrieve(context, 3, among=[keys[4], keys[2], 999, keys[2], None])
    assert (found.items, found.unknown) == ([keys[2], keys[4]], 2)
    found = retriever.retrieve(context, 3, without=[keys[0], keys[2], 777])
    assert (found.items, found.unknown) == ([keys[1], keys[3], keys[4]], 1)
    found = retriever.retrieve(context, count, among=keys[:4], without=[str(keys[1]), keys[8]])
    assert found.items == [keys[0], keys[2], keys[3]]
    assert retriever.retrieve(context, among=[]).items == []
    assert retriever.retrieve(context, without=keys).items == []


@pytest.mark.slow
def test_an_index_proposes_and_dots_decide(many):
    """Scores are those of an exact search, and as many of the best are found as was measured."""
    _, _, first, second = many
    for written in (first, second):
        retriever, index = open_version(written.folder.path).retriever, written.items.index
        assert written.items.items == MANY
        assert [one.k for one in index.chosen] == [10, 100, 1000]
        for one in index.measured:
            assert 0 <= one.recall <= 1
            assert one.recall >= 0.95 or one.probes < index.probes_for(one.k)
        found = wanted = 0
        for context in contexts(80):
            near = retriever.retrieve(context, 100)
            assert not near.exact
            exact = retriever.retrieve(context, 100, exact=True)
            assert exact.exact
            dots = dict(zip(retriever.items.keys.to_pylist(), all_dots(retriever, context).tolist(), strict=True))
            assert (exact.items, exact.scores) == sorted_items(retriever, context, 100)
            assert near.scores == [dots[key] for key in near.items]
            assert near.scores == sorted(near.scores, reverse=True)
            found += len(set(near.items) & set(exact.items))
            wanted += 100
        assert found >= 0.9 * wanted  # of other users than those that .95 was measured by
        lines = describe_items(written.items)
        assert lines[0].startswith(f"{MANY:,} items, vectors of 8 numbers, in 128 lists; recall on ")
        assert "".join(lines).count("(chosen)") == 3


@pytest.mark.slow
def test_searches_that_an_index_cannot_answer_are_exact(many):
    retriever = open_version(many[2].folder.path).retriever
    (context,) = contexts(1)
    keys, scores = sorted_items(retriever, context, 3000)
    found = retriever.retrieve(context, 3000)  # of so many the recall is not known
    assert (found.items, found.scores, found.exact) == (keys, scores, True)
    found = retriever.retrieve(context, 5, among=keys[100:2000])
    assert (found.items, found.exact) == (keys[100:105], True)
    found = retriever.retrieve(context, 5, without=keys[:2000])
    assert (found.items, found.exact) == (keys[2000:2005], True)
    found = retriever.retrieve(context, 5, without=keys[:20])
    assert not found.exact
    assert not set(found.items) & set(keys[:20])
    assert found.items[0] in keys[20:40]


@pytest.mark.slow
def test_a_server_answers_the_same(many, netloc):
    """From several clients at once, with filters and without."""
    retriever = open_version(many[3].folder.path).retriever
    keys = retriever.items.keys.to_pylist()

    def go(seed):
        draw = np.random.default_rng(seed)
        with ScoringClient(f"http://{netloc}", timeout_s=60) as client:
            for context in contexts(12, 91_000 + 12 * seed):
                k, exact = int(draw.choice([1, 10, 100, 1500])), bool(draw.integers(2))
                some = draw.choice(keys, 50).tolist()
                filters = [{}, {"among": some}, {"without": [*some, MANY + 5]}][draw.integers(3)]
                answer = client.retrieve(context, k, exact=exact, **filters)
                wanted = retriever.retrieve(context, k, exact=exact, **filters)
                assert (answer.items, answer.scores, answer.unknown) == (wanted.items, wanted.scores, wanted.unknown)
                assert answer.version == 2

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(go, range(4)))
    with ScoringClient(f"http://{netloc}", timeout_s=60) as client:
        about = client.versions()["retrieval"]
    assert (about["key"], about["items"], about["dim"]) == ("item", MANY, 8)
    assert about["context"].keys() == {"user", "seen", "d0"}
    assert about["index"]["recall"] == 0.95


def retrieved(netloc, body, path="/v1/models/small/retrieve", **headers):
    code, _, answer = ask(netloc, path, body if isinstance(body, bytes) else json.dumps(body).encode(), **headers)
    return code, json.loads(answer)


@pytest.mark.slow
def test_what_bad_requests_are_told(netloc):
    (context,) = contexts(1)

    def told(*of, **headers):
        code, answer = retrieved(netloc, *of, **headers)
        return code, answer.get("error", "")

    code, answer = retrieved(netloc, {"context": context, "k": 2, "without": ["7"]})
    assert (code, answer["model"], answer["version"], len(answer["items"])) == (200, "small", 2, 2)
    assert told({"context": context}, "/v1/models/small/versions/2/retrieve")[0] == 200
    assert told({"context": context}, "/v1/models/small/versions/9/retrieve")[0] == 404
    assert told({"context": context}, "/v1/models/big/retrieve") == (404, "no model 'big': expected 'small'")
    for k in (0, -3, 20_000):
        assert told({"context": context, "k": k}) == (400, f"request: k={k}: expected 1 to 16384 items")
    for body in (b"{", b"[]", {"k": 3}, {"context": 3}, {"context": context, "n": 3}, {"context": context, "k": "x"}):
        code, error = told(body)
        assert code == 400
        assert error.endswith('expected JSON such as {"context": {...}, "k": 100}')
    code, error = told({"context": {name: context[name] for name in ("seen", "d0")}})
    assert code == 400
    assert "no column 'user'" in error
    code, error = told({"context": context | {"user": 50}})
    assert code == 400
    assert error.startswith("request: row 0, column 'user': id 50: expected 0 to 49")
    code, error = told({"context": context | {"user": [1, 2]}})
    assert code == 400
    code, error = told({"context": context, "among": [1, 2.5]})
    assert (code, error) == (
        400,
        "request: row 1, column 'item': 2.5: expected a whole number of int64, or null in 'among'",
    )
    assert told({"context": context}, **{"x-timeout-ms": "soon"})[0] == 400


@pytest.mark.slow
def test_a_bad_request_leaves_its_neighbours_alone(netloc):
    (context,) = contexts(1)

    def go(number):
        bad = number % 2
        return [retrieved(netloc, {"context": context | {"user": 50 if bad else 3}}) for _ in range(9)]

    with ThreadPoolExecutor(6) as pool:
        for number, found in enumerate(pool.map(go, range(6))):
            assert {code for code, _ in found} == {400 if number % 2 else 200}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["user", "seen", "d0", "x"]), inner, max_size=4)
            | st.dictionaries(st.sampled_from(["context", "k", "among", "without", "exact"]), inner, max_size=5)
        ),
        max_leaves=12,
    )
)
def test_any_json_is_a_query_or_refused(few, body):
    retriever = open_once(few[1].folder.path)
    (context,) = contexts(1)
    of_user, of_filter = {"context": context | {"user": body}}, {"context": context, "among": [body]}
    for value in (body, {"context": body}, of_user, of_filter):
        with suppress(DataError):  # anything else is a bug
            retriever.read_json(json.dumps(value).encode())


@cache
def open_once(path):
    return open_version(path).retriever


@pytest.mark.slow
def test_text_keys_one_item_and_no_items(tmp_path):
    rows = WORLD.rows(0, 600).drop_columns(["logit"])
    names = [f"i{key}" for key in rows["item"].to_pylist()]
    table = rows.set_column(rows.column_names.index("item"), "item", pa.array(names))
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=200)
    sparse = [{"column": name, "ids": "hash" if name == "item" else "direct"} for name in ("user", "item", "seen")]
    columns = {"labels": ["label"], "sparse": sparse, "dense": [{"column": "d0"}, {"column": "d1"}], "key": "row"}
    run, _ = trained(tmp_path, model=TOWERS, tables=tables(64), columns=columns, **SETTINGS)
    retriever = open_version(export(run.folder.path, tmp_path / "models").folder.path).retriever
    (context,) = contexts(1)
    keys, scores = sorted_items(retriever, context, 5)
    assert all(key[0] == "i" for key in keys)
    assert retriever.retrieve(context, 5)[:2] == (keys, scores)
    assert retriever.retrieve(context, 5, among=[keys[1], "nope"])[:3] == ([keys[1]], [scores[1]], 1)
    with pytest.raises(DataError, match="0, column 'item': 7"):
        retriever.retrieve(context, 5, among=[7])

    def exported(items, **more):
        pq.write_table(pa.table(items), tmp_path / "items.parquet")
        options = ItemOptions(str(tmp_path / "items.parquet"))
        return export(run.folder.path, tmp_path / "models", items=options, **more)

    one = open_version(exported({"item": ["i3"], "d1": [0.5]}).folder.path).retriever
    assert one.retrieve(context).items == ["i3"]
    for items, message in (
        (
            {"item": pa.array([], pa.string()), "d1": pa.array([], pa.float64())},
            "has no rows: expected at least one item",
        ),
        ({"item": ["i3"], "d2": [0.5]}, "no column 'd1', which the items' tower reads; there are item, d2"),
        ({"item": ["i3", "i3"], "d1": [0.5, 1]}, "key 'i3' occurs twice"),
        ({"item": ["i3", None], "d1": [0.5, 1]}, "has 1 null keys"),
        ({"item": ["i3"], "d1": ["x"]}, "expected the types of the training data"),
        ({"item": ["i3", "i4"], "d1": [0.5, np.inf]}, "items: row 1, column 'd1': inf"),
    ):
        with pytest.raises(DataError, match=message):
            exported(items)


def test_a_version_whose_items_are_damaged_is_refused(many, tmp_path, command):
    _, _, first, _ = many
    copy = tmp_path / "000001"
    shutil.copytree(first.folder.path, copy)
    assert version_folder(first.folder.path.parents[1], 1).digest == first.digest
    for name in (VECTORS, INDEX, ITEMS):
        path = copy / RETRIEVAL / name
        content = path.read_bytes()
        flip(path, 100)
        with pytest.raises(CheckpointError, match=rf"{name} does not match its checksum; export the version again"):
            open_version(copy)
        code, out, _ = command("ckpt", "verify", str(copy), "--json")
        (one,) = json.loads(out)["checked"]
        assert (code, [damage["file"] for damage in one["damage"]]) == (1, [f"{RETRIEVAL}/{name}"])
        path.unlink()
        with pytest.raises(CheckpointError, match=rf"{name}: No such file or directory; export the version again"):
            open_version(copy)
        code, out, _ = command("ckpt", "verify", str(copy))
        assert (code, "is missing" in out) == (1, True)
        path.write_bytes(content)
    assert command("ckpt", "verify", str(copy))[0] == 0
    assert open_version(copy, first.digest).retriever is not None
    facts = copy / RETRIEVAL / FACTS
    facts.write_bytes(facts.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=r"retrieval\.json is damaged"):
        open_version(copy)


@pytest.mark.slow
def test_recorded_searches_are_computed_again(many, command):
    folder = many[1]
    records = folder.parent / "records"
    options = ("--workers", "1", "--record", str(records), "--record-share", "100%")
    with quiet_server(folder, *options) as address, ScoringClient(f"http://{address}") as client:
        for context in contexts(6):
            client.retrieve(context, 7)
            few = client.retrieve(context, 3, among=[5, 1, 2, 10**9])
            client.retrieve(context, 5, without=few.items, exact=True)
    code, out, err = command("audit", str(folder), str(records), "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["rows"], found["wrong"]) == (18, 0)
    (file,) = records.glob("*.parquet")
    table = pq.read_table(file)
    scores = table[SCORES].to_pylist()
    scores[4][0] = float(np.nextafter(np.float32(scores[4][0]), np.float32(9)))
    at = table.column_names.index(SCORES)
    pq.write_table(table.set_column(at, SCORES, [pa.array(scores, table[SCORES].type)]), file)
    code, _, err = command("audit", str(folder), str(records))
    assert code == 2
    assert f"request {table[REQUEST][4]}: answered" in err.replace("\n", "")


@pytest.mark.slow
def test_other_models_have_no_items(tmp_path, few):
    run, _ = trained(tmp_path, train={"epochs": 1})
    written = export(run.folder.path, tmp_path / "models")
    assert written.items is None
    assert open_version(written.folder.path).retriever is None
    for options in (ItemOptions("items.parquet"), ItemOptions(recall=0.5)):
        with pytest.raises(SpecError, match="has no item vectors"):
            export(run.folder.path, tmp_path / "models", items=options)
    with pytest.raises(SpecError, match=r"--recall 1\.5"):
        ItemOptions(recall=1.5)
    with server(tmp_path / "models", "--workers", "1") as (address, _):
        (context,) = contexts(1)
        code, answer = retrieved(address, {"context": context})
        assert code == 404
        assert answer["error"].startswith("version 1 of 'small' has no items to retrieve: expected a two-tower or")


def test_an_increment_has_vectors_of_its_own(few, tmp_path):
    """A later checkpoint, as an increment and as a full version: the same items and bits."""
    run, _ = few
    first = export(run, tmp_path / "models")
    second = export(run, tmp_path / "models", like=first.folder)
    full = export(run, tmp_path / "models", full=True)
    assert second.base == 1
    assert full.base is None
    found = [open_version(one.folder.path).retriever.items for one in (first, second, full)]
    for other in found[1:]:
        assert other.keys.equals(found[0].keys)
        assert torch.equal(other.vectors_ID, found[0].vectors_ID)


@pytest.mark.slow
def test_versions_change_while_clients_ask(many, tmp_path):
    """Each answer is that of the version that it names; a damaged version is refused."""
    models = tmp_path / "models"
    shutil.copytree(many[1], models)
    write_traffic(models, Traffic(1))
    asked = contexts(20)
    wanted = {
        number: [open_version(models, number=number).retriever.retrieve(context, 50)[:2] for context in asked]
        for number in (1, 2)
    }
    assert wanted[1] != wanted[2]
    with server(models, "--workers", "2") as (address, process), ThreadPoolExecutor(3) as pool:
        seen, stop = {1: 0, 2: 0}, []

        def go(seed):
            with ScoringClient(f"http://{address}", timeout_s=60) as client:
                while not stop:
                    for number, context in enumerate(asked):
                        answer = client.retrieve(context, 50)
                        assert (answer.items, answer.scores) == wanted[answer.version][number]
                        seen[answer.version] += 1

        running = [pool.submit(go, seed) for seed in range(3)]
        try:
            for number in (2, 1, 2, 1):
                before = seen[number]
                write_traffic(models, Traffic(number))
                wait_for(lambda n=number, b=before: seen[n] > b + 60 or any(one.done() for one in running))
            vectors = version_folder(models, 2).path / RETRIEVAL / VECTORS
            flip(vectors)
            wait_for(lambda: "version 1" in process.stdout.readline())
            write_traffic(models, Traffic(2))
            wait_for(lambda: "items.vectors does not match its checksum" in process.stdout.readline())
        finally:
            stop.append(True)
        for one in running:
            one.result()
    assert min(seen.values()) > 60
