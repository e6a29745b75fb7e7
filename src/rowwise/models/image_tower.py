"""Image towers: vectors of pictures, each computed at a size chosen for it.

After "Characterizing and Taming Resolution in Convolutional Neural Networks" (Yan, Luo and Ceze 2021, arXiv
2110.14819). A backbone takes pictures of any size. A small scale model looks at the smallest copy and estimates, for
each size, the probability that the backbone does well there. A picture is computed at

    the size of the largest p - price * cost

where the cost is that of its pixels, as a share of the largest size's, or of its pixels and its bytes (`size_costs`).
With price = 0 it is the size of the largest probability, as in the paper.

Whether a backbone does well is only known of pictures that it was not trained on, so the scale model's labels come from
backbones that are trained without a part of the pictures (`labels_of_parts`). Towers of a recipe have no right answer
for a picture. Their scale model learns beside the backbone whether a size gives nearly the vector of the largest size
(`DynamicImageTower.scale_loss`).

Sizes: N pictures, C channels, S rows and columns, K sizes, D dim.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowwise.base.errors import SpecError
from rowwise.models.histories import single_ids
from rowwise.models.inputs import Ids, unpack
from rowwise.models.mlp import stack
from rowwise.models.two_tower import Tower
from rowwise.tables.batch import Batch, Jagged
from rowwise.tables.ids.make import AnyTables
from rowwise.tables.ops.pinned import copy_to

ReadPictures = Callable[[Tensor, int], Tensor]  # numbers [N] of pictures and a size, to bytes [N, C, S, S]
SMALLEST = 8  # rows and columns of a picture


class PictureSource(Protocol):
    """A reader of pictures at several sizes."""

    @property
    def read(self) -> ReadPictures:
        """Reads pictures by their numbers."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of copies, ascending."""


class PictureCopies(NamedTuple):
    """A `PictureSource` over a function."""

    read: ReadPictures
    sizes: tuple[int, ...]  # ascending


