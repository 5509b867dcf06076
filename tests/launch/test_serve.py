"""Does a page that is served follow its run, and do those alone who have the token read it?"""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from ranktape.errors import NoRecordsError, UsageError
from ranktape.launch.cli import cli
from ranktape.launch.page_server import MAX_REQUESTS, PageServer, ServedPage, serving
from ranktape.launch.serving import serve
from ranktape.storage.format.attempt import Attempt
from ranktape.storage.format.commit import finish_iteration
from ranktape.storage.format.progress import open_iteration
from ranktape.storage.places.backend import Backend
from ranktape.storage.recording.writer import RankWriter
from tests.analyze.runs import model_tensors
from tests.runs import start
from tests.waiting import until

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

SECONDS = 60
"""Longer than a page takes to be built on a loaded machine."""


class Growing:
    """A run of two ranks that a test lets grow."""

    def __init__(self, place: Path) -> None:
        self.url = str(place)
        self.backend: Backend
        self.attempt: Attempt
        self.writers: list[RankWriter]
        self.backend, self.attempt, self.writers = start(self.url, world_size=2, min_iterations=3)

    def begin(self, iteration: int) -> None:
        """Store an iteration of rank 0 alone."""
        open_iteration(self.backend, attempt=self.attempt, iteration=iteration)
        self._commit(0, iteration)

    def end(self, iteration: int) -> None:
        """Store what rank 1 has of it, too."""
        self._commit(1, iteration)
        finish_iteration(self.backend, attempt=self.attempt, iteration=iteration)

    def _commit(self, rank: int, iteration: int) -> None:
        tensors = model_tensors(num_ranks=2, iterations=[iteration], seed=iteration)
        for array, info in tensors:
            if info.rank == rank:
                self.writers[rank].write(array, info=info)
        self.writers[rank].commit(iteration, expected=[], silent_sites={})


