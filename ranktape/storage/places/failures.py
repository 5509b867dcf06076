"""Translates errors of file systems and clients into `StorageError`s, and removes secrets from them.

Clients report an error by errno, class, HTTP status, or code in an XML document. Their messages may contain keys,
tokens and signed queries. `store_error` handles both.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ranktape.errors import AccessDeniedError, NoBucketError, NoSpaceError, StorageError, UnreachableError

FULL = {errno.ENOSPC, errno.EDQUOT}
"""The errors of a full file system."""

REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
"""The errors of a file system that denies access."""

_PASSING = {
    getattr(errno, name)
    for name in (
        # Replaced files, and disks and servers that are temporarily unavailable: errors of NFS and Lustre while they
        # recover.
        *("ESTALE", "EIO", "ENOTCONN", "ESHUTDOWN", "EREMOTEIO", "ENOLCK"),
        *("ETIMEDOUT", "ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "EHOSTUNREACH", "EHOSTDOWN", "ENETUNREACH"),
        *("ENETDOWN", "EPIPE", "EAGAIN", "EBUSY", "EINTR"),
    )
}

_FULL_CODES = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "NoSpace", "507"}
_PASSING_CODES = {
    *("SlowDown", "RequestTimeout", "ServiceUnavailable", "InternalError", "Throttling", "ThrottlingException"),
    *("TooManyRequests", "RequestLimitExceeded", "BandwidthLimitExceeded", "OperationAborted"),
    # A request that waited too long in our queue is signed again on a retry.
    *("RequestTimeTooSkewed", "ConditionalRequestConflict"),
}
_NO_BUCKET_CODES = {"NoSuchBucket", "ContainerNotFound"}

_REFUSED_CODES = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}

_REFUSED_CLASSES = {
    *("PermissionError", "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"),
    *("NoAuthTokenError", "UnauthorizedSSOTokenError", "TokenRetrievalError"),
}
_PASSING_CLASSES = {
    *("TimeoutError", "ConnectionError", "gaierror", "FSTimeoutError", "IncompleteRead", "ClientError"),
    *("EndpointConnectionError", "ConnectionClosedError", "ReadTimeoutError", "ConnectTimeoutError"),
    *("HTTPClientError", "ResponseParserError", "ResponseStreamingError", "IncompleteReadError"),
}
_LASTING_CLASSES = {"SSLError", "SSLCertVerificationError", "ProxyConnectionError", "ClientConnectorCertificateError"}
_NO_ANSWER_CLASS = "HttpProcessingError"
"""aiohttp's error for an unreadable or truncated answer. Its status 400 does not come from the server."""

_HTTP_ERROR = 400
_HTTP_REFUSED = {401, 403}
_HTTP_PASSING = {408, 409, 425, 429}
_HTTP_FULL = 507
_HTTP_SERVER_ERROR = 500
_HTTP_NOT_IMPLEMENTED = 501

_MAX_DETAIL = 300
"""The number of characters of a client's message that are shown. Some clients repeat whole documents."""

_SECRET_NAME = re.compile(r"key|secret|token|passw|sas|credential|connection_string|signature|auth", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r"(AWS|AZURE|GOOGLE|GCP|GCS|FSSPEC)_.*(SECRET|TOKEN|PASSW|KEY|SAS|CONNECTION_STRING).*")
_SHORT_SECRET = 8
"""The length below which a secret is removed only as a whole word: a key `a` must not remove every letter a."""

_SIGNED = [
    (re.compile(r"(://)[^/@\s'\"]*@"), r"\1***@"),
    (re.compile(r"\?[^\s'\"<>]*=[^\s'\"<>)]*"), "?***"),
    (
        re.compile(
            r"<(AWSAccessKeyId|StringToSign|SignatureProvided|StringToSignBytes|CanonicalRequest\w*)>.*?</\1>",
            re.DOTALL,
        ),
        r"<\1>***</\1>",
    ),
    (re.compile(r"(?i)\b(signature|credential|x-amz-[\w-]*token|sig)\s*[=:]\s*[^\s,;&'\"<>]+"), r"\1=***"),
    (re.compile(r"(?i)\b(authorization)['\"]?\s*[=:]\s*['\"]?(?:\w+ )?[^\s,;&'\"<>]+"), r"\1=***"),
]


def printable(text: str) -> str:
    """The text with control characters escaped, because names in a run are not trusted."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


class Redactor:
    """Removes secrets from text: those of the storage options and the environment, and what looks like a signature."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        values = {value for value in _secret_values(storage_options, is_secret=False) if value}
        values |= {value for name, value in os.environ.items() if value and _SECRET_VARIABLE.search(name)}
        userinfo = url.partition("://")[2].partition("/")[0].rpartition("@")[0]
        values |= {part for part in (userinfo, *userinfo.split(":")) if part}
        # The longest first, because one secret may be a part of another.
        patterns = [_pattern(value) for value in sorted(values, key=len, reverse=True)]
        self._values = re.compile("|".join(patterns)) if patterns else None

    def __call__(self, text: str) -> str:
        """The text with each secret replaced by `***`."""
        for pattern, replacement in _SIGNED:
            text = pattern.sub(replacement, text)
        return self._values.sub("***", text) if self._values else text


