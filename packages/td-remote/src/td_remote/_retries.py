"""Which errors of a request are worth another attempt, how long to wait, and what the user is shown in the end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from email.utils import parsedate_to_datetime
from typing import NamedTuple, NoReturn, TypeVar

from td_core.errors import FormatError, MissingPluginError, TensorDictError
from td_core.typing import Range

T = TypeVar("T")

#: The longest pause between two attempts, in seconds.
_LONGEST = 20.0
#: Classes of libraries for connections that are lost or silent.
_LOST = re.compile(
    r"Client(Connection|Payload|OS)|ServerDisconnected|IncompleteRead|HTTPClientError|(Read|Connect)Timeout"
    r"|EndpointConnection|ResponseStreaming|ProtocolError"
)
#: What obstore writes about them.
_LOST_TEXT = re.compile(r"error sending request|request or response body error|SlowDown")
_STATUS_TEXT = re.compile(r"status code: (\d{3})\b")
#: What the client and the server of a refused request call it, and the status that it has.
_NAMED_STATUS = {
    "AlreadyExistsError": 409, "AuthorizationHeaderMalformed": 301, "FileNotFoundError": 404,
    "IllegalLocationConstraintException": 301, "InternalError": 500, "InvalidRange": 416, "NoCredentialsError": 401,
    "PermanentRedirect": 301, "PermissionDeniedError": 403, "PermissionError": 403, "PreconditionError": 412,
    "PreconditionFailed": 412, "RequestTimeout": 408, "SlowDown": 503, "UnauthenticatedError": 401,
}  # fmt: skip
_HINTS = {
    401: "the server asks for credentials: set those of the environment, or pass storage_options",
    403: "the credentials do not allow it: set others in the environment, or pass storage_options",
    301: "the bucket is in another region: pass its region or endpoint in storage_options",
}
#: The extra of td-remote for the package that a scheme needs.
_EXTRAS = {
    "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az", "adl": "az",
    "http": "http", "https": "http",
}  # fmt: skip


class ShortAnswerError(OSError):
    """An answer with fewer bytes than it should have."""


class Policy(NamedTuple):
    """How the requests below one location are sent.

    Attributes:
        where: the location for messages.
        retries: how many times a request is repeated.
        timeout: the seconds without a byte after which a request has failed.
        concurrency: the most requests of this process for one host.
        secrets: the texts that messages must not contain.
    """

    where: str
    retries: int = 5
    timeout: float = 30.0
    concurrency: int = 64
    secrets: tuple[str, ...] = ()

    def limit(self, size: int) -> float:
        """Return the most seconds for a whole request of some bytes: a slow server may send 1 MB in each timeout."""
        return self.timeout * (2 + size / (1 << 20))

    def hide(self, text: str) -> str:
        """Return a text without secrets."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


