"""What a module of tables holds and looks up, and whether two hold the same."""

import msgspec
import torch

from rowwise import Embeddings, Jagged, Table


def with_optimizer(optimizer, tables: tuple[Table, ...]) -> tuple[Table, ...]:
    return tuple(msgspec.structs.replace(t, optimizer=optimizer) for t in tables)


def outputs(embeddings: Embeddings, jagged: Jagged) -> list[torch.Tensor]:
    """The pooled vectors, and those of each sequence."""
    found = embeddings(jagged)
    return [found.values(), *found.sequences.values()]


def everything(embeddings: Embeddings) -> dict[str, torch.Tensor]:
    """Copies of all rows and all optimizer state, with the number of updates."""
    kept = {name: rows.clone() for name, rows in embeddings.state_dict().items()}
    for table, state in embeddings.optimizer_state().items():
        kept |= {f"{table}.{name}": view.clone() for name, view in state.items()}
    return kept


def without_steps(kept: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x for name, x in kept.items() if not name.endswith(".step")}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in found:
        assert found[name].dtype == wanted[name].dtype, name
        assert torch.equal(found[name], wanted[name]), name
