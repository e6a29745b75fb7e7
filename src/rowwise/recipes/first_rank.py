"""Runs a function on the first rank and broadcasts its result; an error of it is raised on all ranks."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from rowwise.comm.interface import Comm
from rowwise.comm.status import broadcast_object
from rowwise.errors import AgreedError, RowwiseError, one_line
from rowwise.recipes.compose import ResolvedRecipe, resolve
from rowwise.recipes.recipe import Recipe

T = TypeVar("T")


def on_first_rank(comm: Comm, make: Callable[[], T]) -> T:
    """The result of `make` on the first rank, on every rank; a collective. With one rank just `make()`."""
    if len(comm.ranks) == 1:
        return make()
    made: T | None = None
    error: RowwiseError | OSError | None = None
    broadcast_object(comm, None, 0, "recipe")  # raises here if a rank has failed before
    if comm.rank == 0:
        try:
            made = make()
        except (RowwiseError, OSError) as caught:
            error = caught
    received, line = broadcast_object(
        comm, (made, None if error is None else one_line(error) or str(error)), 0, "recipe"
    )
    if error is not None:
        raise error
    if line is not None:
        raise AgreedError(line)
    return received


def resolve_on_first_rank(make: Callable[[], ResolvedRecipe], comm: Comm) -> ResolvedRecipe:
    """Resolve on the first rank and use its recipe on all: it may take a pass over the data, and has to be the same."""
    own: list[ResolvedRecipe] = []

    def first() -> Recipe:
        own.append(make())
        return own[0].recipe

    recipe = on_first_rank(comm, first)
    # The first rank's recipe, even if this processor would have resolved it differently.
    return own[0] if own else replace(resolve(recipe), recipe=recipe)
