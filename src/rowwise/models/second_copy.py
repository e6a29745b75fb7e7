"""The second copy of a model, for objectives that train two copies side by side.

It is a module of the first copy, so plans, checkpoints and optimizers treat its tables and weights as any others.
The first copy's forward does not read it: a model is evaluated, exported and served as if it were alone.
"""

from collections.abc import Sequence

from msgspec import structs
from torch import nn

from rowwise.base.errors import SpecError
from rowwise.models.wide import same_map
from rowwise.tables.spec import Table

NAME = "second_copy"
ENDING = "_second"  # suffix of the names of its tables


def second_tables(tables: Sequence[Table]) -> tuple[Table, ...]:
    """The tables of a second copy: those of the first by other names, for the same features."""
    return tuple(
        structs.replace(table, name=table.name + ENDING, features=table.feature_names, id_map=same_map(table))
        for table in tables
    )


def add_second_copy(model: nn.Module, second: nn.Module) -> nn.Module:
    """The model, with another as its second copy."""
    if hasattr(model, NAME):
        raise SpecError(f"{type(model).__name__} has a {NAME!r} of its own", hint="give it another name")
    model.add_module(NAME, second)
    return model


def second_copy_of(model: nn.Module) -> nn.Module:
    """The second copy of a model; raises for a model without one."""
    second = dict(model.named_children()).get(NAME)
    if second is None:
        raise SpecError(f"{type(model).__name__} has no second copy", hint="call add_second_copy first")
    return second
