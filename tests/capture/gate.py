"""How does a network fail between a writer and its server? A gate on loopback that the test closes."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from urllib.parse import urlsplit


class Gate:
    """Passes connections on to a server, refuses them, or lets them hang."""

    def __init__(self, endpoint_url: str) -> None:
        parts = urlsplit(endpoint_url)
        self._server = (parts.hostname or "", parts.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_refusing = False
        self.is_hanging = False
        self._is_over = False
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """End every connection."""
        self._is_over = True
        self.is_hanging = False
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while not self._is_over:
            if not select.select([self._listener], [], [], 0.1)[0]:
                continue
            with contextlib.suppress(OSError):
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._pass, args=(client,))
                self._threads.append(thread)
                thread.start()

    def _pass(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._server) as server:
            while not self._is_over and not self.is_refusing:
                if self.is_hanging:
                    time.sleep(0.05)
                    continue
                for source in select.select([client, server], [], [], 0.1)[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    (server if source is client else client).sendall(data)
