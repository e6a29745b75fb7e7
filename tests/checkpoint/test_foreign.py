"""Weights of other programs become a checkpoint that training starts from; ours become theirs."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch
from checkpoint.made import TABLES, same, saved
from safetensors.torch import save_file
from torch import nn

from rowwise import CheckpointError, Embeddings, Table
from rowwise.checkpoint import windows as seen
from rowwise.checkpoint.export import export_torch, load_window, own_names, torchrec_names
from rowwise.checkpoint.foreign import import_matched, match, open_source
from rowwise.checkpoint.read import Checkpoint
from rowwise.tables.spec import RowType
from rowwise.train.snapshot import warm_start

TORCHREC = pytest.mark.skipif(find_spec("torchrec") is None, reason="needs the extra 'peers'")


class Net(nn.Module):
    """What training starts."""

    def __init__(self, tables):
        super().__init__()
        self.embeddings = Embeddings(tables)
        self.top = nn.Linear(4, 3)


@pytest.fixture
def theirs():
    """Another program's weights, under its names."""
    g = torch.Generator().manual_seed(3)
    return {
        "emb_l.0.weight": torch.randn(50, 8, generator=g),
        "emb_l.1.weight": torch.randn(20, 4, generator=g).half(),
        "top_l.0.weight": torch.randn(3, 4, generator=g),
        "top_l.0.bias": torch.randn(3, generator=g),
        "steps": torch.tensor(5),
    }


MAPS = ("emb_l.*.weight=table:C*", "top_l.0.weight=top.weight", "top_l.0.bias=top.bias")


FORMATS = {
    "pt": ("it.pt", torch.save),
    "old pt": ("old.pth", partial(torch.save, _use_new_zipfile_serialization=False)),
    "nested": ("it.pt", lambda tensors, path: torch.save({"epoch": 3, "state": tensors}, path)),
    "safetensors": ("it.safetensors", save_file),
}


def written(tensors, folder, kind="pt"):
    name, write = FORMATS[kind]
    write(tensors, folder / name)
    return folder / name


@pytest.mark.parametrize("kind", FORMATS)
def test_training_starts_from_what_was_imported(tmp_path, theirs, monkeypatch, kind):
    monkeypatch.setattr(seen, "WINDOW_bytes", 200)
    source = open_source(written(theirs, tmp_path, kind))
    lead = "state." if kind == "nested" else ""
    found = match(source, [lead + text for text in MAPS])
    assert found.left == (f"{lead}steps",)
    import_matched(source, found, tmp_path / "start")
    start = Checkpoint.open(tmp_path / "start")
    assert start.find_damage() == []
    assert start.entry("model/embeddings.C1").row_type is RowType.FP16
    model = Net((Table(name="C0", rows=50, dim=8), Table(name="C1", rows=30, dim=4), Table(name="new", rows=3, dim=4)))
    told = warm_start(start, model)
    assert set(told.loaded) == {"model/embeddings.C0", "model/top.weight", "model/top.bias"}
    assert told.grown == {"model/embeddings.C1": "20 of 30 rows, 20 saved"}
    assert same(model.embeddings.table("C0"), theirs["emb_l.0.weight"])
    assert same(model.embeddings.weights("C1")[:20], theirs["emb_l.1.weight"].float())
    assert same(model.top.bias.detach(), theirs["top_l.0.bias"])


def test_torchrecs_names_are_known(tmp_path):
    tensors = {
        "model.sparse_arch.embedding_bag_collection.embedding_bags.user.weight": torch.randn(5, 4),
        "seq.embeddings.item.weight": torch.randn(6, 4, dtype=torch.float64),
        "model.over_arch.weight": torch.randn(2, 2),
    }
    source = open_source(written(tensors, tmp_path))
    found = match(source)
    assert [(one.target, one.table, one.kind) for one in found.taken] == [
        ("model/embeddings.user", "user", "fp32"),
        ("model/embeddings.item", "item", "fp32"),
    ]
    assert found.left == ("model.over_arch.weight",)
    by_hand = match(source, ["seq.embeddings.item.weight=table:goods"], "sparse.tables")
    assert [one.target for one in by_hand.taken] == ["model/sparse.tables.user", "model/sparse.tables.goods"]
    import_matched(source, match(source, path=""), tmp_path / "start")
    start = Checkpoint.open(tmp_path / "start")
    assert same(start.load("model/item"), tensors["seq.embeddings.item.weight"].float())


