"""A campaign of variants of a format: each is refused in one line, or accepted and right; anything else is a failure.

`Campaign.take` runs one variant and counts how it ended. A refusal is an error that commands turn into one line. What
was accepted is shown to an oracle, which raises if it is not right. `finish` prints the counts and fails on the rest.
"""

import math
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import msgspec

from rowwise.base.errors import RowwiseError, one_line

SHOWN = 3  # variants of each wrong ending
LIMIT_S = 20.0  # of a variant: none takes a tenth of it on a quiet machine


@final
class Campaign:
    """Variants of one format."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self.wrong: dict[str, list[str]] = {}

    def take(self, label: object, accept: Callable[[], Any], oracle: Callable[[Any], None]) -> None:
        """One variant: `accept` reads it, and `oracle` looks at what came of it."""
        try:
            with _limited():
                oracle(accept())
        except (RowwiseError, OSError) as error:
            line = one_line(error)
            if line is None or "\n" in line or not line.isprintable():
                self._add(label, f"not one line: {line!r}")
            else:
                self.counts["refused in one line"] += 1
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            self._add(label, f"{type(error).__name__} at {last.filename}:{last.lineno}: {str(error)[:200]}")
        else:
            self.counts["accepted and right"] += 1

    def finish(self) -> None:
        """Print the counts; fail if there is anything else."""
        other = sum(map(len, self.wrong.values()))
        accepted, refused = self.counts["accepted and right"], self.counts["refused in one line"]
        counts = f"{refused} refused in one line, {accepted} accepted and right, {other} anything else"
        print(f"\nCAMPAIGN {self.name}: {counts}")
        told = [f"{len(labels)}x {what}\n    {labels[:SHOWN]}" for what, labels in self.wrong.items()]
        assert not self.wrong, "\n".join(told)
        assert refused, "no variant was refused: the campaign changes nothing that matters"

    def _add(self, label: object, what: str) -> None:
        self.wrong.setdefault(what, []).append(str(label)[:1000])


def check_said(given: Any, found: Any, place: str = "") -> None:
    """Everything that a file says is in what was read from it: the oracle of accepted values."""
    if isinstance(given, dict):
        assert isinstance(found, dict), f"{place}: {given!r} became {found!r}"
        for key, value in given.items():
            if value is not None:
                assert str(key) in found, f"{place}.{key} is lost"
                check_said(value, found[str(key)], f"{place}.{key}")
    elif isinstance(given, list):
        assert isinstance(found, list), f"{place}: {given!r} became {found!r}"
        assert len(given) == len(found), f"{place}: {given!r} became {found!r}"
        for k, (a, b) in enumerate(zip(given, found, strict=True)):
            check_said(a, b, f"{place}[{k}]")
    elif isinstance(given, float) and math.isnan(given):
        assert isinstance(found, float), f"{place}: {given!r} became {found!r}"
        assert math.isnan(found), f"{place}: {given!r} became {found!r}"
    else:
        assert given == found or float(given) == found, f"{place}: {given!r} became {found!r}"
        assert isinstance(given, bool) == isinstance(found, bool), f"{place}: {given!r} became {found!r}"


def plain(value: Any) -> Any:
    """A value as data, with every field of every struct, as it is by default or not."""
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        tag = {config.tag_field: config.tag} if config.tag_field else {}
        return tag | {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return msgspec.to_builtins(value)


@contextmanager
def _limited() -> Iterator[None]:
    def stop(_number: int, _frame: object) -> None:
        raise TimeoutError(f"still at it after {LIMIT_S:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
