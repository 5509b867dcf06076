"""Serves pages of this process to a browser: who has the token may read them, and nobody else anything.

Nothing is read from the disk: there are as many addresses as pages. A request has to name this server as its host, so
that no other name can be made to lead here; what is logged nowhere is the token, which stands in the address.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ranktape.errors import UsageError

TOKEN_NBYTES = 24
"""Random bytes of a token."""

MAX_REQUESTS = 16
"""Requests that are answered at once; a page of one person has one or two."""

REQUEST_SECONDS = 20.0
"""A connection on which nothing comes for so long is closed."""

MAX_PORT = 65535

HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Of every answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPage:
    """What a page is."""

    content: bytes
    """Its bytes."""
    media_type: str
    """What they are, as HTTP says it."""
    policy: str = "default-src 'none'"
    """What the browser may run and load."""


class PageServer(ThreadingHTTPServer):
    """A server of a few pages, each under the token and its name; `url` is the address of the page without a name."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, *, pages: Mapping[str, Callable[[], ServedPage]]) -> None:
        """Take the port; pages are asked for anew by each request.

        Raises:
            OSError: the address is not to be had.
        """
        self.token = secrets.token_urlsafe(TOKEN_NBYTES)
        self.pages = pages
        self._slots = threading.BoundedSemaphore(MAX_REQUESTS)
        (self.address_family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # What a server of files would ask a name server for is not needed.
        super().__init__((str(address[0]), port), _Handler)
        self.port = int(self.server_address[1])
        named = f"[{host}]" if ":" in host else host
        self.url = f"http://{named}:{self.port}/{self.token}/"
        names = {named.lower(), *(("localhost", "127.0.0.1", "[::1]") if _is_loopback(str(address[0])) else ())}
        self.hosts = {f"{name}:{self.port}" for name in names} | (names if self.port == 80 else set())  # noqa: PLR2004

    def server_bind(self) -> None:
        """Take the address, and look up no name for it."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own; who comes when all are taken is sent away."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and give the place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say what went wrong, unless it is that nobody listens any more."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


@contextmanager
def serving(host: str, port: int, *, pages: Mapping[str, Callable[[], ServedPage]]) -> Iterator[PageServer]:
    """A server that answers while the block runs.

    Raises:
        UsageError: the host is not known, or not one address; or the port is taken, out of range or not allowed.
    """
    if not 0 <= port <= MAX_PORT:
        raise UsageError(f"--port {port} is not allowed: give 1 to {MAX_PORT}, or 0 for a free one")
    if host in {"", "*", "0.0.0.0", "::"}:  # noqa: S104 - refused
        raise UsageError(
            f"--host {host!r} is every address of this machine: name the one that the browser is to use, or have "
            "'ssh -L' bring 127.0.0.1 to it"
        )
    try:
        server = PageServer(host, port, pages=pages)
    except (socket.gaierror, UnicodeError) as error:
        raise UsageError(f"--host {host} is no address of this machine: {error}: give 127.0.0.1") from error
    except OSError as error:
        way_out = "give another, or 0 for a free one"
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"--host {host} is no address of this machine: give 127.0.0.1") from error
        raise UsageError(f"--port {port} cannot be taken: {error.strerror or error}: {way_out}") from error
    # How long it may take to hear that it is to end.
    seconds = {"poll_interval": 0.05}
    thread = threading.Thread(target=server.serve_forever, kwargs=seconds, name="ranktape-page-server", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        """Answer with a page, if the request knows the token and means this server."""
        if (self.headers.get("Host") or "").lower() not in self.server.hosts:
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "this server has another name")
            return
        token, slash, name = self.path.partition("?")[0].removeprefix("/").partition("/")
        # http.server reads a path as Latin-1, whose letters are bytes.
        if not hmac.compare_digest(token.encode("latin-1"), self.server.token.encode("ascii")):
            self.send_error(HTTPStatus.FORBIDDEN, "the address lacks the token that 'ranktape serve' has printed")
            return
        page = self.server.pages.get(name) if slash else None
        if page is None:
            self.send_error(HTTPStatus.NOT_FOUND, "there is no such page")
            return
        answer = page()
        self._send(HTTPStatus.OK, answer)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Answer with one line of text, and close the connection: what else came on it is not read."""
        status = HTTPStatus(code)
        if status is HTTPStatus.NOT_IMPLEMENTED:  # what http.server says of a method that has no function here
            status, message = HTTPStatus.METHOD_NOT_ALLOWED, "pages are read with GET"
        self.close_connection = True
        text = f"{status.phrase}: {message}\n" if message else f"{status.phrase}\n"
        self._send(status, ServedPage(content=text.encode("ascii", "replace"), media_type="text/plain; charset=utf-8"))

    def _send(self, status: HTTPStatus, answer: ServedPage) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", f"{answer.policy}; frame-ancestors 'none'")
        self.send_header("Content-Type", answer.media_type)
        self.send_header("Content-Length", str(len(answer.content)))
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content)

    def version_string(self) -> str:
        """What the answer calls the server."""
        return "ranktape"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Log nothing: the token stands in each request."""
