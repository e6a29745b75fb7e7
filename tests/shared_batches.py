"""Batches whose samples share bags, made up: as they are held, and what they are as plain ones."""

from dataclasses import replace

import torch
from problems import make_problem

from rowwise.tables.batch import SharedBags
from rowwise.tables.ops.jagged import permute


def make_shared(tables, common, copies_U, seed, most=4, **kinds):
    """Bags of these features for so many samples each, and own ones of all others, in an order of their own."""
    inverse_B = torch.arange(len(copies_U)).repeat_interleave(torch.tensor(copies_U, dtype=torch.int64))
    own = make_problem(tables, len(inverse_B), most, seed, **kinds).jagged
    once = permute(make_problem(tables, len(copies_U), most, seed + 1, **kinds).jagged, common)
    shared = SharedBags(jagged=once, inverse_B=inverse_B)
    others = tuple(feature for feature in own.features if feature not in common)
    plain = permute(own, others) if others else own.without_samples()
    return replace(plain, features=others, shared=shared)


def draw_copies(draws, samples, most=12):
    """How many samples each distinct one is, of so many samples in all."""
    copies_U = []
    while samples:
        copies_U.append(min(samples, draws.randint(1, most)))
        samples -= copies_U[-1]
    return copies_U
