"""The share of time that a trainer waits for rows, and the workers that prepare them.

Known limits: other hosts than that of the first rank, which tells of itself.
"""

from collections.abc import Callable

from rowwise.ingest.service.client import ServiceHealth
from rowwise.spec import Value
from rowwise.train.run_folder import Cell

MUCH = 0.05  # of the time
LONG_S = 0.5  # less is not worth a line, however short the run

AskHealth = Callable[[], ServiceHealth | None]  # None: nobody prepares rows but the trainer itself


class DataWait(Value, frozen=True):
    """The share of all steps' time that was spent waiting for rows."""

    seconds: float = 0.0
    of_s: float = 0.0

    @property
    def share(self) -> float:
        """Part of the whole."""
        return self.seconds / max(self.of_s, 1e-9)

    @property
    def is_much(self) -> bool:
        """Whether it is worth doing something about it."""
        return self.share > MUCH and self.seconds > LONG_S


def no_service() -> ServiceHealth | None:
    return None


def cells(health: ServiceHealth | None) -> dict[str, Cell]:
    """The cells on workers of a line of steps.csv."""
    if health is None:
        return {"workers": None, "ready": None, "restarts": None}
    return {"workers": health.workers, "ready": health.ready, "restarts": health.restarts}


def in_words(share: float, health: ServiceHealth | None) -> str:
    """For the live line."""
    said = f"data wait {share:.0%}"
    if health is None:
        return said
    return f"{said} ({health.workers} worker{'s' * (health.workers != 1)}, {health.ready} ready)"
