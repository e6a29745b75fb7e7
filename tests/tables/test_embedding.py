"""`Embeddings` is torch's own embedding modules, many at a time: same vectors, same training, ordinary state dicts.

The oracle is one `nn.EmbeddingBag` or `nn.Embedding` for each table. `test_optimizers` has the optimizers' own.
"""

import copy
import io
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import OPTIMIZERS as EVERY_OPTIMIZER
from problems import ROW_TYPES, Problem, make_problem, problems
from table_state import everything, same, with_optimizer, without_steps
from torch import nn

from rowwise import (
    Adagrad,
    Adam,
    BatchError,
    Constant,
    Embeddings,
    Ftrl,
    Jagged,
    Lamb,
    Normal,
    Pooling,
    RowType,
    RowWiseAdagrad,
    RowWiseAdam,
    Sgd,
    SpecError,
    StateError,
    Table,
    Uniform,
)
from rowwise.tables.ops.update import next_step

ops = torch.ops.rowwise
TABLES = (
    Table(name="sum", rows=40, dim=8, features=("s1", "s2"), init=Uniform(bound=0.1)),
    Table(name="mean", rows=30, dim=5, pooling=Pooling.MEAN, init=Uniform(bound=0.1)),
    Table(name="weighted", rows=50, dim=12, features=("w1", "w2"), pooling=Pooling.WEIGHTED, init=Uniform(bound=0.1)),
    Table(name="sequence", rows=20, dim=4, features=("q1", "q2"), pooling=Pooling.SEQUENCE, init=Uniform(bound=0.1)),
)


class Oracle(nn.Module):
    """The same tables as torch modules."""

    def __init__(self, embeddings: Embeddings):
        super().__init__()
        self.tables = embeddings.tables
        self.by_table = nn.ModuleDict()
        for table in self.tables:
            rows = embeddings.weights(table.name).clone()
            if table.pooling is Pooling.SEQUENCE:
                self.by_table[table.name] = nn.Embedding.from_pretrained(rows, freeze=False)
            else:
                mode = "mean" if table.pooling is Pooling.MEAN else "sum"
                self.by_table[table.name] = nn.EmbeddingBag.from_pretrained(rows, freeze=False, mode=mode)

    def forward(self, jagged: Jagged) -> dict[str, torch.Tensor]:
        return {name: self.one(table, name, jagged) for table in self.tables for name in table.feature_names}

    def one(self, table: Table, feature: str, jagged: Jagged) -> torch.Tensor:
        module = self.by_table[table.name]
        ids, offsets, weights = bags(jagged, feature)
        if table.pooling is Pooling.SEQUENCE:
            return module(ids)
        return module(ids, offsets, weights if table.pooling is Pooling.WEIGHTED else None)


