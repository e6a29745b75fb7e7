"""Linear and Mlp in the place of torch's own modules."""

import copy
import pickle

import pytest
import torch
from torch import nn

from rowwise import Linear, Mlp, SpecError

pytestmark = pytest.mark.usefixtures("library")


def test_in_the_place_of_nn_linear():
    torch.manual_seed(0)
    theirs = nn.Linear(6, 4)
    torch.manual_seed(0)
    mine = Linear(6, 4, relu=True)
    assert isinstance(mine, nn.Linear)
    assert all(map(torch.equal, mine.parameters(), theirs.parameters()))
    theirs.load_state_dict(mine.state_dict())
    mine.load_state_dict(theirs.state_dict())
    x_BI = torch.randn(5, 6)
    torch.testing.assert_close(mine(x_BI), theirs(x_BI).relu())
    assert repr(mine) == "Linear(in_features=6, out_features=4, bias=True, relu=True)"
    assert Linear(6, 4, bias=False, dtype=torch.float64)(x_BI.double()).dtype == torch.float64


def test_copies():
    mlp, x_BI = Mlp((6, 5, 1)), torch.randn(5, 6)
    wanted = mlp(x_BI)
    for other in (copy.deepcopy(mlp), pickle.loads(pickle.dumps(mlp))):
        assert torch.equal(other(x_BI), wanted)
    doubled = {name: parameter * 2 for name, parameter in mlp.named_parameters()}
    assert not torch.equal(torch.func.functional_call(mlp, doubled, (x_BI,)), wanted)


def test_gradients_by_function():
    mlp, x_BI = Mlp((6, 5, 1)), torch.randn(5, 6)
    parameters = dict(mlp.named_parameters())
    by_name = torch.func.grad(lambda p: torch.func.functional_call(mlp, p, (x_BI,)).sum())(parameters)
    mlp(x_BI).sum().backward()
    for name, parameter in mlp.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(by_name[name], parameter.grad)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's loop over samples
def test_gradients_of_each_sample():
    layer, x_BI = Linear(6, 3, relu=True), torch.randn(4, 6)
    parameters = dict(layer.named_parameters())

    def loss(p: dict[str, torch.Tensor], x_I: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, p, (x_I.unsqueeze(0),)).sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x_BI)
    layer(x_BI).sum().backward()
    torch.testing.assert_close(each["weight"].sum(0), layer.weight.grad)


def test_a_stack():
    mlp = Mlp((6, 5, 3), relu_last=True)
    plain = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3), nn.ReLU())
    plain.load_state_dict({f"{2 * int(k[7])}.{k[9:]}": v for k, v in mlp.state_dict().items()})
    x_BI = torch.randn(7, 6)
    torch.testing.assert_close(mlp(x_BI), plain(x_BI))
    assert bool((mlp(x_BI) >= 0).all())
    assert bool((Mlp((6, 50))(x_BI) < 0).any())


@pytest.mark.parametrize("sizes", [(), (3,), (3, 0)])
def test_bad_sizes(sizes):
    with pytest.raises(SpecError, match=r"Mlp got sizes .*"):
        Mlp(sizes)


@pytest.mark.parametrize("norm", [None, "batch", "layer"])
@pytest.mark.parametrize("relu_last", [False, True])
def test_hidden_layers_are_normalised_before_their_relu_and_dropped_after_it(norm, relu_last):
    torch.manual_seed(0)
    mlp, x_BI = Mlp((6, 5, 4, 3), relu_last=relu_last, dropout=0.4, norm=norm), torch.randn(32, 6)
    norms = {None: lambda width: nn.Identity(), "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
    layers = []
    for k, (ins, outs) in enumerate(((6, 5), (5, 4), (4, 3))):
        layer = nn.Linear(ins, outs)
        layer.load_state_dict(mlp.layers[k].state_dict())
        layers += [layer, norms[norm](outs), nn.ReLU(), nn.Dropout(0.4)] if k < 2 or relu_last else [layer]
    theirs = nn.Sequential(*layers)
    for seed in range(3):
        torch.manual_seed(seed)
        got = mlp(x_BI)
        torch.manual_seed(seed)
        torch.testing.assert_close(got, theirs(x_BI))
    mlp.eval(), theirs.eval()
    torch.testing.assert_close(mlp(x_BI), theirs(x_BI))
    assert torch.equal(mlp(x_BI), mlp(x_BI))


def test_dropout_changes_no_name():
    assert Mlp((6, 5, 1), dropout=0.5).state_dict().keys() == Mlp((6, 5, 1)).state_dict().keys()


def test_a_batch_of_one_sample_takes_the_running_statistics():
    mlp = Mlp((6, 5, 1), norm="batch")
    mlp(torch.randn(32, 6))
    before = {name: x.clone() for name, x in mlp.named_buffers()}
    x_BI = torch.randn(1, 6)
    got = mlp(x_BI)
    assert all(torch.equal(x, before[name]) for name, x in mlp.named_buffers())
    torch.testing.assert_close(got, mlp.eval()(x_BI))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"dropout": 1.0}, "dropout=1.0: expected at least 0 and less than 1"),
        ({"norm": "group"}, "norm='group': expected"),
    ],
    ids=str,
)
def test_what_hidden_layers_refuse(args, message):
    with pytest.raises(SpecError, match=message):
        Mlp((6, 5, 1), **args)
