"""What do pictures cost at the size that each is worth, beside one size for all: bytes, products and accuracy?

    python benchmarks/images.py [--quick | --smoke] [--save]

Scenes of 128 x 128 pixels show one of scikit-learn's digits, 16 to 100 pixels high, as progressive JPEGs. A backbone is
trained at sizes that are drawn for each batch, and tested on digits that it has not seen: all scenes at one size, or
each at the size that a scale model chooses by the smallest copy. On scenes that are neither trained on nor tested, the
SSIM of each size is calibrated to the backbone's accuracy on whole files. The price and its part for bytes are those of
the least cost there, where accuracy is nearly that of the best size. Bytes are those of the prefixes that the sizes
need. A mixture of two single sizes draws the size of each scene, so that scenes read as many bytes on average. Prefixes
of photographs are measured as well, on squares of scikit-learn's two.

Takes: 25 minutes; --quick 3 minutes
Needs: scikit-learn, Pillow
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import io
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from parts.image_work import (
    Scenes,
    TrainedTowers,
    calibrated_on,
    logits_of,
    make_scenes,
    right_of,
    train,
    with_similar,
)
from parts.report import at_least, at_most, finish, options, parsed, show
from PIL import Image
from sklearn.datasets import load_sample_images

from rowwise.ingest.pictures import decode, write_pictures
from rowwise.models.image_tower import choose_sizes, size_costs

SIZES = (16, 20, 24, 28, 32, 40, 48)
PRICES = tuple(k / 100 for k in range(0, 81, 2))
OF_BYTES = (0.5, 0.75, 1.0)  # parts of a size's cost
SLACK = 0.005  # of accuracy, for which a price is taken on the scenes of calibration
# The mean over files of the share of bytes that a copy of a photograph needs, by SSIM and size.
PREFIXES = {
    0.95: {16: 0.15, 32: 0.21, 64: 0.30, 112: 0.38, 160: 0.47},
    0.98: {16: 0.18, 32: 0.24, 64: 0.34, 112: 0.56, 160: 0.64},
}
AMOUNTS = {
    "smoke": (80, 40, 6, 1),
    "quick": (2500, 1000, 500, 1),
    "full": (4000, 1500, 1000, 3),
}  # scenes, steps, seeds


def photographs(sizes: tuple[int, ...], folder: Path) -> list[dict]:
    """Prefixes and seconds of decoding of 16 squares of 160 pixels."""
    files = []
    for photo in load_sample_images().images:
        for k in range(8):
            top, left = 160 * (k // 4), 160 * (k % 4)
            out = io.BytesIO()
            Image.fromarray(photo[top : top + 160, left : left + 160]).save(out, "JPEG", quality=90, progressive=True)
            files.append(out.getvalue())
    rows = []
    for similar in PREFIXES:
        written = write_pictures(folder / f"photos-{similar}", enumerate(files), sizes, similar=similar)
        for size in sizes:
            lengths = written.bytes_of(np.arange(len(files)), size)
            share = statistics.mean(n / len(f) for n, f in zip(lengths.tolist(), files, strict=True))
            took_s = []
            for whole in (False, True):
                begin_s = time.perf_counter()
                for length, file in zip(lengths.tolist(), files, strict=True):
                    decode(file if whole else file[:length], size, "a photograph")
                took_s.append((time.perf_counter() - begin_s) / len(files))
            row = {"part": "photographs", "ssim": similar, "size": size, "share": share}
            rows.append(row | {"prefix_ms": 1e3 * took_s[0], "whole_ms": 1e3 * took_s[1]})
            show(rows[-1])
    return rows


class Choice(NamedTuple):
    """What scenes cost at each size, and how probable it is that the backbone does well there."""

    logits_NK: torch.Tensor
    right_KN: torch.Tensor
    bytes_KN: NDArray[np.int64]
    products_K: torch.Tensor
    small: int  # products of the scale model

    @classmethod
    def of(cls, towers: TrainedTowers, scenes: Scenes) -> "Choice":
        rows_N = torch.arange(len(scenes.digits_N))
        return cls(
            logits_of(towers.scale, scenes.copies[SIZES[0]]),
            torch.stack([right_of(towers.backbone, scenes, rows_N, size) for size in SIZES]),
            np.stack([scenes.folder.bytes_of(rows_N.numpy(), size) for size in SIZES]),
            torch.tensor([towers.backbone.multiplications(size) for size in SIZES], dtype=torch.float64),
            towers.scale.multiplications(SIZES[0]),
        )

    def static(self) -> list[dict]:
        """All scenes at one size."""
        return [
            {
                "policy": f"{size}",
                "accuracy": float(self.right_KN[k].float().mean()),
                "products": float(self.products_K[k]),
                "bytes": float(self.bytes_KN[k].mean()),
            }
            for k, size in enumerate(SIZES)
        ]

    def dynamic(self, price: float, of_bytes: float) -> dict:
        """Each scene at the size that the scale model chooses by the smallest copy, which is read and computed, too."""
        costs_K = size_costs(SIZES, self.bytes_KN.mean(1).tolist(), of_bytes)
        chosen_N = choose_sizes(self.logits_NK, costs_K, price)
        rows_N = torch.arange(len(chosen_N))
        return {
            "policy": f"dynamic, price {price:.2f}",
            "of_bytes": of_bytes,
            "accuracy": float(self.right_KN[chosen_N, rows_N].float().mean()),
            "products": float(self.products_K[chosen_N].mean()) + self.small,
            # A longer prefix contains that of the smallest copy.
            "bytes": float(np.maximum(self.bytes_KN[0], self.bytes_KN[chosen_N.numpy(), rows_N.numpy()]).mean()),
            "sizes": [float((chosen_N == k).float().mean()) for k in range(len(SIZES))],
        }

    def cheapest(self) -> tuple[float, float]:
        """The price and the part of bytes of the least cost, at the accuracy of the best size less `SLACK`."""
        best = max(self.static(), key=lambda row: row["accuracy"])
        tries = [(self.dynamic(price, of_bytes), price, of_bytes) for of_bytes in OF_BYTES for price in PRICES]
        good = [one for one in tries if one[0]["accuracy"] >= best["accuracy"] - SLACK]
        _, price, of_bytes = min(
            good or tries[:1], key=lambda one: max(one[0][what] / best[what] for what in ("products", "bytes"))
        )
        return price, of_bytes


def mixture(static: list[dict], bytes_read: float) -> float:
    """The largest accuracy of two single sizes, drawn for each scene so that this many bytes are read on average."""
    accuracies = [row["accuracy"] for row in static if row["bytes"] <= bytes_read]
    for less in static:
        for more in static:
            if less["bytes"] <= bytes_read < more["bytes"]:
                share = (bytes_read - less["bytes"]) / (more["bytes"] - less["bytes"])
                accuracies.append((1 - share) * less["accuracy"] + share * more["accuracy"])
    return max(accuracies, default=0.0)


def measure(seed: int, amounts: tuple, folder: Path) -> list[dict]:
    scenes, others, steps, _ = amounts
    digits = np.random.default_rng(seed).permutation(1797)
    parts = digits[:1200], digits[1200:1500], digits[1500:]
    counts = (scenes, others, others)
    made = [
        make_scenes(folder / f"{seed}-{k}", part, count, SIZES, 10 * seed + k)
        for k, (part, count) in enumerate(zip(parts, counts, strict=True))
    ]
    towers = train(made[0], steps, seed)
    similar = calibrated_on(towers.backbone, made[1])
    files = dict.fromkeys(SIZES, 1.0)
    whole, held_out, tested = (
        Choice.of(towers, with_similar(folder / f"{seed}-{name}", one, least))
        for name, one, least in (("whole", made[2], files), ("price", made[1], similar), ("test", made[2], similar))
    )
    price, of_bytes = held_out.cheapest()
    curve = [tested.dynamic(one, of_bytes) for one in PRICES[::5]]
    static = tested.static()
    rows = [*static, *curve, tested.dynamic(price, of_bytes) | {"chosen": True}]
    rows = [{"part": "scenes", "seed": seed, "mixture": mixture(static, row["bytes"])} | row for row in rows]
    before = Choice.of(towers, made[2]).static()
    for size, *at_sizes in zip(SIZES, before, static, whole.static(), strict=True):
        row = {"part": "calibration", "seed": seed, "size": size, "ssim": similar[size]}
        for name, at_size in zip(("before", "after", "whole"), at_sizes, strict=True):
            row |= {f"accuracy_{name}": at_size["accuracy"], f"bytes_{name}": at_size["bytes"]}
        rows.append(row)
    for row in rows:
        show(row)
    return rows


def main() -> None:
    args = parsed(options("images", __doc__))
    amounts = AMOUNTS["smoke" if args.smoke else "quick" if args.quick else "full"]
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    with tempfile.TemporaryDirectory() as name:
        rows = photographs(tuple(PREFIXES[0.95]), Path(name))
        for seed in range(amounts[3]):
            rows += measure(seed, amounts, Path(name))
    finish("images", rows, floors_of(rows, args), args)


def floors_of(rows: list[dict], args: argparse.Namespace) -> list[dict]:
    worst = max(row["share"] - PREFIXES[row["ssim"]][row["size"]] for row in rows if row["part"] == "photographs")
    floors = [at_most("share of a photograph's bytes, less that of the table, worst size", worst, 0.005)]
    if args.smoke:
        return floors
    of_seeds: list[tuple[float, ...]] = []
    for seed in range(max(row["seed"] for row in rows if row["part"] == "scenes") + 1):
        mine = [row for row in rows if row.get("seed") == seed]
        best = max((row for row in mine if row.get("policy", "").isdecimal()), key=lambda row: row["accuracy"])
        chosen = next(row for row in mine if row.get("chosen"))
        costs = (chosen[what] / best[what] for what in ("products", "bytes"))
        over = chosen["accuracy"] - best["accuracy"], chosen["accuracy"] - chosen["mixture"]
        lost = statistics.mean(row["accuracy_whole"] - row["accuracy_after"] for row in mine if "accuracy_whole" in row)
        of_seeds.append((*over, lost, *costs))
    more, at_bytes, lost, products, read = (statistics.mean(values) for values in zip(*of_seeds, strict=True))
    return [
        *floors,
        at_least("accuracy of chosen sizes over the best single size", more, -0.01),
        at_least("accuracy of chosen sizes over single sizes that are drawn to read as many bytes", at_bytes, 0.0),
        at_most("accuracy lost by calibrated prefixes, mean of sizes", lost, 0.005),
        at_most("products of chosen sizes, over those of the best single size", products, 0.7),
        at_most("bytes of chosen sizes, over those of the best single size", read, 0.7),
    ]


if __name__ == "__main__":
    main()
