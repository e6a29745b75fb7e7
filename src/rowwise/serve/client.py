"""A client of `rowwise serve` that needs only the standard library, and pyarrow for tables."""

import json
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, NamedTuple, Self, final
from urllib.parse import urlsplit

import pyarrow as pa

from rowwise.base.errors import DataError, PeerError

JSON, ARROW = "application/json", "application/vnd.apache.arrow.stream"


def arrow_stream(table: pa.Table) -> bytes:
    """A table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


class FoundItems(NamedTuple):
    """Items for a user, best first, and the version that retrieved them."""

    items: list[Any]  # keys
    scores: list[float]
    version: int
    unknown: int  # number of unknown keys in `among` and `without`


@final
class ScoringClient:
    """Scores rows and retrieves items over one persistent connection. Not thread-safe.

    Args:
        url: of the server, such as http://127.0.0.1:8080.
        timeout_s: per request; also sent to the server as the deadline.
    """

    def __init__(self, url: str, timeout_s: float = 5.0) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise DataError(url, "http://HOST:PORT")
        self.url, self._timeout_s = url, timeout_s
        self._connection = HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout_s)
        self.model = str(self.versions()["model"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def versions(self) -> dict[str, Any]:
        """The served model, its version, and its input columns."""
        return json.loads(self._send("GET", "/v1/versions", None, JSON, JSON))

    def score(
        self, rows: Mapping[str, Sequence[Any]], context: Mapping[str, Any] | None = None
    ) -> dict[str, list[float]]:
        """Logits and probabilities of rows, or of candidates that share one value per context column."""
        body = {"rows": rows} if context is None else {"context": context, "candidates": rows}
        answer = self._send("POST", f"/v1/models/{self.model}/score", json.dumps(body).encode(), JSON, JSON)
        return json.loads(answer)["outputs"]

    def score_table(self, rows: pa.Table) -> pa.Table:
        """Logits and probabilities of the rows of a table, sent as Arrow."""
        answer = self._send("POST", f"/v1/models/{self.model}/score", arrow_stream(rows), ARROW, ARROW)
        return pa.ipc.open_stream(answer).read_all()

    def retrieve(
        self,
        context: Mapping[str, Any],
        k: int = 100,
        *,
        among: Sequence[Any] | None = None,
        without: Sequence[Any] = (),
        exact: bool = False,
    ) -> FoundItems:
        """The k items with the largest scores for a user, by a two-tower or sequence model.

        Args:
            context: the columns of the user, or the list.
            k: maximum number of items.
            among: keys of the items to choose from (default: all).
            without: keys of items to exclude.
            exact: search all items instead of using the index.
        """
        body = {"context": context, "k": k, "among": among, "without": without, "exact": exact}
        answer = self._send("POST", f"/v1/models/{self.model}/retrieve", json.dumps(body).encode(), JSON, JSON)
        content = json.loads(answer)
        return FoundItems(content["items"], content["scores"], content["version"], content["unknown"])

    def _send(self, method: str, path: str, body: bytes | None, kind: str, accept: str) -> bytes:
        timeout = str(max(1, int(1000 * self._timeout_s)))
        headers = {"content-type": kind, "accept": accept, "x-timeout-ms": timeout}
        try:
            self._connection.request(method, path, body, headers)
            response: HTTPResponse = self._connection.getresponse()
            answer = response.read()
        except (OSError, HTTPException) as error:
            self._connection.close()  # a late response must not be taken for that of the next request
            raise PeerError(f"{self.url}: {error or type(error).__name__}", "a server that answers") from None
        if response.status != 200:
            raise DataError(f"{self.url}: {response.status} {_reason(answer)}")
        return answer


def _reason(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"])
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode(errors="replace")