def bags(jagged: Jagged, feature: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Ids, first positions and weights of one feature, as nn.EmbeddingBag takes them."""
    lengths_B, mine = jagged.lengths_of(feature).long(), slice(*jagged.id_ranges()[feature])
    weights = None if jagged.weights_N is None else jagged.weights_N[mine]
    return jagged.values_N[mine].long(), lengths_B.cumsum(0) - lengths_B, weights


def names(embeddings: Embeddings) -> list[str]:
    return [f for t in embeddings.tables for f in t.feature_names]


def vectors(embeddings: Embeddings, jagged: Jagged) -> dict[str, torch.Tensor]:
    found = embeddings(jagged)
    return {name: found[name] for name in names(embeddings)}


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name in found:
        torch.testing.assert_close(
            found[name], wanted[name], atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def loss_of(found: dict[str, torch.Tensor]) -> torch.Tensor:
    """Something smooth that depends on every number differently."""
    return sum((((x - 0.1) ** 2) * torch.linspace(0.5, 1, x.numel()).view(x.shape)).sum() for x in found.values())


def train(embeddings: Embeddings, jagged: Jagged) -> None:
    loss_of(vectors(embeddings, jagged)).backward()
    embeddings.update()


def batch(seed=0, size=30, most=4, tables=TABLES) -> Jagged:
    return make_problem(tables, batch=size, most=most, seed=seed).jagged


def small_rows(problem: Problem) -> Embeddings:
    """Tables whose pooled sums stay small enough for an absolute tolerance."""
    tables = [msgspec.structs.replace(t, init=Uniform(bound=0.05)) for t in problem.tables]
    return Embeddings(tables, seed=problem.seed)


def single(**changes) -> Embeddings:
    return Embeddings([Table(**({"name": "t", "rows": 10, "dim": 4} | changes))])


# Looking up


@given(problem=problems(poolings=tuple(Pooling), max_batch=100))
def test_forward_is_torchs(problem):
    embeddings = small_rows(problem)
    close(vectors(embeddings, problem.jagged), Oracle(embeddings)(problem.jagged), 1e-6)


def test_forward_is_torchs_for_large_outputs(threads):
    """Outputs past the caches are written past them."""
    tables = [Table(name=f"t{k}", rows=500, dim=64, pooling=p) for k, p in enumerate((Pooling.SUM, Pooling.MEAN) * 2)]
    embeddings, jagged = Embeddings(tables), batch(size=6000, most=3, tables=tables)
    wanted = Oracle(embeddings)(jagged)
    for count in (1, 2, 4):
        threads(count)
        close(vectors(embeddings, jagged), wanted, 1e-6)


@given(problem=problems(poolings=tuple(Pooling), max_batch=40), data=st.data())
@settings(max_examples=15)
def test_the_order_of_features_in_the_batch_does_not_matter(problem, data):
    embeddings, jagged = small_rows(problem), problem.jagged
    order = data.draw(st.permutations(jagged.features))
    shuffled = samples(jagged, 0, jagged.batch_size, tuple(order))
    same(vectors(embeddings, shuffled), vectors(embeddings, jagged))


def test_features_without_a_table_are_ignored():
    bags_ = {name: [[1, 2], [], [3]] for name in ("a", "b")}
    embeddings = Embeddings([Table(name="a", rows=5, dim=4), Table(name="b", rows=5, dim=4, pooling=Pooling.SEQUENCE)])
    extra = {
        "first": [[10**12], [-1], []],
        "a": bags_["a"],
        "between": [[7] * 9, [], []],
        "b": bags_["b"],
        "last": [[], [], [-9]],
    }
    same(vectors(embeddings, Jagged.from_lists(extra)), vectors(embeddings, Jagged.from_lists(bags_)))


def test_ids_of_32_bits():
    embeddings, wide = Embeddings(TABLES), batch()
    narrow = replace(wide, values_N=wide.values_N.int(), lengths_FB=wide.lengths_FB.int())
    same(vectors(embeddings, narrow), vectors(embeddings, wide))
    other = Embeddings(TABLES)
    train(embeddings, narrow)
    train(other, wide)
    same(everything(embeddings), everything(other))


@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN, Pooling.SEQUENCE])
def test_empty_bags(pooling):
    embeddings = single(pooling=pooling)
    before = everything(embeddings)
    found = embeddings(Jagged.from_lists({"t": [[], [], []]}))["t"]
    assert torch.equal(found, torch.zeros(0 if pooling is Pooling.SEQUENCE else 3, 4))
    found.sum().backward()
    embeddings.update()
    same(without_steps(everything(embeddings)), without_steps(before))


def test_empty_batch():
    embeddings = Embeddings(TABLES)
    before = everything(embeddings)
    empty = batch(size=0)
    assert empty.batch_size == 0
    found = vectors(embeddings, empty)
    assert {name: tuple(x.shape) for name, x in found.items()} == {
        f: (0, t.dim) for t in embeddings.tables for f in t.feature_names
    }
    loss_of(found).backward()
    embeddings.update()
    same(without_steps(everything(embeddings)), without_steps(before))
    train(embeddings, batch())  # and the module still works


def test_an_empty_batch_adds_nothing_to_others():
    one, two = Embeddings(TABLES), Embeddings(TABLES)
    train(one, batch())
    for size in (0, 30, 0):
        loss_of(vectors(two, batch(size=size))).backward()
    two.update()
    same(everything(two), everything(one))


def test_strided_ids_and_weights_are_as_good_as_contiguous_ones():
    embeddings, jagged = Embeddings(TABLES), batch()

    def strided(x):
        return torch.stack([x, x], dim=1)[:, 0]

    spread = jagged.map_tensors(strided)
    assert not spread.values_N.is_contiguous()
    same(vectors(embeddings, spread), vectors(embeddings, jagged))


def test_keyed_tensors_of_others_are_taken():
    class Keyed:
        keys, values, weights_or_none = (lambda self, x=x: x for x in (["t"], torch.tensor([3, 4]), None))

        def lengths(self):
            return torch.tensor([1, 1])

    embeddings = single()
    assert torch.equal(embeddings(Keyed()).values(), embeddings.table("t")[3:5])


# What a lookup returns


def test_vectors():
    tables = [
        Table(name="a", rows=9, dim=4, features=("x", "y")),
        Table(name="q", rows=9, dim=3, pooling=Pooling.SEQUENCE),
    ]
    tables.append(Table(name="b", rows=9, dim=2))
    embeddings = Embeddings(tables)
    found = embeddings(Jagged.from_lists({"b": [[1], [2]], "q": [[3, 4], [5]], "y": [[6], [7]], "x": [[8], [0]]}))
    assert found.keys() == ["x", "y", "b"]
    assert found.values().shape == (2, 10)
    wanted = {
        "x": embeddings.table("a")[[8, 0]],
        "y": embeddings.table("a")[[6, 7]],
        "b": embeddings.table("b")[[1, 2]],
    }
    same(found.to_dict(), wanted)
    assert torch.equal(found.values(), torch.cat(list(wanted.values()), dim=1))
    assert torch.equal(found["q"], embeddings.table("q")[[3, 4, 5]])
    with pytest.raises(BatchError, match="'z'; there are x"):
        found["z"]


@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.SEQUENCE])
def test_vectors_of_one_kind_only(pooling):
    found = single(pooling=pooling)(Jagged.from_lists({"t": [[1], [2, 3]]}))
    assert found.keys() == ([] if pooling is Pooling.SEQUENCE else ["t"])
    assert found.values().shape == (2, 0 if pooling is Pooling.SEQUENCE else 4)
    assert list(found.sequences) == (["t"] if pooling is Pooling.SEQUENCE else [])


def test_table_is_a_view_and_refuses_unknown_names():
    embeddings = single()
    embeddings.table("t")[3] = 7
    assert embeddings.state_dict()["t"][3].tolist() == [7] * 4
    assert embeddings(Jagged.from_lists({"t": [[3]]}))["t"].tolist() == [[7] * 4]
    with pytest.raises(SpecError, match="table 'u'; the tables"):
        embeddings.table("u")


def test_repr_names_the_tables():
    assert "t: 10 x 4 fp32, mean, Sgd" in repr(single(pooling=Pooling.MEAN, optimizer=Sgd()))
    assert "t: 10 x 4 int8, sum, Adam" in repr(single(row_type="int8", optimizer=Adam()))


# Training


@given(problem=problems(poolings=tuple(Pooling), max_batch=100))
@settings(max_examples=20)
def test_one_step_of_sgd_is_torchs_for_any_tables(problem):
    tables = [
        msgspec.structs.replace(
            t, optimizer=Sgd(lr=0.01), init=Uniform(bound=0.05), row_type=RowType.FP32, column_group=None
        )
        for t in problem.tables
    ]
    embeddings = Embeddings(tables)
    oracle = Oracle(embeddings)
    jagged = problem.jagged
    scale = 1 / max(1, jagged.batch_size)
    (loss_of(vectors(embeddings, jagged)) * scale).backward()
    embeddings.update()
    (loss_of(oracle(jagged)) * scale).backward()
    torch.optim.SGD(oracle.parameters(), lr=0.01).step()
    close(dict(embeddings.state_dict()), {n: m.weight.detach() for n, m in oracle.by_table.items()}, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradient_of_per_id_weights_is_torchs(dtype):
    embeddings, jagged = Embeddings(TABLES), batch()
    oracle = Oracle(embeddings)
    grads = []
    for module in (lambda j: vectors(embeddings, j), oracle):
        leaf = jagged.weights_N.to(dtype).requires_grad_()
        seen = leaf.float()  # nn.EmbeddingBag wants the type of its rows
        loss_of(module(replace(jagged, weights_N=seen))).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5 if dtype != torch.bfloat16 else 1e-2)
    assert grads[0].count_nonzero() > 0
    direct = jagged.weights_N.to(dtype).requires_grad_()  # and without the caller's conversion
    loss_of(vectors(embeddings, replace(jagged, weights_N=direct))).backward()
    assert torch.equal(direct.grad, grads[0])


def test_weights_are_ignored_where_pooling_is_not_weighted():
    embeddings = Embeddings([t for t in TABLES if t.pooling is not Pooling.WEIGHTED])
    jagged = batch()
    leaf = jagged.weights_N.requires_grad_()
    train(embeddings, jagged)
    assert leaf.grad is None or not leaf.grad.any()
    other = Embeddings(embeddings.tables)
    train(other, replace(jagged, weights_N=None))
    same(everything(other), everything(embeddings))


# [Note: Staging]: nothing changes before `update`


def test_nothing_changes_before_update():
    embeddings = Embeddings(TABLES)
    before = everything(embeddings)
    loss_of(vectors(embeddings, batch())).backward()
    same(everything(embeddings), before)
    assert len(embeddings.staged) == 2  # pooled tables, and sequences
    embeddings.update()
    assert not embeddings.staged
    after = everything(embeddings)
    assert all(not torch.equal(after[t.name], before[t.name]) for t in TABLES)
    embeddings.update()  # nothing is left to apply
    same(everything(embeddings), after)


def test_discard():
    embeddings = Embeddings(TABLES)
    before = everything(embeddings)
    loss_of(vectors(embeddings, batch())).backward()
    embeddings.discard()
    embeddings.update()
    same(everything(embeddings), before)


def test_forward_without_backward_stages_nothing():
    embeddings = Embeddings(TABLES)
    vectors(embeddings, batch())
    assert not embeddings.staged


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_stages_nothing_and_sees_the_same_vectors(mode):
    embeddings, jagged = Embeddings(TABLES), batch()
    wanted = vectors(embeddings, jagged)
    with mode():
        found = vectors(embeddings, jagged)
        assert not any(x.requires_grad for x in found.values())
        same(found, wanted)
    assert not embeddings.staged
    train(embeddings, jagged)


def test_features_outside_the_loss_change_no_row_without_weight_decay():
    embeddings = Embeddings(with_optimizer(Sgd(lr=1.0), TABLES))
    before = everything(embeddings)
    embeddings(batch())["mean"].sum().backward()
    embeddings.update()
    after = everything(embeddings)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    # Whatever the loss left out, the pooled tables were updated together; sequences were not.
    assert changed == ["mean", "sum.step", "mean.step", "weighted.step"]


@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.SEQUENCE])
def test_gradients_need_not_be_contiguous(pooling):
    rows = {}
    for kind in ("expanded", "transposed", "plain"):
        embeddings = single(pooling=pooling, optimizer=Sgd(lr=1.0))
        out = embeddings(Jagged.from_lists({"t": [[1], [2], [3]]}))["t"]
        if kind == "expanded":
            out.sum().backward()
        else:
            out.backward(torch.ones(4, 3).t() if kind == "transposed" else torch.ones(3, 4))
        embeddings.update()
        rows[kind] = embeddings.table("t").clone()
    assert torch.equal(rows["expanded"], rows["plain"])
    assert torch.equal(rows["transposed"], rows["plain"])


def test_two_backwards_count_twice():
    one, two = (single(optimizer=Sgd(lr=1.0)) for _ in range(2))
    jagged = Jagged.from_lists({"t": [[1, 2], [2]]})
    out = one(jagged).values().sum()
    out.backward(retain_graph=True)
    out.backward()
    one.update()
    (two(jagged).values().sum() * 2).backward()
    two.update()
    assert torch.equal(one.table("t"), two.table("t"))


# Gradient accumulation


def samples(jagged: Jagged, begin: int, end: int, order=None) -> Jagged:
    """Some samples of a batch, with its features in another order if one is given."""
    lists = {name: [] for name in order or jagged.features}
    weights = []
    for name, of_samples in lists.items():
        ids, first, w = bags(jagged, name)
        ends = [*first.tolist(), len(ids)]
        of_samples += [ids[a:b].tolist() for a, b in pairwise(ends[begin : end + 1])]
        weights.append(w[ends[begin] : ends[end]])
    return replace(Jagged.from_lists(lists), weights_N=torch.cat(weights))


@given(
    st.lists(st.sampled_from([0, 1, 3, 100, 256, 300]), min_size=1, max_size=5),
    st.sampled_from(EVERY_OPTIMIZER),
    st.lists(st.sampled_from(ROW_TYPES), min_size=len(TABLES), max_size=len(TABLES)),
    st.booleans(),
)
@settings(max_examples=30)
def test_accumulating_batches_is_one_large_batch(sizes, optimizer, row_types, narrow):
    """Bit for bit, for parts of any size, whatever order of features and type of ids each part has."""
    whole = batch(size=sum(sizes), most=3)
    tables = [
        msgspec.structs.replace(t, row_type=row_type, column_group=group)
        for t, (row_type, group) in zip(with_optimizer(optimizer, TABLES), row_types, strict=True)
    ]
    one, many = (Embeddings(tables) for _ in range(2))
    g = torch.Generator().manual_seed(1)
    found = vectors(one, whole)
    grads = {name: torch.randn(x.shape, generator=g) for name, x in found.items()}
    sum((found[name] * grads[name]).sum() for name in found).backward()
    one.update()

    begin, used = 0, dict.fromkeys(found, 0)
    for index, size in enumerate(sizes):
        order = whole.features[::-1] if index % 2 else whole.features
        part = samples(whole, begin, begin + size, order)
        if narrow and index % 3 == 0:
            part = replace(part, values_N=part.values_N.int())
        out = vectors(many, part)
        mine = {name: grads[name][used[name] : used[name] + len(x)] for name, x in out.items()}
        sum((out[name] * mine[name]).sum() for name in out).backward()
        used = {name: used[name] + len(x) for name, x in out.items()}
        begin += size
    many.update()
    assert all(used[name] == len(grads[name]) for name in used)
    same(everything(many), everything(one))


# State


def test_state_dict_has_one_entry_for_each_table():
    embeddings = Embeddings(TABLES)
    state = embeddings.state_dict()
    assert list(state) == [t.name for t in TABLES]
    for table in TABLES:
        assert torch.equal(state[table.name], embeddings.table(table.name))
        assert state[table.name].shape == (table.rows, table.dim)
    assert not any(p.requires_grad for p in embeddings.parameters())
    assert list(nn.Sequential(embeddings).state_dict()) == [f"0.{t.name}" for t in TABLES]


def trained(seed=5, tables=TABLES) -> Embeddings:
    embeddings = Embeddings(tables, seed=seed)
    train(embeddings, batch(tables=tables))
    return embeddings


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_state_dict_round_trip(assign, inside):
    source, target = trained(), Embeddings(TABLES)
    if inside:
        nn.Sequential(target).load_state_dict(nn.Sequential(source).state_dict(), assign=assign)
    else:
        target.load_state_dict(source.state_dict(), assign=assign)
    same(target.state_dict(), source.state_dict())
    same(vectors(target, batch(7)), vectors(source, batch(7)))
    kept = copy.deepcopy(source.state_dict())
    train(target, batch(7))  # loading copied into the tables: updates still show, and only here
    for table in TABLES:
        assert torch.equal(target.state_dict()[table.name], target.table(table.name))
        assert not torch.equal(target.state_dict()[table.name], kept[table.name])
    same(source.state_dict(), kept)


@pytest.mark.parametrize("name", ["weight", "arena", "forward", "_parameters"])
def test_table_names_may_be_those_of_attributes(name):
    source, target = trained(tables=[Table(name=name, rows=5, dim=4)]), Embeddings([Table(name=name, rows=5, dim=4)])
    target.load_state_dict(source.state_dict())
    same(target.state_dict(), source.state_dict())
    train(target, batch(tables=target.tables))


def test_state_of_one_embedding_bag():
    bag = nn.EmbeddingBag(10, 4)
    embeddings = single()
    embeddings.load_state_dict(bag.state_dict())
    assert torch.equal(embeddings.table("t"), bag.weight)


@pytest.mark.parametrize("naming", ["{}.weight", "embedding_bags.{}.weight", "embeddings.{}.weight"])
@pytest.mark.parametrize("inside", [False, True])
def test_state_of_other_libraries(naming, inside):
    """nn.ModuleDict of nn.EmbeddingBag, TorchRec's EmbeddingBagCollection and EmbeddingCollection."""
    theirs = {naming.format(t.name): torch.randn(t.rows, t.dim) for t in TABLES}
    embeddings = Embeddings(TABLES)
    if inside:
        nn.ModuleDict({"sparse": embeddings}).load_state_dict({f"sparse.{k}": v for k, v in theirs.items()})
    else:
        embeddings.load_state_dict(theirs)
    assert len(theirs) == len(TABLES)
    same(embeddings.state_dict(), {t.name: theirs[naming.format(t.name)] for t in TABLES})


def test_wrong_shape_names_the_table():
    state = Embeddings(TABLES).state_dict() | {"mean": torch.zeros(30, 6)}
    target = Embeddings(TABLES)
    with pytest.raises(StateError, match=r"'mean': got \(30, 6\)"):
        target.load_state_dict(state)
    with pytest.raises(StateError, match=r"'mean': got \(31, 5\)"):
        target.load_state_dict({f"embedding_bags.{t.name}.weight": torch.zeros(t.rows + 1, t.dim) for t in TABLES[1:2]})


def test_missing_and_unexpected_tables_are_torchs_errors():
    target = Embeddings(TABLES)
    state = target.state_dict()
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"mean"'):
        target.load_state_dict({k: v for k, v in state.items() if k != "mean"})
    with pytest.raises(RuntimeError, match=r'(?s)Unexpected key.*"more"'):
        target.load_state_dict(state | {"more": torch.zeros(1)})
    found = target.load_state_dict({"sum": state["sum"], "more": torch.zeros(1)}, strict=False)
    assert found.unexpected_keys == ["more"]
    assert set(found.missing_keys) == {"mean", "weighted", "sequence"}


def test_optimizer_state():
    tables = [
        Table(name="none", rows=7, dim=4, optimizer=Sgd()),
        Table(name="each", rows=7, dim=4, optimizer=Adagrad(initial=0.5)),
        Table(name="row", rows=7, dim=4, optimizer=RowWiseAdagrad(initial=0.25)),
        Table(name="moments", rows=7, dim=4, optimizer=Adam()),
        Table(name="mixed", rows=7, dim=4, optimizer=RowWiseAdam()),
        Table(name="length", rows=7, dim=4, optimizer=Lamb()),
        Table(name="proximal", rows=7, dim=4, optimizer=Ftrl(initial=0.5)),
    ]
    embeddings = Embeddings(tables)
    state = embeddings.optimizer_state()
    assert {t: {n: tuple(x.shape) for n, x in s.items()} for t, s in state.items()} == {
        "none": {"step": ()},
        "each": {"step": (), "sum": (7, 4)},
        "row": {"step": (), "sum": (7,)},
        "moments": {"step": (), "exp_avg": (7, 4), "exp_avg_sq": (7, 4)},
        "mixed": {"step": (), "exp_avg": (7, 4), "exp_avg_sq": (7,)},
        "length": {"step": (), "exp_avg": (7, 4), "exp_avg_sq": (7, 4)},
        "proximal": {"step": (), "z": (7, 4), "n": (7, 4)},
    }
    assert all(s["step"].dtype == torch.int64 and s["step"] == 0 for s in state.values())
    assert (state["each"]["sum"] == 0.5).all()
    assert (state["row"]["sum"] == 0.25).all()
    assert (state["proximal"]["n"] == 0.5).all()
    assert not any(s[name].any() for s in state.values() for name in ("exp_avg", "exp_avg_sq", "z") if name in s)
    train(embeddings, Jagged.from_lists({t.name: [[1, 2], [2]] for t in tables}))
    touched = state["row"]["sum"] > 0.25  # views: they follow
    assert touched.tolist() == [False, True, True, False, False, False, False]
    for table, names_ in (
        ("moments", ("exp_avg", "exp_avg_sq")),
        ("mixed", ("exp_avg", "exp_avg_sq")),
        ("proximal", "z"),
    ):
        for name in names_:
            found = state[table][name].view(7, -1).any(1)
            assert found.tolist() == [False, True, True, False, False, False, False], (table, name)
    assert all(s["step"] == 1 for s in state.values())


def test_steps_are_counted_by_table_and_update():
    """By each update in which gradients were staged for the tables of its kind, pooled or sequence."""
    embeddings = Embeddings(TABLES)
    jagged = batch()
    embeddings.update()
    found = vectors(embeddings, jagged)
    sum(found[name].sum() for name in ("s1", "mean", "w1")).backward()
    found = vectors(embeddings, jagged)
    loss_of(found).backward()  # accumulated: one update all the same
    embeddings.update()
    vectors(embeddings, jagged)["q1"].sum().backward()
    embeddings.discard()
    embeddings.update()
    vectors(embeddings, jagged)["q2"].sum().backward()
    embeddings.update()
    steps = {table: int(state["step"]) for table, state in embeddings.optimizer_state().items()}
    assert steps == {"sum": 1, "mean": 1, "weighted": 1, "sequence": 2}


def test_resuming_from_saved_state_gives_the_same_bits():
    tables = with_optimizer(Adagrad(lr=0.1), TABLES[:2]) + with_optimizer(RowWiseAdagrad(lr=0.1), TABLES[2:])
    straight = trained(tables=tables)
    saved = copy.deepcopy((straight.state_dict(), straight.optimizer_state()))
    resumed = Embeddings(tables, seed=99)
    resumed.load_state_dict(saved[0])
    resumed.load_optimizer_state(saved[1])
    for embeddings in (straight, resumed):
        train(embeddings, batch(3, tables=tables))
    same(everything(resumed), everything(straight))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, r"optimizer state 'step' of table 't': got nothing: expected \(\)"),
        ({"t": {"sum": torch.zeros(10)}}, r"optimizer state 'step' of table 't': got nothing"),
        ({"t": {"step": torch.tensor(3)}}, r"optimizer state 'sum' of table 't': got nothing: expected \(10,\)"),
        ({"t": {"step": torch.tensor(3), "sum": torch.zeros(10, 1)}}, r"got \(10, 1\): expected \(10,\)"),
        ({"t": {"step": torch.tensor([3]), "sum": torch.zeros(10)}}, r"'step' of table 't': got \(1,\): expected \(\)"),
    ],
)
def test_optimizer_state_of_another_shape(state, message):
    with pytest.raises(StateError, match=message):
        single().load_optimizer_state(state)


