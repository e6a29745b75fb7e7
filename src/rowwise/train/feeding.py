"""The share of time that a trainer waits for data, and the state of its preparation workers.

Known limits: rank 0 reports its own host only.
"""

from collections.abc import Callable

from rowwise.ingest.service.client import ServiceHealth
from rowwise.tables.spec import Value
from rowwise.train.run_folder import Cell

ReadHealth = Callable[[], ServiceHealth | None]  # returns None without workers: the trainer prepares its batches


class DataWait(Value, frozen=True):
    """Seconds in which the trainer waited for batches, and total seconds of the steps."""

    seconds: float = 0.0
    of_s: float = 0.0  # total of all steps, waits included

    @property
    def share(self) -> float:
        return self.seconds / max(self.of_s, 1e-9)


def no_service() -> ServiceHealth | None:
    return None


def worker_cells(health: ServiceHealth | None) -> dict[str, Cell]:
    """The cells of steps.csv about workers; empty without a service."""
    if health is None:
        return {"workers": None, "ready": None, "restarts": None}
    return {"workers": health.workers, "ready": health.ready, "restarts": health.restarts}


def describe_wait(share: float, health: ServiceHealth | None) -> str:
    """The part of the progress line about data, such as "data wait 3% (2 workers, 4 ready)"."""
    wait = f"data wait {share:.0%}"
    if health is None:
        return wait
    return f"{wait} ({health.workers} worker{'s' * (health.workers != 1)}, {health.ready} ready)"
