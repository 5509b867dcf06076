"""Where does a test get a server from that fails at the right moment?

A proxy of its own before a server that works: it hands requests on, except for those that it is told to spoil.
"""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from ranktape.storage.places.urls import RetryingBackend

DROP = "drop"
"""Hang up before the request is handed on."""

LOSE = "lose"
"""Hand the request on, then hang up without its answer."""

CUT = "cut"
"""Hand the request on, then hang up before the last byte of its answer."""

HANG = "hang"
"""Take the request and say nothing until the proxy ends."""


SLOW = "slow"
"""Hand the request on after most of a second."""

TRICKLE = "trickle"
"""Take the body so slowly that it lasts seconds, then hand the request on."""

ECHO = "echo"
"""Answer 403 with an error that repeats all that was asked, as some servers do."""


class FlakyProxy:
    """A proxy on loopback; `faults` are met by the next requests, one each."""

    def __init__(self, endpoint_url: str) -> None:
        self.faults: list[str | tuple[int, str]] = []
        """What happens to the next requests: one of the words above, or a status with the code of an S3 error."""
        self.refused: dict[str, tuple[int, str]] = {}
        """What every request is answered in whose path has such a word: a status with the code of an S3 error."""
        self.requests: list[str] = []
        """The method of each request that came."""
        self.ended = threading.Event()
        self.host = urlsplit(endpoint_url).netloc
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        # What is sent must not all fit into the kernel: TRICKLE would be over at once for the client.
        self._server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        self.endpoint_url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def stop(self) -> None:
        """Refuse connections from now on."""
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def flaky_proxy(endpoint_url: str) -> Iterator[FlakyProxy]:
    """A proxy that ends with the block."""
    proxy = FlakyProxy(endpoint_url)
    try:
        yield proxy
    finally:
        proxy.stop()


class _Handler(BaseHTTPRequestHandler):
    proxy: FlakyProxy
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        self.proxy.requests.append(self.command)
        refused = [answer for word, answer in self.proxy.refused.items() if word in self.path]
        fault = refused[0] if refused else self.proxy.faults.pop(0) if self.proxy.faults else None
        nbytes = int(self.headers.get("Content-Length") or 0)
        body = b"".join(self._trickle(nbytes)) if fault == TRICKLE else self.rfile.read(nbytes)
        self.close_connection = True
        if isinstance(fault, tuple):
            status, code = fault
            self._send(status, [], f"<Error><Code>{code}</Code><Message>as the test said</Message></Error>".encode())
            return
        if fault == ECHO:
            words = f"{self.command} {self.path} {dict(self.headers)}".replace("&", "&amp;")
            error = f"<Error><Code>SignatureDoesNotMatch</Code><Message>{words}</Message></Error>"
            self._send(403, [], error.encode())
            return
        if fault == HANG:
            self.proxy.ended.wait(60)
        if fault in {HANG, DROP}:
            return
        if fault == SLOW:
            self.proxy.ended.wait(0.7)
        with closing(http.client.HTTPConnection(self.proxy.host, timeout=20)) as upstream:
            upstream.request(self.command, self.path, body, dict(self.headers))
            answer = upstream.getresponse()
            content = answer.read()
        if fault != LOSE:
            kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP]
            length = answer.getheader("Content-Length") or str(len(content))
            self._send(answer.status, kept, content[: -1 if fault == CUT else None], length=length)

    def _trickle(self, nbytes: int) -> Iterator[bytes]:
        for _ in range(24):
            self.proxy.ended.wait(0.1)
            yield self.rfile.read(nbytes // 24)
        yield self.rfile.read(nbytes % 24)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer

    def _send(self, status: int, headers: list[tuple[str, str]], content: bytes, *, length: str | None = None) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  # the signature of the base class
        """Nothing: the test looks at `requests`."""


OpenFlaky = Callable[..., RetryingBackend]
"""Opens a new place behind a proxy; takes `timeout_seconds`."""

_HOP = {"content-length", "connection", "transfer-encoding", "keep-alive"}