def ask(server: PageServer, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """What a request is answered: status, headers, text."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()


@pytest.fixture
def server() -> Iterator[PageServer]:
    """A server of two small pages."""
    pages = {
        "": lambda: ServedPage(
            content=b"<p>page</p>", media_type="text/html", policy="default-src 'none'; img-src data:"
        ),
        "state": lambda: ServedPage(content=b"{}", media_type="application/json"),
    }
    with serving("127.0.0.1", 0, pages=pages) as running:
        yield running


def test_pages_are_answered_with_what_a_browser_may_do(server: PageServer) -> None:
    assert server.url == f"http://127.0.0.1:{server.port}/{server.token}/"
    status, headers, text = ask(server, f"/{server.token}/")
    assert (status, text) == (200, "<p>page</p>")
    assert headers["Content-Security-Policy"] == "default-src 'none'; img-src data:; frame-ancestors 'none'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Server"] == "ranktape"
    assert ask(server, f"/{server.token}/state?at=1")[::2] == (200, "{}")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 403),
        ("/TOKE/", 403),
        ("/TOKEN0/", 403),
        ("/%54OKEN/", 403),
        ("/\xe9\xff/", 403),
        ("/?/TOKEN/", 403),
        ("/TOKEN", 404),
        ("/TOKEN/nothing", 404),
        ("/TOKEN/../etc/passwd", 404),
        ("/TOKEN//etc/passwd", 404),
        ("/TOKEN/state/", 404),
    ],
)
def test_who_lacks_the_token_or_asks_for_something_else_reads_nothing(
    server: PageServer, path: str, status: int
) -> None:
    wrong = {"TOKE": server.token[:-1], "TOKEN0": f"{server.token}0"}
    words = [wrong.get(word, word.replace("TOKEN", server.token)) for word in path.split("/")]
    said, headers, text = raw(server, f"GET {'/'.join(words)} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n")
    assert said == status
    assert "page" not in text.replace("there is no such page", "")
    assert "default-src 'none'" in headers
    assert server.token not in headers + text


def raw(server: PageServer, request: str) -> tuple[int, str, str]:
    """What is answered to bytes that no library would send: status, headers, text."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as connection:
        connection.sendall(request.encode("latin-1"))
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode("latin-1")
    headers, _, text = answer.partition("\r\n\r\n")
    return int(headers.split()[1]), headers, text


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW"])
def test_pages_are_read_and_nothing_else(server: PageServer, method: str) -> None:
    status, headers, text = ask(server, f"/{server.token}/", method=method)
    assert (status, headers["Allow"]) == (405, "GET")
    assert text == ("" if method == "HEAD" else "Method Not Allowed: pages are read with GET\n")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:PORT", "127.0.0.1", "127.0.0.1:1", "", "[::1]"])
def test_a_name_that_was_made_to_lead_here_is_refused(server: PageServer, host: str) -> None:
    named = host.replace("PORT", str(server.port))
    assert ask(server, f"/{server.token}/", Host=named)[0] == 421
    for name in ("localhost", "LOCALHOST", "127.0.0.1", "[::1]"):
        assert ask(server, f"/{server.token}/", Host=f"{name}:{server.port}")[0] == 200


def test_who_says_nothing_takes_a_place_and_no_more(server: PageServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_REQUESTS):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        until(lambda: not _is_answered(server))
    until(lambda: _is_answered(server))


def _is_answered(server: PageServer) -> bool:
    try:
        return ask(server, f"/{server.token}/")[0] == 200
    except OSError:
        return False


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"port": 70000}, "--port 70000 is not allowed: give 1 to 65535, or 0 for a free one"),
        ({"port": -1}, "--port -1 is not allowed"),
        ({"host": "0.0.0.0"}, "is every address of this machine"),  # noqa: S104 - refused
        ({"host": ""}, "is every address of this machine"),
        ({"host": "192.0.2.1"}, "is no address of this machine: give 127.0.0.1"),
        ({"host": "a b"}, "is no address of this machine"),
        ({"interval": 0.0}, "--interval 0.0 is not allowed: give 0.05 or more"),
        ({"format": ["fp8_e4m4"]}, "fp8_e4m4"),
        ({"where": "layr_idx < 3"}, "did you mean layer_idx"),
        ({"filters": {"iteration": ["two"]}}, "two"),
    ],
    ids=str,
)
def test_a_mistake_is_said_at_once_though_nothing_is_complete(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    growing = Growing(tmp_path / "run")
    with pytest.raises(UsageError) as refused:
        serve(growing.url, **options)
    assert said in str(refused.value)


def test_a_port_that_is_taken_is_said(server: PageServer) -> None:
    with (
        pytest.raises(UsageError, match=f"--port {server.port} cannot be taken: .*: give another, or 0"),
        serving("127.0.0.1", server.port, pages={}),
    ):
        pass


def test_what_can_never_match_ends_where_something_is_complete(tmp_path: Path) -> None:
    growing = Growing(tmp_path / "run")
    growing.begin(0)
    growing.end(0)
    with pytest.raises(NoRecordsError, match="no records match --layer-type atention: layer_type is"):
        serve(growing.url, filters={"layer_type": ["atention"]})
    result = CliRunner().invoke(cli, ["serve", str(tmp_path / "rum")])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "there is no run at" in result.stderr
    assert "beside it there is run" in result.stderr


@contextlib.contextmanager
def served(url: str, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, and the address that it prints."""
    command = [sys.executable, "-m", "ranktape.launch.cli", "serve", url, "--interval", "0.2", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_a_browser_follows_a_run_that_grows(tmp_path: Path, chromium: Chrome) -> None:
    growing = Growing(tmp_path / "run")

    def find(name: str) -> Any:
        return chromium.execute_script("return document.getElementById(arguments[0])", name)

    def text() -> str:
        # Between two pages there is none.
        found = find("live-text")
        return found.text if found is not None else ""

    def facts() -> str:
        return str(chromium.execute_script("return document.querySelector('.facts')?.textContent ?? ''"))

    with served(growing.url) as (process, address):
        chromium.get_log("browser")  # type: ignore[no-untyped-call]
        chromium.get(address)
        assert "The page comes with the first iteration that all ranks have stored." in chromium.page_source
        growing.begin(10)
        until(lambda: "iteration 10 is stored by 1 of 2 ranks" in text())
        assert facts() == ""
        growing.end(10)
        until(lambda: "1 iteration (10)" in facts())
        until(lambda: chromium.execute_script("return document.documentElement.dataset.ready === 'yes'"))
        assert text().startswith(
            "The run is being recorded: 1 of 3 guaranteed iterations are complete, the last one 10"
        )
        # Who looks at something decides when the next page comes.
        find("live-follow").click()
        growing.begin(20)
        growing.end(20)
        until(lambda: find("live-show").is_displayed())
        assert "1 iteration (10)" in facts()
        chromium.execute_script("window.ranktape.selection.filter('rank', new Set([1]))")
        find("live-show").click()
        until(lambda: "2 iterations (10, 20)" in facts())
        # What was chosen is still chosen.
        count = "return document.getElementById('selected-count')?.textContent ?? ''"
        until(lambda: " of " in str(chromium.execute_script(count)))
        assert find("live-follow").is_selected() is False
        assert "Forbidden" in _body(chromium, address.rpartition("/")[0][:-1] + "/")
        chromium.get(address)
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 0
        assert process.stderr is not None
        said = process.stderr.read()
        assert "Traceback" not in said
        assert said.startswith(f"follows {growing.url} while it is recorded")
        until(lambda: text() == "The server does not answer: this page stays as it is.")
        assert "2 iterations (10, 20)" in facts()
    log = [entry["message"] for entry in chromium.get_log("browser")]  # type: ignore[no-untyped-call]
    assert [line for line in log if "Content Security Policy" in line] == []


def _body(chromium: Chrome, address: str) -> str:
    chromium.get(address)
    return str(chromium.execute_script("return document.body.textContent"))


def test_what_goes_wrong_meanwhile_is_said_on_the_page(tmp_path: Path) -> None:
    growing = Growing(tmp_path / "run")
    growing.begin(0)
    growing.end(0)
    with served(growing.url) as (_, address):
        place = http.client.HTTPConnection(address.split("/")[2], timeout=SECONDS)
        path = "/" + address.split("/", 3)[3]

        def get(name: str) -> str:
            place.request("GET", path + name)
            return place.getresponse().read().decode()

        state = json.loads(get("state"))
        assert state["version"] == 1
        page = get("")
        Path(growing.url).rename(tmp_path / "elsewhere")
        until(lambda: "The page stays as it is: " in json.loads(get("state"))["text"])
        assert json.loads(get("state"))["version"] == 1
        assert get("") == page
        (tmp_path / "elsewhere").rename(growing.url)
        until(lambda: json.loads(get("state"))["text"] == state["text"])
        place.close()
