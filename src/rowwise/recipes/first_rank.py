"""Calls a function on the first rank and broadcasts its result, or raises its error on all ranks."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from rowwise.comm.interface import Comm
from rowwise.comm.status import broadcast_object
from rowwise.errors import AgreedError, RowwiseError, one_line
from rowwise.recipes.compose import resolve
from rowwise.recipes.recipe import Recipe
from rowwise.recipes.resolved import ResolvedRecipe

T = TypeVar("T")


def on_first_rank(comm: Comm, call: Callable[[], T]) -> T:
    """The result of `call` on the first rank, returned on every rank; a collective."""
    if len(comm.ranks) == 1:
        return call()
    result: T | None = None
    error: RowwiseError | OSError | None = None
    broadcast_object(comm, None, 0, "recipe")  # raises before the call if a rank has failed already
    if comm.rank == 0:
        try:
            result = call()
        except (RowwiseError, OSError) as first_error:
            error = first_error
    line = None if error is None else one_line(error) or str(error)
    received, line = broadcast_object(comm, (result, line), 0, "recipe")
    if error is not None:
        raise error
    if line is not None:
        raise AgreedError(line)
    return received


def resolve_on_first_rank(call: Callable[[], ResolvedRecipe], comm: Comm) -> ResolvedRecipe:
    """The recipe that the first rank resolves, on every rank; resolving may take a pass over the data."""
    on_this_rank: list[ResolvedRecipe] = []

    def resolve_here() -> Recipe:
        on_this_rank.append(call())
        return on_this_rank[0].recipe

    recipe = on_first_rank(comm, resolve_here)
    # Other ranks open the data, but use the first rank's recipe: their processors might resolve another one.
    return on_this_rank[0] if on_this_rank else replace(resolve(recipe), recipe=recipe)
