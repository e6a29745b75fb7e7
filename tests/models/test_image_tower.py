"""Image towers: any size, sizes by the rule, labels from backbones that have not seen a picture."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rowwise import Embeddings, Jagged, Table
from rowwise.base.errors import SpecError
from rowwise.models.image_tower import (
    DynamicImageTower,
    ImageTower,
    PictureCopies,
    PictureTower,
    choose_sizes,
    labels_of_parts,
    size_costs,
)

SIZES = (8, 16, 24)
PICTURES = torch.randint(0, 256, (40, 3, 24, 24), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


class Reads:
    """Reads crops, and remembers which."""

    def __init__(self):
        self.asked = []

    def __call__(self, rows_N, size):
        self.asked += [(row, size) for row in rows_N.tolist()]
        return PICTURES[rows_N, :, :size, :size]


@pytest.mark.parametrize("size", [8, 9, 31, 64])
def test_pictures_of_any_size_have_a_vector(size):
    tower = ImageTower(5, widths=(4, 8))
    pictures = torch.randint(0, 256, (3, 3, size, size), dtype=torch.uint8)
    found = tower(pictures)
    assert found.shape == (3, 5)
    torch.testing.assert_close(tower(pictures.float() / 255), found)
    assert tower.multiplications(size) == 5 * 8 + 3 * 4 * 9 * size**2 + 4 * 8 * 9 * (-(-size // 2)) ** 2


def test_what_cannot_be():
    with pytest.raises(SpecError, match="7 x 9"):
        ImageTower(5)(torch.zeros(1, 3, 7, 9))
    with pytest.raises(SpecError, match="1 or more"):
        ImageTower(0)
    for sizes in ((), (16, 8), (8, 8), (4, 8)):
        with pytest.raises(SpecError, match="sizes of at least"):
            DynamicImageTower(ImageTower(5), ImageTower(2), sizes)
    with pytest.raises(SpecError, match="0 to 1"):
        DynamicImageTower(ImageTower(5), ImageTower(2), SIZES, price=-1)
    with pytest.raises(SpecError, match="scale model has 4"):
        DynamicImageTower(ImageTower(5), ImageTower(4), SIZES)(torch.arange(3), Reads())
    with pytest.raises(SpecError, match=r"sizes \(8, 16, 24\)"):
        DynamicImageTower(ImageTower(5), ImageTower(3), SIZES, costs=(0.5, 1))
    embeddings, towers = (
        Embeddings([Table(name="item", rows=4, dim=2)]),
        DynamicImageTower(ImageTower(5), ImageTower(1), (40,)),
    )
    with pytest.raises(SpecError, match="those of the copies"):
        PictureTower(embeddings, "item", towers, PictureCopies(Reads(), SIZES))
    with pytest.raises(SpecError, match="1 parts of 9"):
        labels_of_parts(9, 2, lambda _: nn.Identity(), lambda *_: torch.zeros(9), parts=1)


@given(st.lists(st.lists(st.floats(-8, 8), min_size=3, max_size=3), min_size=1, max_size=20), st.floats(0, 1))
def test_the_size_that_is_worth_most(logits, price):
    costs_K = [(8 / 24) ** 2, (16 / 24) ** 2, 1.0]
    assert size_costs(SIZES) == costs_K
    assert size_costs(SIZES, (30, 60, 60), 0.5) == pytest.approx([costs_K[0] / 2 + 1 / 4, costs_K[1] / 2 + 1 / 2, 1])
    worth_NK = torch.tensor(logits).sigmoid() - price * torch.tensor(costs_K)
    for worth_K, chosen in zip(worth_NK, choose_sizes(torch.tensor(logits), costs_K, price).tolist(), strict=True):
        assert chosen == next(k for k in range(3) if worth_K[k] == worth_K.max())


def test_each_picture_is_read_and_computed_at_its_size():
    class Scale(nn.Module):
        """The brighter a picture, the larger its size."""

        def forward(self, small):
            light = small.float().mean((1, 2, 3)) / 255
            return torch.stack((0.5 - light, torch.full_like(light, 0.0), light - 0.5), 1) * 1000

    torch.manual_seed(0)
    backbone, reads, rows = ImageTower(5, widths=(4, 8)), Reads(), torch.tensor([7, 3, 3, 30, 12, 0])
    tower = DynamicImageTower(backbone, Scale(), SIZES, price=0.0)
    found = tower(rows, reads)
    chosen = tower.choose(PICTURES[rows, :, :8, :8]).tolist()
    assert len(set(chosen)) > 1
    for row, place, vector in zip(rows.tolist(), chosen, found, strict=True):
        size = SIZES[place]
        torch.testing.assert_close(vector, backbone(PICTURES[row : row + 1, :, :size, :size])[0])
    larger = [(row, SIZES[place]) for row, place in zip(rows.tolist(), chosen, strict=True) if place]
    assert sorted(reads.asked) == sorted([(row, 8) for row in rows.tolist()] + larger)
    assert tower(rows[:0], reads).shape == (0, 5)


def test_a_scale_model_learns_which_sizes_give_the_vector_of_the_largest():
    """The dark pictures are bright at the right, which smaller copies lack here."""

    class Width(nn.Module):
        dim = 2

        def forward(self, pictures):
            light_NS = pictures.float().mean((1, 2)) / 255
            return torch.stack((light_NS[:, :8].mean(1), light_NS[:, 8:].sum(1)), 1)

    pictures = torch.zeros(40, 3, 24, 24, dtype=torch.uint8)
    pictures[:, :, :, :8] = 200
    pictures[::2, :, :, :8] = 90
    pictures[::2, :, :, 16:] = 250  # hidden by crops of 8 and 16
    torch.manual_seed(0)
    tower = DynamicImageTower(Width(), ImageTower(3, widths=(8,)), SIZES, price=0.3, similar=0.9)
    optimizer = torch.optim.Adam(tower.scale.parameters(), lr=0.02)

    def read(rows_N, size):
        return pictures[rows_N, :, :size, :size]

    reads = Reads()
    tower.scale_loss(torch.arange(3), reads)
    assert {size for _, size in reads.asked} >= {8, 24}
    for _ in range(300):
        loss = tower.scale_loss(torch.randint(40, (16,)), read)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    assert tower.choose(read(torch.arange(4), 8)).tolist() == [2, 0, 2, 0]


@given(st.integers(2, 30), st.integers(2, 5))
def test_no_backbone_labels_what_it_was_trained_on(pictures, parts):
    parts = min(parts, pictures)
    seen, labelled = [], []

    def fit(kept):
        seen.append(set(kept.tolist()))
        return nn.Identity()

    def is_right(_, rows, place):
        assert not seen[-1] & set(rows.tolist())
        assert seen[-1] | set(rows.tolist()) == set(range(pictures))
        labelled.extend((row, place) for row in rows.tolist())
        return rows % 2 == place

    right = labels_of_parts(pictures, 2, fit, is_right, parts)
    assert sorted(labelled) == [(row, place) for row in range(pictures) for place in range(2)]
    assert right.tolist() == [[float(row % 2 == place) for place in range(2)] for row in range(pictures)]


def test_a_tower_with_pictures_of_its_items():
    torch.manual_seed(0)
    embeddings = Embeddings([Table(name="item", rows=40, dim=4)])
    reads = Reads()
    copies = PictureCopies(reads, SIZES)
    backbone = ImageTower(5, widths=(4,))
    tower = PictureTower(embeddings, "item", backbone, copies, sizes=(6,))
    batch = Jagged(features=("item",), values_N=torch.tensor([3, 9, 3]), lengths_FB=torch.tensor([1, 1, 1]))
    nothing = torch.zeros(3, 0)
    found = tower(nothing, batch)
    assert found.shape == (3, 6)
    assert torch.equal(found[0], found[2])
    assert len(reads.asked) == 2  # each picture once
    assert {size for _, size in reads.asked} <= set(SIZES)
    found.sum().backward()
    assert backbone.last.weight.grad is not None
    tower.eval()
    reads.asked.clear()
    tower(nothing, batch)
    assert reads.asked == [(3, 24), (9, 24)]
    dynamic = PictureTower(embeddings, "item", DynamicImageTower(backbone, ImageTower(3, widths=(2,)), SIZES), copies)
    dynamic.eval()
    assert dynamic(nothing, batch).shape == (3, 64)
