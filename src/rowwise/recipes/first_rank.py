"""What the first rank of a run does for all: reading a recipe's data, choosing a folder.

What the first rank cannot do fails on all ranks with its words, so that a console has one line to show. With one rank,
nothing but the doing is left.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from rowwise.comm.seam import Comm
from rowwise.comm.status import broadcast_object
from rowwise.errors import AgreedError, RowwiseError, one_line
from rowwise.recipes.compose import ResolvedRecipe, resolve
from rowwise.recipes.recipe import Recipe

T = TypeVar("T")


def on_first_rank(comm: Comm, make: Callable[[], T]) -> T:
    """What the first rank makes, on all; called by all of them, and made once all have come."""
    if len(comm.ranks) == 1:
        return make()
    made: T | None = None
    error: RowwiseError | OSError | None = None
    broadcast_object(comm, None, 0, "recipe")  # a rank that has failed before is known of now
    if comm.rank == 0:
        try:
            made = make()
        except (RowwiseError, OSError) as caught:
            error = caught
    told, line = broadcast_object(comm, (made, None if error is None else one_line(error) or str(error)), 0, "recipe")
    if error is not None:
        raise error
    if line is not None:
        raise AgreedError(line)
    return told


def resolve_on_first_rank(make: Callable[[], ResolvedRecipe], comm: Comm) -> ResolvedRecipe:
    """The first rank looks through the data, and the others take what it found: it takes time, and must be the same."""
    own: list[ResolvedRecipe] = []

    def first() -> Recipe:
        own.append(make())
        return own[0].recipe

    recipe = on_first_rank(comm, first)
    # As the first rank has it, also where its processor has what this one lacks.
    return own[0] if own else replace(resolve(recipe), recipe=recipe)
