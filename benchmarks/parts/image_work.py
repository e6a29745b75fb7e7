"""Scenes of one digit whose size differs, and image towers that are trained on them."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from rowwise.ingest.pictures import PictureFolder, calibrate, write_pictures
from rowwise.models.image_tower import ImageTower, labels_of_parts

CANVAS, CLASSES, NOISE = 128, 10, 30
SMALLEST_DIGIT, LARGEST_DIGIT = 16, 100
BATCH = 128
WIDTHS, LEARNING_RATE = (16, 32, 64, 64), 3e-3


class Scenes(NamedTuple):
    """Pictures with their digits, read at each size."""

    folder: PictureFolder
    digits_N: Tensor
    copies: dict[int, Tensor]  # by size, bytes [N, 3, S, S]


def draw_scene(digit: NDArray[np.float64], random: np.random.Generator) -> bytes:
    """A digit of any size somewhere on a blotted ground with noise, as a progressive JPEG."""
    blots = Image.fromarray(random.integers(60, 160, (12, 12, 3), dtype=np.uint8))
    ground = blots.resize((CANVAS, CANVAS))
    size = int(random.integers(SMALLEST_DIGIT, LARGEST_DIGIT + 1))
    mask = Image.fromarray((digit * 255 / 16).astype(np.uint8)).resize((size, size), Image.Resampling.BICUBIC)
    left, top = random.integers(0, CANVAS - size + 1, 2).tolist()
    ground.paste(tuple(random.integers(170, 256, 3).tolist()), (left, top), mask)
    pixels = np.asarray(ground).astype(np.int16) + random.integers(-NOISE, NOISE + 1, (CANVAS, CANVAS, 3))
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90, progressive=True)
    return out.getvalue()


def make_scenes(path: Path, digits: NDArray[np.int64], count: int, sizes: tuple[int, ...], seed: int) -> Scenes:
    """Scenes of these digits of scikit-learn's, each several times."""
    images, labels = load_digits(return_X_y=True)
    random = np.random.default_rng(seed)
    chosen = random.choice(digits, count)
    pictures = ((k, draw_scene(images[digit].reshape(8, 8), random)) for k, digit in enumerate(chosen))
    return _read(write_pictures(path, pictures, sizes), torch.from_numpy(labels[chosen]))


def _read(folder: PictureFolder, digits_N: Tensor) -> Scenes:
    """Each file is read once, as far as its longest prefix."""
    rows_N, held = np.arange(len(digits_N)), dict[int, bytes]()
    copies = {size: torch.from_numpy(folder.read(rows_N, size, held)) for size in folder.sizes}
    assert folder.bytes_read == sum(map(len, held.values()))
    return Scenes(folder, digits_N, copies)


def with_similar(path: Path, scenes: Scenes, similar: dict[int, float]) -> Scenes:
    """The same files with prefixes of these SSIMs."""
    return _read(write_pictures(path, scenes.folder.files(), tuple(similar), similar=similar), scenes.digits_N)


def calibrated_on(model: ImageTower, scenes: Scenes) -> dict[int, float]:
    """The SSIM of each size at which a backbone is as accurate as on whole files."""

    def accuracy(copies: NDArray[np.uint8], _: int) -> float:
        named_N = logits_of(model, torch.from_numpy(copies)).argmax(1)
        return float((named_N == scenes.digits_N).double().mean())

    return calibrate(scenes.folder, accuracy)


def fit(model: ImageTower, scenes: Scenes, rows_N: Tensor, steps: int, seed: int) -> ImageTower:
    """Train a backbone, each batch at a size that is drawn."""
    sizes = list(scenes.copies)

    def loss_of(g: torch.Generator) -> Tensor:
        batch = rows_N[torch.randint(len(rows_N), (BATCH,), generator=g)]
        size = sizes[int(torch.randint(len(sizes), (), generator=g))]
        return F.cross_entropy(_in_16_bits(model, scenes.copies[size][batch]), scenes.digits_N[batch])

    return _descend(model, loss_of, steps, seed)


def fit_scale(model: ImageTower, scenes: Scenes, right_NK: Tensor, steps: int, seed: int) -> ImageTower:
    """Train a scale model on the smallest copies."""
    small = scenes.copies[min(scenes.copies)]

    def loss_of(g: torch.Generator) -> Tensor:
        batch = torch.randint(len(small), (BATCH,), generator=g)
        return F.binary_cross_entropy_with_logits(_in_16_bits(model, small[batch]), right_NK[batch])

    return _descend(model, loss_of, steps, seed)


def _in_16_bits(model: ImageTower, pictures: Tensor) -> Tensor:
    """Outputs in training, in a third of the time that they take in 32 bits."""
    with torch.autocast("cpu", torch.bfloat16):
        return model(pictures.contiguous(memory_format=torch.channels_last)).float()


def _descend(model: ImageTower, loss_of: Callable[[torch.Generator], Tensor], steps: int, seed: int) -> ImageTower:
    """Train a model by the losses of batches that are drawn."""
    g = torch.Generator().manual_seed(seed)
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for _ in range(steps):
        loss = loss_of(g)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.to(memory_format=torch.contiguous_format).eval()


@torch.no_grad()
def logits_of(model: nn.Module, pictures: Tensor) -> Tensor:
    return torch.cat([model(part) for part in pictures.split(256)])


def right_of(model: nn.Module, scenes: Scenes, rows_N: Tensor, size: int) -> Tensor:
    """Whether a backbone names the digits at a size."""
    return logits_of(model, scenes.copies[size][rows_N]).argmax(1) == scenes.digits_N[rows_N]


def sureness_of(model: nn.Module, scenes: Scenes, rows_N: Tensor, size: int) -> Tensor:
    """The probability that a backbone gives to the right digits at a size."""
    probabilities_NC = logits_of(model, scenes.copies[size][rows_N]).softmax(1)
    return probabilities_NC[torch.arange(len(rows_N)), scenes.digits_N[rows_N]]


class TrainedTowers(NamedTuple):
    """A backbone, and a scale model that was trained on how sure other backbones were of the right digits."""

    backbone: ImageTower
    scale: ImageTower


def train(scenes: Scenes, steps: int, seed: int) -> TrainedTowers:
    """Backbones without a quarter of the scenes label it for the scale model; the last one has seen all."""
    torch.manual_seed(seed)
    sizes, count = list(scenes.copies), len(scenes.digits_N)

    def backbone_of(rows_N: Tensor) -> ImageTower:
        return fit(ImageTower(CLASSES, WIDTHS), scenes, rows_N, steps, seed)

    right_NK = labels_of_parts(
        count, len(sizes), backbone_of, lambda model, rows, k: sureness_of(model, scenes, rows, sizes[k]), seed=seed
    )
    scale = fit_scale(ImageTower(len(sizes), widths=(8, 16, 32)), scenes, right_NK, steps, seed)
    return TrainedTowers(backbone_of(torch.arange(count)), scale)