class ImageTower(nn.Module):
    """A convolutional network with a mean over places, so that pictures may have any size of at least 8.

    Args:
        dim: of the vectors.
        widths: channels of the layers; each after the first halves rows and columns.
        channels: of the pictures.
    """

    def __init__(self, dim: int, widths: Sequence[int] = (16, 32, 64, 64), channels: int = 3) -> None:
        super().__init__()
        if not widths or min(widths) < 1 or dim < 1 or channels < 1:
            raise SpecError(f"dim={dim}, widths={tuple(widths)}, channels={channels}", "1 or more of each")
        layers: list[nn.Module] = []
        for before, after in zip((channels, *widths), widths, strict=False):
            convolution = nn.Conv2d(before, after, 3, stride=2 if layers else 1, padding=1, bias=False)
            layers += [convolution, nn.GroupNorm(1, after), nn.ReLU(inplace=True)]
        self.layers = stack(layers)
        self.last = nn.Linear(widths[-1], dim)
        self.dim = dim

    def forward(self, pictures_NCSS: Tensor) -> Tensor:
        """Vectors [N, dim] of pictures in bytes, or in floats from 0 to 1."""
        x = pictures_NCSS
        if x.shape[-1] < SMALLEST or x.shape[-2] < SMALLEST:
            raise SpecError(f"pictures of {x.shape[-2]} x {x.shape[-1]}", f"at least {SMALLEST} rows and columns")
        x = (x.float() / 255 if x.dtype is torch.uint8 else x) - 0.5
        return self.last(self.layers(x).mean((2, 3)))

    def multiplications(self, size: int) -> int:
        """Multiplications for a picture of a size."""
        count = self.last.weight.numel()
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                size = -(-size // layer.stride[0])
                count += layer.weight.numel() * size**2
        return count


def size_costs(sizes: Sequence[int], bytes_K: Sequence[float] | None = None, of_bytes: float = 0.75) -> list[float]:
    """Cost of each size, relative to the largest one's pixels, or to its pixels and bytes.

    Args:
        sizes: ascending.
        bytes_K: read per copy of each size; None if unknown.
        of_bytes: weight of bytes, from 0 to 1, if they are known; pixels have the rest.
    """
    pixels_K = [(size / sizes[-1]) ** 2 for size in sizes]
    if bytes_K is None:
        return pixels_K
    return [(1 - of_bytes) * p + of_bytes * b / bytes_K[-1] for p, b in zip(pixels_K, bytes_K, strict=True)]


def choose_sizes(logits_NK: Tensor, costs_K: Sequence[float], price: float) -> Tensor:
    """The index [N] of each picture's size of the largest p - price * cost; ties go to the first."""
    return (logits_NK.sigmoid() - price * torch.tensor(costs_K, device=logits_NK.device)).argmax(1)


class DynamicImageTower(nn.Module):
    """A backbone that computes each picture at the size that a scale model chooses.

    Args:
        backbone: maps pictures of any size to vectors.
        scale: maps pictures of the smallest size to logits [N, K], one for each size.
        sizes: ascending, the cheapest first.
        price: added probability of doing well that justifies the cost of the largest size.
        similar: min. cosine to the vector of the largest size at which a size does well, for `scale_loss`.
        costs: of the sizes, by default of their pixels; see `size_costs`.
    """

    def __init__(
        self,
        backbone: nn.Module,
        scale: nn.Module,
        sizes: Sequence[int],
        price: float = 0.05,
        similar: float = 0.95,
        costs: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < SMALLEST:
            raise SpecError(f"sizes {tuple(sizes)}", f"ascending sizes of at least {SMALLEST}")
        if not 0 <= price <= 1:
            raise SpecError(f"price={price}", "0 to 1")
        self.backbone, self.scale, self.sizes = backbone, scale, tuple(sizes)
        self.price, self.similar = price, similar
        self.costs = tuple(size_costs(sizes) if costs is None else costs)
        if len(self.costs) != len(self.sizes):
            raise SpecError(f"{len(self.costs)} costs", f"one for each of the sizes {self.sizes}")

    def choose(self, small_NCSS: Tensor) -> Tensor:
        """The index [N] in `sizes` of each picture's size, from copies of the smallest size."""
        logits_NK = self.scale(small_NCSS)
        if logits_NK.shape[1] != len(self.sizes):
            raise SpecError(f"the scale model has {logits_NK.shape[1]} logits", f"one for each of {self.sizes}")
        return choose_sizes(logits_NK, self.costs, self.price)

    def forward(self, rows_N: Tensor, read: ReadPictures) -> Tensor:
        """Vectors [N, D]; reads each picture at the smallest and at its chosen size only."""
        small = read(rows_N, self.sizes[0])
        chosen_N = self.choose(small)
        parts: list[Tensor] = []
        order: list[Tensor] = []
        for place, size in enumerate(self.sizes):
            at_M = (chosen_N == place).nonzero().squeeze(1)
            if len(at_M):
                parts.append(self.backbone(small[at_M] if place == 0 else read(rows_N[at_M], size)))
                order.append(at_M)
        return torch.cat(parts)[torch.cat(order).argsort()] if parts else self.backbone(small)

    def scale_loss(self, rows_N: Tensor, read: ReadPictures, draws: torch.Generator | None = None) -> Tensor:
        """The log loss of the scale model at a random size and at the largest size, whose label is always 1.

        The mean is over rows: a picture counts once per row.
        """
        place = int(torch.randint(max(1, len(self.sizes) - 1), (), generator=draws))
        rows_U, places_N = rows_N.unique(return_inverse=True)
        with torch.no_grad():
            near, best = (self.backbone(read(rows_U, size)).float() for size in (self.sizes[place], self.sizes[-1]))
            right_U = (F.cosine_similarity(near, best) >= self.similar).float()
        logits_UK = self.scale(read(rows_U, self.sizes[0])).float()
        right_U2 = torch.stack((right_U, torch.ones_like(right_U)), 1)
        losses_U2 = F.binary_cross_entropy_with_logits(logits_UK[:, [place, -1]], right_U2, reduction="none")
        return losses_U2[places_N].mean()


def labels_of_parts(
    pictures: int,
    sizes: int,
    fit: Callable[[Tensor], nn.Module],
    is_right: Callable[[nn.Module, Tensor, int], Tensor],
    parts: int = 4,
    seed: int = 0,
) -> Tensor:
    """The labels [N, K] of a scale model: correctness at each size of a backbone not trained on the picture.

    Args:
        pictures: number of pictures.
        sizes: number of sizes.
        fit: trains a backbone on these pictures.
        is_right: (backbone, pictures, index of the size): 0 or 1 each, or the probability of the right class,
            from which scale models learn more.
        parts: folds; one backbone per fold, trained without it.
        seed: of the split into parts.
    """
    if not 2 <= parts <= pictures:
        raise SpecError(f"{parts} parts of {pictures} pictures", "2 or more, each with a picture")
    order = torch.randperm(pictures, generator=torch.Generator().manual_seed(seed))
    right_NK = torch.zeros(pictures, sizes)
    for part in range(parts):
        left_out = order[part::parts]
        kept = torch.ones(pictures, dtype=torch.bool)
        kept[left_out] = False
        backbone = fit(kept.nonzero().squeeze(1))
        for place in range(sizes):
            right_NK[left_out, place] = is_right(backbone, left_out, place).float()
    return right_NK


class PictureTower(Tower):
    """A tower over the features and the picture of an item.

    In training all pictures of a batch have one size, drawn anew for each and the same on all ranks. In evaluation each
    has the largest size, or the one that a scale model chooses.

    Args:
        embeddings: pooled tables of this side only, of any dims.
        item: the feature with the item's id, one in each sample.
        pictures: computes the vectors of pictures.
        copies: source of pictures, numbered by item id.
        dense_features: dense numbers per sample of this side.
        sizes: of the layers; the last is the dim of the vectors.
    """

    drawn: Tensor
    optional_state = ("drawn",)  # earlier checkpoints lack it

    def __init__(
        self,
        embeddings: AnyTables,
        item: str,
        pictures: ImageTower | DynamicImageTower,
        copies: PictureSource,
        dense_features: int = 0,
        sizes: Sequence[int] = (256, 64),
    ) -> None:
        super().__init__(embeddings, dense_features, sizes, more=_backbone_of(pictures).dim)
        if isinstance(pictures, DynamicImageTower) and not set(pictures.sizes) <= set(copies.sizes):
            raise SpecError(f"sizes {pictures.sizes} of the tower", f"sizes among those of the copies, {copies.sizes}")
        self.item, self.pictures, self.copies = item, pictures, copies
        # Seed of the last draw; each draw takes the next. Ranks draw alike, and checkpoints hold the seed.
        self.register_buffer("drawn", torch.randint(1 << 62, ()))

    def forward(self, batch: Batch | Tensor, sparse: Ids | None = None) -> Tensor:
        """Vectors [B, sizes[-1]] of a batch, or of dense numbers [B, dense_features] and sparse ids."""
        dense_BF, ids = unpack(batch, sparse, self.dense_features)
        ids_B = copy_to(single_ids(Jagged.from_keyed(ids), self.item), dense_BF.device)
        rows_U, places_B = ids_B.unique(return_inverse=True)
        return self.project(dense_BF, self.embeddings(ids).values(), self._vectors(rows_U)[places_B])

    @property
    def backbone(self) -> ImageTower:
        """The network from pictures to vectors."""
        return _backbone_of(self.pictures)

    def extra_loss(self, batch: Batch) -> Tensor | None:
        """The loss of the scale model, for the pictures of a batch."""
        if not isinstance(self.pictures, DynamicImageTower):
            return None
        ids_B = copy_to(single_ids(batch.sparse, self.item), batch.dense_BF.device)
        return self.pictures.scale_loss(ids_B, self.copies.read, self._next_draw())

    def _next_draw(self) -> torch.Generator:
        self.drawn += 1
        return torch.Generator().manual_seed(int(self.drawn))

    def _vectors(self, rows_U: Tensor) -> Tensor:
        if isinstance(self.pictures, DynamicImageTower) and not self.training:
            return self.pictures(rows_U, self.copies.read)
        sizes = self.pictures.sizes if isinstance(self.pictures, DynamicImageTower) else self.copies.sizes
        size = sizes[int(torch.randint(len(sizes), (), generator=self._next_draw()))] if self.training else sizes[-1]
        return self.backbone(self.copies.read(rows_U, size))


def _backbone_of(pictures: ImageTower | DynamicImageTower) -> ImageTower:
    backbone = pictures.backbone if isinstance(pictures, DynamicImageTower) else pictures
    assert isinstance(backbone, ImageTower)
    return backbone
