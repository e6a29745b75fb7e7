"""Object stores as Storage: S3 and compatible stores, Google Cloud Storage, Azure Blob Storage; by obstore.

Credentials, region and endpoint come from the environment, as obstore finds them (`AWS_ACCESS_KEY_ID`,
`AWS_ENDPOINT_URL`, ...), or from the machine's role; they are in no message. The client retries single requests. Two
failures are handled here: a response that ends too early, and a `create` whose response was lost. Payloads are signed,
so a store refuses bytes that changed in transit. A custom endpoint is reached through a `Gate`, which bounds its
responses. Known limits: profiles in ~/.aws are not read; parts of an upload
that was killed stay until the store's lifecycle rule removes them.
"""

import asyncio
import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar, final

from rowwise.base.errors import StorageError
from rowwise.base.storage.gate import Gate, may_have_gate
from rowwise.base.storage.interface import (
    MissingObjectError,
    ObjectExistsError,
    Piece,
    Pieces,
    SameObject,
    StoredObject,
)
from rowwise.base.storage.limits import VARIABLE, Limits, endpoint_of_environment
from rowwise.base.storage.local import check_size

T = TypeVar("T")
PART_bytes = 16 << 20  # of an upload in parts; S3 takes at most 10,000 of them
RANGE_bytes = 4 << 20  # of a large read
CONCURRENCY = 4  # requests of one read or write
LONGEST_WAIT_s = 5.0  # between two attempts
NAME_bytes = 128  # of a name in a list, on average
SCHEMES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role",
    "gs": "GOOGLE_SERVICE_ACCOUNT or application default credentials",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or an identity",
}


class RetryPolicy(NamedTuple):
    """Retries of a request, with exponential backoff."""

    deadline_s: float = 180.0  # no attempt begins later
    first_wait_s: float = 0.1  # before the second attempt; it doubles with each