class Attempts:
    """The attempts of one request."""

    def __init__(self, policy: Policy, operation: str, name: str) -> None:
        self._policy, self._operation, self._name = policy, operation, name
        self._count, self._began = 0, time.monotonic()

    def pause(self, error: Exception) -> float:
        """Return the seconds to wait before the next attempt; raise the last error if there is none."""
        self._count += 1
        asked = _find_pause(error)
        if asked is None or self._count > self._policy.retries:
            tried = f" (tried {self._count} times in {time.monotonic() - self._began:.1f} s)"
            raise_error(self._policy, self._operation, self._name, error, tried if self._count > 1 else "")
        return min(_LONGEST, max(asked, random.uniform(0, 0.1 * 2**self._count)))

    def run(self, work: Callable[[], T]) -> T:
        """Call a function until it succeeds."""
        while True:
            try:
                return work()
            except Exception as error:  # each library has errors of its own
                pause = self.pause(error)
            time.sleep(pause)

    async def run_async(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await the results of a function until one is there."""
        while True:
            try:
                return await work()
            except Exception as error:  # each library has errors of its own
                pause = self.pause(error)
            await asyncio.sleep(pause)


def find_status(error: BaseException | None) -> int | None:
    """Return the HTTP status that an error of a library, or one that caused it, stands for."""
    while error is not None:
        if _LOST.search(_list_classes(error)):  # its causes have a status that no server has sent
            return None
        answer = getattr(error, "response", None)
        if isinstance(answer, dict):  # botocore
            code = answer.get("Error", {}).get("Code")
            return _NAMED_STATUS.get(code) or answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        for name in ("status", "status_code", "code"):
            status = getattr(error, name, None)
            if isinstance(status, int):
                return status
        if type(error).__name__ in _NAMED_STATUS:
            return _NAMED_STATUS[type(error).__name__]
        if type(error).__module__.startswith("obstore") and (found := _STATUS_TEXT.search(str(error))):
            return int(found[1])
        error = error.__cause__
    return None


def _list_classes(error: BaseException) -> str:
    return " ".join(cls.__name__ for cls in type(error).__mro__)


def _find_pause(error: Exception) -> float | None:
    """Return the seconds that a server asks to wait, 0 if it does not say; None for an error that would come again."""
    if isinstance(error, (TensorDictError, ImportError)):
        return None
    status = find_status(error)
    if status is not None:
        return _read_retry_after(error) if status in (408, 429) or status >= 500 else None
    is_lost = isinstance(error, (TimeoutError, asyncio.TimeoutError, ConnectionError, ShortAnswerError))
    return 0.0 if is_lost or _LOST.search(_list_classes(error)) or _LOST_TEXT.search(str(error)) else None


def _read_retry_after(error: BaseException) -> float:
    """Return the seconds in the header ``Retry-After`` of an answer, 0 without one."""
    answer = getattr(error, "response", None)
    headers = getattr(error, "headers", None)
    if isinstance(answer, dict):
        headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders")
    for name, value in dict(headers or {}).items():
        if name.lower() == "retry-after":
            with contextlib.suppress(ValueError, TypeError):
                if str(value).strip().isdigit():
                    return float(value)
                return max(0.0, parsedate_to_datetime(str(value)).timestamp() - time.time())
    return 0.0 if error.__cause__ is None else _read_retry_after(error.__cause__)


def raise_error(policy: Policy, operation: str, name: str, error: Exception, tried: str = "") -> NoReturn:
    """Raise the OSError or TensorDictError that an error of a library is for the user, with that one as its cause."""
    status, where = find_status(error), policy.where
    if isinstance(error, TensorDictError):
        raise error
    # A cause is printed, and libraries put URLs with tokens into their messages.
    shown = policy.hide(str(error))
    cause = error if shown == str(error) and policy.hide(repr(error)) == repr(error) else OSError(shown)
    if isinstance(error, ImportError):
        extra = _EXTRAS.get(where.partition(":")[0])
        remedy = f": pip install td-remote[{extra}]" if extra else ""
        raise MissingPluginError(f"{where} needs a package: {shown}{remedy}") from cause
    if status in (404, 410):
        raise make_missing_error(where, name) from cause
    if isinstance(error, FileExistsError) or (operation == "write" and status in (409, 412)):
        raise FileExistsError(f"{where}: the object {name!r} exists") from cause
    if status == 412:
        raise make_replaced_error(where, name) from cause
    if isinstance(error, ShortAnswerError):
        raise FormatError(f"{where}: the object {name!r} is truncated: {error}{tried}") from None
    detail = f"{type(error).__name__}: {shown.partition(chr(10))[0]}".rstrip(": ")
    hint = f"; {_HINTS[status]}" if status in _HINTS else ""
    known = (NotADirectoryError, IsADirectoryError, TimeoutError)
    cls = next(
        (cls for cls in known if isinstance(error, cls)), PermissionError if status in (401, 403) else OSError
    )
    if isinstance(error, asyncio.TimeoutError):  # another class before Python 3.11
        cls, detail = TimeoutError, f"no answer in {policy.timeout:g} s"
    raise cls(f"{where}: cannot {operation} the object {name!r}: {detail}{tried}{hint}") from cause


@contextlib.contextmanager
def translate(policy: Policy, operation: str, name: str) -> Iterator[None]:
    """Raise the errors of :func:`raise_error` for those of the block."""
    try:
        yield
    except Exception as error:  # each library has errors of its own
        raise_error(policy, operation, name, error)


def make_missing_error(where: str, name: str) -> FileNotFoundError:
    """Build the error for an object that is missing."""
    return FileNotFoundError(f"{where}: there is no object {name!r}")


def make_replaced_error(where: str, name: str) -> FormatError:
    """Build the error for an object that has another stamp."""
    return FormatError(f"{where}: the object {name!r} was replaced since it was opened: open it again")


def make_short_error(where: str, item: Range, size: int) -> FormatError:
    """Build the error for an object of ``size`` bytes that ends before a range."""
    return FormatError(
        f"{where}: the object {item.name!r} is truncated: it has {size} bytes, and the bytes from {item.start} to "
        f"{item.stop} were read"
    )