# Copies and moves


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, saved_and_loaded])
@pytest.mark.parametrize("inside", [False, True])
def test_copies_are_whole_and_independent(duplicate, inside):
    first = trained()
    second = duplicate(nn.Sequential(first))[0] if inside else duplicate(first)
    same(everything(second), everything(first))
    before = everything(first)
    train(second, batch(3))
    same(everything(first), before)
    assert not torch.equal(second.state_dict()["sum"], before["sum"])
    for table in TABLES:
        assert torch.equal(second.state_dict()[table.name], second.table(table.name))
    train(first, batch(3))
    same(everything(first), everything(second))


# Inside a model


class Model(nn.Module):
    """Pooled vectors and the mean of the sequences through one linear layer."""

    def __init__(self):
        super().__init__()
        self.embeddings = Embeddings(with_optimizer(RowWiseAdagrad(lr=0.1), TABLES))
        width = sum(t.dim * len(t.feature_names) for t in TABLES[:3])
        self.linear = nn.Linear(width, 1)

    def forward(self, jagged: Jagged) -> torch.Tensor:
        found = self.embeddings(jagged)
        return self.linear(found.values()) + found["q1"].mean() + found["q2"].mean()


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def test_autocast_leaves_vectors_alone_and_trains():
    net = model()
    jagged = batch(size=64)
    optimizer = torch.optim.SGD(net.linear.parameters(), lr=0.1)
    labels = (torch.arange(64) % 2).float()
    losses = []
    for _ in range(30):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = vectors(net.embeddings, jagged)
            assert {x.dtype for x in found.values()} == {torch.float32}
            out = net(jagged)
            loss = nn.functional.binary_cross_entropy_with_logits(out.float().flatten(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        net.embeddings.update()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch hides it, too late
def test_compiled_model_is_the_model():
    """Embeddings are a graph break; the rest is compiled. Several shapes, several steps, same bits as eager."""
    eager, net = model(), model()
    compiled = torch.compile(net, backend="aot_eager")
    for step, size in enumerate((30, 7, 30)):
        jagged = batch(step, size=size)
        outs = [m(jagged) for m in (eager, compiled)]
        assert torch.equal(*outs)
        for m, out in zip((eager, net), outs, strict=True):
            m.linear.zero_grad()
            (out**2).sum().backward()
            m.embeddings.update()
        for mine, theirs in zip(net.linear.parameters(), eager.linear.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        close(dict(net.embeddings.state_dict()), dict(eager.embeddings.state_dict()), 1e-6)


# The operators, as torch sees them


def operator_arguments(sequence: bool) -> dict:
    tables = [t for t in TABLES if (t.pooling is Pooling.SEQUENCE) == sequence]
    problem = make_problem(tuple(tables), batch=6, most=3, seed=1)
    arena = problem.arena()
    group = problem.group(arena)
    jagged = problem.jagged
    return {
        "arena": arena,
        "group": group,
        "features": problem.sources(group),
        "values": jagged.values_N,
        "offsets": ops.offsets(jagged.lengths_FB),
        "weights": jagged.weights_N,
        "grad": torch.randn(6, group.columns),
    }


@pytest.mark.slow
def test_operator_compiles_as_one_graph():
    a = operator_arguments(sequence=False)

    def pooled(weights):
        rows = a["arena"].rows
        return ops.pool(rows, a["features"], a["values"], a["offsets"], weights * 2, 6, a["group"].columns).sin()

    results = []
    for f in (pooled, torch.compile(pooled, fullgraph=True, backend="aot_eager")):
        weights = a["weights"].clone().requires_grad_()
        out = f(weights)
        (out * a["grad"]).sum().backward()
        results.append((out.detach(), weights.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][1].count_nonzero() > 0


def operator_calls():
    """Operators with arguments: pooled tables, sequences, and none."""
    pooled, flat = (operator_arguments(sequence) for sequence in (False, True))
    bags, flat_bags = ((a["features"], a["values"], a["offsets"]) for a in (pooled, flat))
    arena, group, weights, grad = (pooled[name] for name in ("arena", "group", "weights", "grad"))
    for learned in (weights, weights.clone().requires_grad_()):
        yield ops.pool, (arena.rows, *bags, learned, 6, group.columns)
    yield ops.gather, (flat["arena"].rows, *flat_bags, 6)
    yield ops.pool_weight_grad, (arena.rows, *bags, weights, grad, 6)
    tables = (arena.rows, arena.state, group.tables_TC, *next_step(arena, group))
    yield ops.update, (*tables, *bags, weights, grad, 6, False)
    yield ops.pack, (torch.randn(5, 20), 16)
    yield ops.unpack, (ops.pack(torch.randn(5, 20), 16), 20, 16)
    yield ops.offsets, (torch.tensor([1, 0, 4]),)
    yield ops.fill_uniform, (torch.empty(100), 12345, 3, -0.5, 0.5)


@pytest.mark.slow
def test_opcheck():
    for op, args in operator_calls():
        torch.library.opcheck(op.default, args)


# Initial rows

INITS = [Uniform(), Uniform(bound=0.3), Normal(std=0.2), Constant(value=-0.5)]


@pytest.mark.parametrize("init", INITS, ids=str)
def test_initial_rows_depend_on_seed_and_name_alone(init, threads):
    table = Table(name="t", rows=20_000, dim=12, init=init)
    others = [Table(name=f"o{k}", rows=1 + 77 * k, dim=3, init=init) for k in range(4)]
    found = []
    for count, tables in ((1, [table]), (2, [*others, table]), (4, [others[0], table, others[3]])):
        threads(count)
        found.append(Embeddings(tables, seed=3).table("t").clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    renamed = Embeddings([msgspec.structs.replace(table, name="u", features=("t",), pooling=Pooling.MEAN)], seed=3)
    reseeded = Embeddings([table], seed=4)
    random = not isinstance(init, Constant)
    assert torch.equal(renamed.table("u"), found[0]) != random
    assert torch.equal(reseeded.table("t"), found[0]) != random


def test_initial_rows_of_a_smaller_table_begin_the_larger():
    """Cells are numbered row by row, so a table that grows keeps the rows that it had."""
    small, large = (Embeddings([Table(name="t", rows=n, dim=8, init=Uniform(bound=1.0))]) for n in (100, 1000))
    assert torch.equal(small.table("t"), large.table("t")[:100])


@pytest.mark.parametrize(("init", "bound"), [(Uniform(), 0.01), (Uniform(bound=0.3), 0.3)], ids=str)
def test_uniform(init, bound):
    rows = Embeddings([Table(name="t", rows=10_000, dim=20, init=init)]).table("t").double()
    assert -bound <= rows.min() < -0.9999 * bound
    assert 0.9999 * bound < rows.max() < bound
    assert abs(rows.mean()) < 4 * bound / (3 * rows.numel()) ** 0.5
    assert abs(rows.var() * 3 / bound**2 - 1) < 0.01
    quarters = torch.histc(rows, 16, -bound, bound) * 16 / rows.numel()
    assert (quarters - 1).abs().max() < 0.05
    assert abs(torch.corrcoef(rows.T) - torch.eye(20)).max() < 0.05


def test_normal():
    rows = Embeddings([Table(name="t", rows=10_000, dim=20, init=Normal(std=0.2))]).table("t").double() / 0.2
    assert rows.isfinite().all()
    assert abs(rows.mean()) < 4 / rows.numel() ** 0.5
    assert abs(rows.std() - 1) < 0.01
    assert abs((rows**3).mean()) < 0.03
    assert abs((rows**4).mean() - 3) < 0.1
    assert abs((rows.abs() < 1).double().mean() - 0.6827) < 0.005
    assert abs(torch.corrcoef(rows.T) - torch.eye(20)).max() < 0.05


def test_constant():
    assert (Embeddings([Table(name="t", rows=50, dim=3, init=Constant(value=-2.5))]).table("t") == -2.5).all()


def test_tables_are_checked_together():
    with pytest.raises(SpecError, match="feature 'x' is named"):
        Embeddings([Table(name="a", rows=2, dim=2, features=("x",)), Table(name="x", rows=2, dim=2)])


def test_a_copy_starts_with_nothing_staged():
    """Also where the staged weights came out of a graph, which cannot be copied."""
    table = Table(name="t", rows=9, dim=4, pooling=Pooling.WEIGHTED)
    embeddings = Embeddings([table])
    scale = torch.ones(3, requires_grad=True)
    jagged = replace(Jagged.from_lists({"t": [[1, 2], [3]]}), weights_N=scale * 2)
    embeddings(jagged).matrix_BS.sum().backward()
    other = copy.deepcopy(embeddings)
    assert len(embeddings.staged) == 1
    assert not other.staged
    other.update()
    assert torch.equal(other.table("t"), embeddings.table("t"))


def test_accumulation_uses_the_weights_of_its_backward():
    table = Table(name="t", rows=9, dim=4, pooling=Pooling.WEIGHTED, optimizer=Sgd(lr=1.0))
    one, two = Embeddings([table]), Embeddings([table])
    ids, lengths = torch.tensor([1, 2, 1]), torch.tensor([2, 1])
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16)
    for embeddings, steps in ((one, 1), (two, 2)):
        for _ in range(steps):
            held = weights.clone()
            jagged = Jagged(features=("t",), values_N=ids, lengths_FB=lengths, weights_N=held)
            embeddings(jagged).matrix_BS.backward(torch.full((2, 4), 1.0 / steps))
            held.zero_()
        embeddings.update()
    assert torch.equal(one.table("t"), two.table("t"))


def test_tables_that_do_not_fit_are_named():
    with pytest.raises(MemoryError, match="'huge' with 549755813888 x"):
        Embeddings([Table(name="t", rows=9, dim=4), Table(name="huge", rows=1 << 39, dim=64)])