def _secret_values(value: Any, *, is_secret: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _secret_values(inner, is_secret=is_secret or bool(_SECRET_NAME.search(str(name))))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secret_values(inner, is_secret=is_secret)
    elif is_secret and isinstance(value, str | bytes):
        yield value.decode(errors="replace") if isinstance(value, bytes) else value


def _pattern(value: str) -> str:
    escaped = re.escape(value)
    return escaped if len(value) >= _SHORT_SECRET else rf"(?<!\w){escaped}(?!\w)"


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes, the latest first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def store_error(error: BaseException, *, verb: str, place: str, redact: Redactor) -> StorageError:
    """The error to raise for an error of a client."""
    kind, remedy = _kind(error)
    detail = redact(" ".join(_text(error).split()))
    if len(detail) > _MAX_DETAIL:
        detail = detail[:_MAX_DETAIL] + "..."
    status, code = answer_of(error)
    if answer := " ".join(part for part in (str(status or ""), code) if part and part not in detail):
        detail += f" ({answer})"
    return kind(printable(f"cannot {verb} {place}: {detail}: {remedy}"))


def _text(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text.removesuffix(": None").strip().rstrip(":")


def _kind(error: BaseException) -> tuple[type[StorageError], str]:
    """The class of our error, and the advice in its message."""
    status, code = answer_of(error)
    is_answer = status is not None or bool(code)
    status = status or 0
    numbers = {link.errno for link in chain(error) if isinstance(link, OSError) and link.errno}
    classes = {kind.__name__ for link in chain(error) for kind in type(link).__mro__}
    is_server_error = status >= _HTTP_SERVER_ERROR and status != _HTTP_NOT_IMPLEMENTED
    text = str(error)
    busy = f"the server answered {status or 'so'} and may be overloaded or out of order: try again later"
    wrong = "the credentials are wrong or lack the permission: check key and secret, their policy and the endpoint"
    refused = "give credentials that may do this, correct the permissions, or choose another URL"
    rules: tuple[tuple[Any, type[StorageError], str], ...] = (
        (
            numbers & FULL or code in _FULL_CODES or status == _HTTP_FULL,
            NoSpaceError,
            "free space or raise the quota, or choose another URL",
        ),
        (code in _NO_BUCKET_CODES, NoBucketError, "create the bucket, or check the URL and the endpoint"),
        (code in _PASSING_CODES or is_server_error or status in _HTTP_PASSING, UnreachableError, busy),
        (status in _HTTP_REFUSED or code in _REFUSED_CODES, AccessDeniedError, wrong),
        (is_answer, StorageError, "check the URL, the endpoint and the storage options"),
        (classes & _REFUSED_CLASSES or numbers & REFUSED, AccessDeniedError, refused),
        (
            classes & _LASTING_CLASSES or "certificate" in text,
            StorageError,
            "the server is not who it should be: check the endpoint and the certificates",
        ),
        (
            numbers & _PASSING or classes & _PASSING_CLASSES,
            UnreachableError,
            "check the URL and that the server answers, then try again",
        ),
        (True, StorageError, "check the URL, the storage options and that nothing else lies in the way"),
    )
    return next((kind, remedy) for holds, kind, remedy in rules if holds)


def answer_of(error: BaseException) -> tuple[int | None, str]:
    """The HTTP status and the server's code of an error or its causes; None and empty if there are none."""
    for link in chain(error):
        if any(kind.__name__ == _NO_ANSWER_CLASS for kind in type(link).__mro__):
            continue
        response = getattr(link, "response", None)
        if isinstance(response, dict) and "Error" in response:
            code = str(response["Error"].get("Code", ""))
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status or (int(code) if code.isdigit() else None), code
        for name in ("status", "status_code", "code"):
            if isinstance(status := getattr(link, name, None), int) and status >= _HTTP_ERROR:
                return status, ""
    return None, ""


def local_error(error: OSError, *, verb: str, place: str) -> StorageError:
    """The error to raise for an error of the operating system."""
    kind, _ = _kind(error)
    remedy = {
        UnreachableError: "check the disk or the file server, then try again, or choose another URL",
        NoSpaceError: "free space or raise the quota, or choose another URL",
        AccessDeniedError: "correct the permissions of the directory, or choose another URL",
    }.get(kind, "move aside what is in the way, or choose another URL")
    return kind(printable(f"cannot {verb} {place}: {error.strerror or error}: {remedy}"))