@final
class CloudStorage:
    """The objects of a bucket, or of a container of Azure.

    Args:
        url: such as s3://bucket.
        retry: policy of each request.
        limits: of responses; None: those of the environment.
        options: of obstore's store; they override those of the environment.
    """

    def __init__(
        self, url: str, retry: RetryPolicy | None = None, limits: Limits | None = None, **options: Any
    ) -> None:
        scheme, _, bucket = url.partition("://")
        self.url, self._scheme, self._retry = url, scheme, retry or RetryPolicy()
        self._limits, self._gate = limits or Limits.of_environment(), None
        try:
            import obstore
        except ImportError:
            raise StorageError(f"{url}: no client of object stores", hint="pip install 'rowwise[cloud]'") from None
        self._client = obstore
        # Stores are reached by https, except for an endpoint that the environment gives as http://.
        client: dict[str, Any] = {
            "allow_http": True,
            "connect_timeout": "10s",
            "read_timeout": "30s",
            "timeout": "300s",
        }
        # The client gives up earlier than we do, so that a failure which it cannot retry gets another attempt.
        deadline, first = timedelta(seconds=self._retry.deadline_s / 3), self._retry.first_wait_s
        backoff = {
            "init_backoff": timedelta(seconds=first),
            "max_backoff": timedelta(seconds=LONGEST_WAIT_s),
            "base": 2,
        }
        retry_config = {"max_retries": 20, "retry_timeout": deadline, "backoff": backoff}
        endpoint = options.get("endpoint") or endpoint_of_environment() if scheme == "s3" else ""
        if endpoint and may_have_gate(endpoint):
            self._gate = Gate(endpoint, self._limits)
            options["endpoint"] = self._gate.endpoint
            client |= {"proxy_url": self._gate.proxy, "proxy_excludes": "", "read_timeout": "300s"}
        options["client_options"] = client | options.get("client_options", {})
        store_class = getattr(obstore.store, SCHEMES[scheme])
        try:
            self._store = store_class(bucket, retry_config=retry_config, **options)
        except obstore.exceptions.BaseError as error:
            raise self._translate("", error) from None

    def read(self, name: str, begin: int = 0, end: int | None = None, same: SameObject | None = None) -> memoryview:
        same = same or SameObject()
        if end is None:
            end = self.stat(name).size_bytes
        spans = [(at, min(at + RANGE_bytes, end)) for at in range(begin, end, RANGE_bytes)]
        if len(spans) <= 1:
            return self._read(same, name, begin, end)
        content = bytearray(end - begin)
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            at = 0
            for part in pool.map(partial(self._read, same, name), *zip(*spans, strict=True)):
                content[at : at + len(part)] = part
                at += len(part)
        return memoryview(content)[:at]

    def stat(self, name: str) -> StoredObject:
        return self._repeat(name, lambda: _to_stored_object(self._client.head(self._store, name)))

    def write(self, name: str, pieces: Pieces, size_bytes: int) -> None:
        part_bytes = max(PART_bytes, -(-size_bytes // 9000))

        def attempt() -> None:
            if size_bytes <= part_bytes:
                content = b"".join(pieces())
                check_size(f"{self.url}/{name}", len(content), size_bytes)
                self._client.put(self._store, name, content, use_multipart=False)
                return
            source = _CountedPieces(pieces, f"{self.url}/{name}", size_bytes)
            try:
                self._client.put(
                    self._store, name, iter(source), use_multipart=True, chunk_size=part_bytes,
                    max_concurrency=CONCURRENCY,
                )  # fmt: skip
            except Exception:
                if source.error is not None:  # the cause, which the client's error only quotes
                    raise source.error from None
                raise

        self._repeat(name, attempt)

    def create(self, name: str, content: bytes) -> None:
        def attempt() -> None:
            self._client.put(self._store, name, content, mode="create", use_multipart=False)

        try:
            self._repeat(name, attempt)
        except ObjectExistsError:
            # An earlier attempt, whose response was lost, has created it.
            if self.read(name) != content:
                raise

    def list(self, prefix: str) -> list[StoredObject]:
        async def collect() -> list[StoredObject]:
            objects: dict[str, StoredObject] = {}
            left_bytes = self._limits.names * NAME_bytes
            async for page in self._client.list(self._store, prefix=prefix or None, chunk_size=1000):
                for entry in map(_to_stored_object, page):
                    left_bytes -= len(entry.name)
                    if entry.name in objects:
                        raise StorageError(f"{place}: the store lists {entry.name[:200]!r} twice", "each name once")
                    if len(objects) >= self._limits.names or left_bytes < 0:
                        raise StorageError(
                            f"{place}: its list has more than {self._limits.names:,.0f} names of {NAME_bytes} bytes",
                            f"fewer names, or a larger names= in {VARIABLE}",
                        )
                    objects[entry.name] = entry
            return sorted(entry for entry in objects.values() if entry.name.startswith(prefix))

        def attempt() -> list[StoredObject]:
            try:
                # A coroutine can be cancelled even while pages without names arrive. This thread may run another loop.
                with ThreadPoolExecutor(1) as pool:
                    return pool.submit(asyncio.run, asyncio.wait_for(collect(), self._limits.list_s)).result()
            except TimeoutError:
                raise StorageError(
                    f"{place}: its list takes more than {self._limits.list_s:g} s",
                    f"fewer names, or a larger list_s= in {VARIABLE}",
                ) from None

        place = f"{self.url}/{prefix}"
        return self._repeat(prefix, attempt)

    def delete(self, name: str) -> None:
        with suppress(MissingObjectError):
            self._repeat(name, lambda: self._client.delete(self._store, name))

    def _read(self, same: SameObject, name: str, begin: int, end: int) -> memoryview:
        if begin >= end:
            self.stat(name)
            return memoryview(b"")
        options = {"range": (begin, end)}

        def attempt() -> memoryview:
            try:
                response = self._client.get(self._store, name, options=options)
            except self._client.exceptions.GenericError as error:
                if "status code: 416" in str(error):  # the object ends before `begin`
                    return memoryview(b"")
                raise
            content = memoryview(response.bytes())
            same.check(f"{self.url}/{name}", response.meta["e_tag"])
            first, stop = response.range
            if len(content) != stop - first:
                raise _ShortResponseError(f"it has {len(content):,} bytes of {stop - first:,}")
            return content

        return self._repeat(name, attempt)

    def _repeat(self, name: str, action: Callable[[], T]) -> T:
        """The result of an action, which is retried while its failures are transient."""
        begin, wait_s = time.monotonic(), self._retry.first_wait_s
        errors = self._client.exceptions
        while True:
            try:
                return action()
            except (errors.GenericError, errors.JoinError, _ShortResponseError) as error:
                refused = None if self._gate is None else self._gate.take_refusal()
                if refused is not None:
                    raise StorageError(f"{self.url}/{name}: {refused}") from None
                elapsed_s = time.monotonic() - begin
                if is_permanent(str(error)) or elapsed_s + wait_s > self._retry.deadline_s:
                    raise self._translate(name, error, f" for {elapsed_s:.0f} s") from None
            except (errors.BaseError, FileNotFoundError) as error:  # the second: the client's for a missing object
                raise self._translate(name, error) from None
            time.sleep(wait_s * random.uniform(0.5, 1.0))  # jitter, as many ranks may have met the same fault
            wait_s = min(2 * wait_s, LONGEST_WAIT_s)

    def _translate(self, name: str, error: Exception, tried: str = "") -> StorageError:
        errors, place = self._client.exceptions, f"{self.url}/{name}"
        reason = short_reason(error)
        if "NoSuchBucket" in str(error):
            return StorageError(f"{place}: there is no bucket {self.url}", "a bucket that exists")
        if isinstance(error, errors.NotFoundError | FileNotFoundError):
            return MissingObjectError(f"{place}: no such object", "another name")
        if isinstance(error, errors.AlreadyExistsError | errors.PreconditionError):
            return ObjectExistsError(f"{place} exists, with another content", "another place")
        if "RequestTimeTooSkewed" in str(error):
            return StorageError(
                f"{place}: the clock of this machine is not the store's: {reason}", hint="set the clock (NTP)"
            )
        if isinstance(error, errors.PermissionDeniedError | errors.UnauthenticatedError):
            return StorageError(
                f"{place}: the store refuses access: {reason}",
                f"credentials with access, from {CREDENTIALS[self._scheme]}",
            )
        return StorageError(
            f"{place} cannot be reached{tried}: {reason}",
            f"the endpoint of the store, and credentials from {CREDENTIALS[self._scheme]}",
        )


def _to_stored_object(meta: Any) -> StoredObject:
    return StoredObject(meta["path"], meta["size"], meta["last_modified"].timestamp())


class _ShortResponseError(Exception):
    """A response that ended too early."""


class _CountedPieces:
    """The pieces of an upload; raises at their end unless they have the announced size."""

    def __init__(self, pieces: Pieces, place: str, size_bytes: int) -> None:
        self._pieces, self._place, self._size_bytes = pieces, place, size_bytes
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[Piece]:
        count = 0
        try:
            for piece in self._pieces():
                count += len(piece)
                yield piece
            check_size(self._place, count, self._size_bytes)
        except Exception as error:
            self.error = error
            raise


def is_permanent(text: str) -> bool:
    """Whether a retry cannot help, as for a missing option."""
    return re.search(r"BadScheme|Missing[A-Z]\w+|InvalidUrl|status code: 4(?!08|29)\d\d", text) is not None


def short_reason(error: Exception) -> str:
    """The first line of the client's error, without the query of a URL, which may be signed."""
    line = str(error).partition("\n")[0]
    line = re.sub(r"\?[^\s\"']*", "", line)
    return line[:300]