@pytest.mark.parametrize(
    ("maps", "want"),
    [
        ((), r"no tensor has a TorchRec table name; name the tables .* --map OLD=table:NAME; there are emb_l\.0"),
        (("emb_1.0.weight=table:a",), r"has no tensor 'emb_1\.0\.weight'; did you mean 'emb_l\.0\.weight'\?"),
        (
            ("top_l.0.bias=table:a",),
            r"'top_l\.0\.bias' cannot be table 'a': got \(3,\) of float32: expected rows x",
        ),
        (("steps=table:a",), r"'steps' cannot be table 'a': got \(\) of int64"),
        (("emb_l.*.weight=table:a",), r"'emb_l\.0\.weight' and 'emb_l\.1\.weight' are both 'model/embeddings\.a'"),
        (("emb_l.0.weight",), "expected OLD=table:NAME or OLD=NEW"),
        (("emb_l.0.weight=table:",), "expected OLD=table:NAME or OLD=NEW"),
        (("emb_l.0.weight=table:a*",), "with at most one \\* in each"),
        (
            ("emb_l.0.weight=table:a.b",),
            "expected a name without dots.*give another name: --map emb_l.0.weight",
        ),
    ],
)
def test_a_map_that_cannot_be(tmp_path, theirs, maps, want):
    source = open_source(written(theirs, tmp_path))
    with pytest.raises(CheckpointError, match=want):
        match(source, maps)


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda at: None, "no such file: expected a file of torch.save"),
        (lambda at: at.write_bytes(b"nothing of the kind"), "cannot be read: "),
        (lambda at: torch.save({"lr": 0.1}, at), "holds a dict without tensors: expected a state dict"),
        (
            lambda at: torch.save(nn.Linear(2, 2), at),
            r"cannot be read: .*expected a state dict: torch.save\(",
        ),
    ],
    ids=["missing", "garbage", "no tensors", "a whole model"],
)
def test_a_file_that_cannot_be_read(tmp_path, make, want):
    make(tmp_path / "it.pt")
    with pytest.raises(CheckpointError, match=want) as met:
        open_source(tmp_path / "it.pt")
    assert "\n" not in str(met.value)


def test_a_safetensors_file_that_cannot_be_read(tmp_path):
    (tmp_path / "it.safetensors").write_bytes(b"12345678901234567890")
    with pytest.raises(CheckpointError, match="cannot be read: "):
        open_source(tmp_path / "it.safetensors")


def test_what_was_exported_comes_back(tmp_path):
    first = saved(tmp_path / "three")
    export_torch(first, tmp_path / "it.pt", own_names(first))
    source = open_source(tmp_path / "it.pt")
    import_matched(source, match(source, ["embeddings.*=table:*", "top.*=top.*"]), tmp_path / "start")
    start = Checkpoint.open(tmp_path / "start")
    assert set(start.names()) == {name for name in first.names() if name.startswith("model/")}
    assert same(start.load("model/top.weight"), first.load("model/top.weight"))
    for name in (f"model/embeddings.{table.name}" for table in TABLES):
        assert same(start.load(name), load_window(first, name, (0, first.entry(name).rows)))


@TORCHREC
@pytest.mark.filterwarnings("ignore")
def test_torchrec_loads_what_we_write_and_gives_it_back(tmp_path):
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

    first = saved(tmp_path / "three")
    pooled, sequence = TABLES[:3], TABLES[3]

    class Theirs(nn.Module):
        def __init__(self):
            super().__init__()
            configs = [
                EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name])
                for t in pooled
            ]
            self.bags = EmbeddingBagCollection(tables=configs)
            t = sequence
            one = EmbeddingConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name])
            self.lists = EmbeddingCollection(tables=[one])

    model = Theirs()
    names = torchrec_names(first, [t.name for t in pooled], prefix="bags.")
    names |= torchrec_names(first, [sequence.name], [sequence.name], prefix="lists.")
    export_torch(first, tmp_path / "it.pt", names)
    model.load_state_dict(torch.load(tmp_path / "it.pt", weights_only=True))
    bare = torchrec_names(first, [t.name for t in pooled])
    export_torch(first, tmp_path / "bags.pt", bare)
    model.bags.load_state_dict(torch.load(tmp_path / "bags.pt", weights_only=True))
    torch.save(model.state_dict(), tmp_path / "theirs.pt")
    source = open_source(tmp_path / "theirs.pt")
    import_matched(source, match(source), tmp_path / "start")
    start = Checkpoint.open(tmp_path / "start")
    for name in (f"model/embeddings.{table.name}" for table in TABLES):
        assert same(start.load(name), load_window(first, name, (0, first.entry(name).rows)))
