"""`Embeddings` as any module of torch: what people do with one works, or is refused in one line."""

import copy
import io

import pytest
import safetensors.torch
import torch
from table_state import everything, same
from torch import nn
from torch.optim.swa_utils import AveragedModel

from rowwise import Adam, Embeddings, Jagged, Pooling, SpecError, StateError, Table

TABLES = (
    Table(name="a", rows=10, dim=4, optimizer=Adam(lr=0.1)),
    Table(name="half", rows=10, dim=4, row_type="fp16"),
    Table(name="bytes", rows=10, dim=8, row_type="int8"),
    Table(name="sequence", rows=10, dim=4, pooling=Pooling.SEQUENCE),
)
BATCH = Jagged.from_lists({table.name: [[1], [2, 3]] for table in TABLES})


class Net(nn.Module):
    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embeddings = Embeddings(TABLES, seed=seed, update_in_backward=True)
        self.last = nn.Linear(16 + 4, 1)

    def forward(self, batch):
        vectors = self.embeddings(batch)
        return self.last(torch.cat([vectors.matrix_BS, vectors["sequence"][:2]], 1)).squeeze(1)


def train(net: nn.Module, steps: int = 2) -> list[float]:
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(BATCH).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("cast", ["double", "half", "bfloat16", "float"])
def test_layers_of_another_type_get_vectors_of_theirs(cast):
    net = getattr(Net(), cast)()
    before = everything(net.embeddings)
    assert net(BATCH).dtype == net.last.weight.dtype
    assert all(torch.isfinite(torch.tensor(train(net))))
    after = everything(net.embeddings)
    assert {name: x.dtype for name, x in after.items()} == {name: x.dtype for name, x in before.items()}
    assert not torch.equal(after["a"], before["a"])
    assert net.to("cpu").float()(BATCH).dtype == torch.float32


def test_moves_that_change_nothing():
    wanted = train(Net())
    for change in (
        lambda net: net.to("cpu"),
        lambda net: net.cpu(),
        lambda net: net.eval().train(),
        lambda net: net.double().float(),
        lambda net: net.apply(lambda _: None),
        copy.deepcopy,
    ):
        assert train(change(Net())) == wanted


def test_evaluation_and_no_grad():
    net = Net()
    before = everything(net.embeddings)
    training = net(BATCH)
    assert torch.equal(net.eval()(BATCH), training)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(net(BATCH), training)
    same(everything(net.embeddings), before)


def test_strict_loading():
    net, other = Net(), Net(seed=1)
    state = net.state_dict()
    assert other.load_state_dict(state, strict=True).missing_keys == []
    assert torch.equal(other(BATCH), net(BATCH))
    for wrong, message in (
        ({k: v for k, v in state.items() if k != "embeddings.a"}, r"Missing key.*embeddings\.a"),
        (state | {"embeddings.x": torch.zeros(1)}, r"Unexpected key.*embeddings\.x"),
    ):
        with pytest.raises(RuntimeError, match=message):
            other.load_state_dict(wrong)
    with pytest.raises(StateError, match=r"table 'a': got \(3, 4\) of torch.float32: expected \(10, 4\)"):
        other.load_state_dict(state | {"embeddings.a": torch.zeros(3, 4)})


def test_files_of_torch_and_of_safetensors():
    """Tables share memory with one another, and still are tensors of their own to both."""
    net = Net()
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    alone = io.BytesIO()
    torch.save({"a": net.embeddings.state_dict()["a"]}, alone)
    assert len(alone.getvalue()) < 3000, "one table, without the memory of the others"
    states = [
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True),
        safetensors.torch.load(safetensors.torch.save(net.state_dict())),
    ]
    for state in states:
        other = Net(seed=1)
        other.load_state_dict(state)
        assert torch.equal(other(BATCH), net(BATCH))


def test_optimizer_state_is_what_a_state_dict_lacks():
    net = Net()
    train(net)
    state, rows = copy.deepcopy((net.state_dict(), net.embeddings.optimizer_state()))
    again = Net()  # of the same seed, which rounds rows of 16 bits
    again.load_state_dict(state)
    again.embeddings.load_optimizer_state(rows)
    same(everything(again.embeddings), everything(net.embeddings))
    for module in (net, again):
        module(BATCH).square().mean().backward()
    same(everything(again.embeddings), everything(net.embeddings))


def test_averages_of_weights():
    net = Net()
    average = AveragedModel(net)
    train(net)
    average.update_parameters(net)
    assert torch.equal(average.module.embeddings.table("a"), net.embeddings.table("a"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # hidden by torch's compiler
def test_compiled():
    """The lookup is a graph break, and the update comes after the backward of both graphs."""
    net, plain = Net(), Net()
    compiled = torch.compile(net, backend="aot_eager")
    assert train(compiled) == train(plain)
    same(everything(net.embeddings), everything(plain.embeddings))


@pytest.mark.parametrize("on", [True, False])
def test_rows_cannot_be_frozen_as_parameters(on):
    with pytest.raises(SpecError, match=rf"requires_grad_\({on}\) of table 'a'.*torch.no_grad\(\) to freeze them"):
        Net().embeddings.requires_grad_(on)


def test_rows_are_not_shared_with_other_processes():
    with pytest.raises(SpecError, match=r"share_memory\(\).*shard\(model, plan, comm\)"):
        Net().share_memory()


def test_inputs_that_are_no_batch():
    for wrong in (torch.tensor([1, 2]), {"a": torch.tensor([1])}):
        with pytest.raises(ValueError, match="expected a Jagged"):
            Net()(wrong)
