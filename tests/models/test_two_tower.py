"""Two towers against their equation, and that users find their items."""

import copy

import pytest
import torch
from clicks import make_clicks, make_tables, step
from plain_layers import plain_mlp
from torch.nn import functional as F

from rowwise import (
    Embeddings,
    ItemFrequency,
    Jagged,
    RowWiseAdagrad,
    SpecError,
    Table,
    Tower,
    TwoTower,
    in_batch_softmax,
    top_items,
)

USERS, ITEMS, KINDS = 60, 200, 10


def test_the_equation():
    torch.manual_seed(0)
    user, item, *words = make_tables(4)
    model = TwoTower(Tower(Embeddings([user, *words]), 2, (6, 5)), Tower(Embeddings([item]), 1, (5,)), temperature=0.5)
    batch = make_clicks(7)
    sides = []
    for tower, dense_BF in ((model.user, batch.dense_BF[:, :2]), (model.item, batch.dense_BF[:, 2:])):
        x_BS = torch.cat((dense_BF, tower.embeddings(batch.sparse).values()), 1).double()
        x_BS = plain_mlp(copy.deepcopy(tower.layers).double(), x_BS)
        sides.append(x_BS / x_BS.square().sum(1, keepdim=True).sqrt())
    users_BD, items_BD = model.vectors(batch)
    torch.testing.assert_close((users_BD.double(), items_BD.double()), tuple(sides), rtol=1e-5, atol=1e-5)
    wanted_BB = sides[0] @ sides[1].t() / 0.5
    torch.testing.assert_close(model.scores(users_BD, items_BD).double(), wanted_BB, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(batch).double(), wanted_BB.diagonal().unsqueeze(1), rtol=1e-5, atol=1e-5)
    assert torch.equal(model.user(batch.dense_BF[:, :2], batch.sparse), users_BD)


def make_pairs(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Users choose among items of their own kind, the popular ones more often."""
    user_B = torch.randint(USERS, (size,), generator=generator)
    popular_B = (torch.rand(size, generator=generator).square() * (ITEMS // KINDS)).long()
    return user_B, popular_B * KINDS + user_B % KINDS


@pytest.mark.slow
def test_users_find_their_items():
    torch.manual_seed(0)
    adagrad = RowWiseAdagrad(lr=0.1)
    user = Tower(Embeddings([Table(name="user", rows=USERS, dim=8, optimizer=adagrad)], seed=1), 0, (8,))
    item = Tower(Embeddings([Table(name="item", rows=ITEMS, dim=8, optimizer=adagrad)], seed=2), 0, (8,))
    model, frequency = TwoTower(user, item), ItemFrequency(bits=12)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    generator = torch.Generator().manual_seed(0)
    ones_2B = torch.ones(2 * 128, dtype=torch.int64)
    for _ in range(150):
        user_B, item_B = make_pairs(128, generator)
        sparse = Jagged(features=("user", "item"), values_N=torch.cat((user_B, item_B)), lengths_FB=ones_2B)
        vectors = model.vectors(torch.empty(128, 0), sparse)
        step(model, in_batch_softmax(model.scores(*vectors), item_B, frequency(item_B)), optimizer)
    everyone = Jagged.from_lists({"user": [[u] for u in range(USERS)]})
    everything = Jagged.from_lists({"item": [[i] for i in range(ITEMS)]})
    users_UD = user(torch.empty(USERS, 0), everyone)
    _, found_UK = top_items(users_UD, item(torch.empty(ITEMS, 0), everything), 10, chunk=64)
    right = (found_UK % KINDS == torch.arange(USERS).unsqueeze(1) % KINDS).double().mean()
    assert right > 0.9  # by chance .1


def test_vectors_have_length_one():
    tower = Tower(Embeddings(make_tables()[:1]), 0, (4,))
    vectors_BD = tower(torch.empty(8, 0), make_clicks(8).sparse)
    torch.testing.assert_close(F.normalize(vectors_BD), vectors_BD)


def test_what_cannot_be():
    towers = [Tower(Embeddings([table]), 0, (dim,)) for table, dim in zip(make_tables(), (4, 5), strict=False)]
    with pytest.raises(SpecError, match="4, of items 5"):
        TwoTower(*towers)
    with pytest.raises(SpecError, match="more than 0"):
        TwoTower(towers[0], towers[0], temperature=0)
    with pytest.raises(SpecError, match="an Mlp got sizes"):
        Tower(Embeddings(make_tables()), 0, (0,))
