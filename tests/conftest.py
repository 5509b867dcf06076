"""Says which tests run, in which order, and what every test finds around it.

Opt-in flags name themselves in the reason of a skip; no test sees the settings of the shell that started it. Each
of several worker processes (`make test`) has servers of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import hypothesis
import pytest

from ranktape.capture.staging.process import MIN_DEFAULT_NBYTES
from tests.browser import BrowserUnavailableError, start_browser
from tests.ceph import CephServer, CephUnavailableError
from tests.exhaustive import mark_combinations, mark_others
from tests.forking.forked import ForkedWriter
from tests.launch.processes import CHECKOUT
from tests.s3 import MotoServer, S3Server

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

OPT_IN = {
    "exhaustive": "is part of make test-all",
    "gpu": "needs a CUDA device",
}
"""Markers whose tests run only when `--run-<marker>` is given."""

LONGEST = (
    "tests/faults/test_kill.py",
    "tests/capture/test_compiled_graphs.py",
    "tests/docs/test_tutorials.py",
    "tests/capture/test_parallel.py",
    "tests/capture/test_compiled_support.py",
    "tests/capture/test_compiled_ranks.py",
    "tests/faults/test_damage.py",
)
"""The modules whose exhaustive tests take a minute or more, the longest first: `make test-all` begins with them."""

DEVICE_TESTS = CHECKOUT / "tests" / "device"
"""Their process has a backend of its own registered with torch; no other test may run in it."""

OWN_VARIABLES = ("RANKTAPE_", "TENSOR_SAVE_", "TENSOR_SAVER_")
"""Prefixes of the environment variables that ranktape reads."""

# The same examples on every machine and in every run: a failure in CI is a failure here. Compiling a kernel in the
# first example takes seconds, so examples have no deadline of their own; the test has one.
hypothesis.settings.register_profile("ranktape", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("ranktape")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add one flag for each marker that is opt-in."""
    for marker, meaning in OPT_IN.items():
        parser.addoption(f"--run-{marker}", action="store_true", help=f"run the tests marked {marker}: {meaning}")
    parser.addoption("--require-s3", action="store_true", help="fail, do not skip, where Ceph's packages are missing")
    parser.addoption("--require-browser", action="store_true", help="fail, do not skip, where Chromium is missing")
    parser.addoption(
        "--require-simulator", action="store_true", help="fail, do not skip, where no C++ compiler is found"
    )


def pytest_configure() -> None:
    """Let processes that tests start be interrupted: a script's background job has SIGINT ignored, and hands it on."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave `tests/device` out unless it alone is asked for."""
    if not collection_path.is_relative_to(DEVICE_TESTS):
        return None
    asked = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    return None if all(path.is_relative_to(DEVICE_TESTS) for path in asked) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what was not asked for, with a reason that says how to ask; let the rest begin with what is long."""
    for item in items:
        if any(not mark.args or item.get_closest_marker("alone") for mark in item.iter_markers("exhaustive")):
            raise pytest.UsageError(f"{item.nodeid}: an exhaustive test says why it is, and is not alone")
    is_part = config.getoption("lf", default=False) or any("::" in argument for argument in config.args)
    mark_others(items, are_all=not is_part)
    mark_combinations(items)
    for marker, meaning in OPT_IN.items():
        if config.getoption(f"--run-{marker}"):
            continue
        skip = pytest.mark.skip(reason=f"{meaning}: give --run-{marker} to run it")
        for item in items:
            if marker in item.keywords:
                item.add_marker(skip)
    # Modules with long tests first: in the end no worker is idle while one of them still runs.
    if gone := [name for name in LONGEST if not (CHECKOUT / name).exists()]:
        raise pytest.UsageError(f"LONGEST of tests/conftest.py names what is not there: {gone}")
    names = LONGEST if config.getoption("--run-exhaustive") else ()
    first = {CHECKOUT / name: place - len(names) for place, name in enumerate(names)}
    long = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: first.get(item.path, item.path not in long))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in list(os.environ):
        if name.startswith(OWN_VARIABLES):
            monkeypatch.delenv(name)
    # What is counted of files is not kept in the cache of whoever runs the tests.
    monkeypatch.setenv("RANKTAPE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "counted"))
    # Plots are drawn without a display, in this process and in those that tests start.
    monkeypatch.setenv("MPLBACKEND", "Agg")


@pytest.fixture(scope="session", autouse=True)
def _forked_writers() -> Iterator[None]:
    """Captures of this process start their writers where the modules of a writer are imported.

    They stage in as little as where memory is scarce: to touch 512 MiB takes half a second of processor.
    """
    with pytest.MonkeyPatch.context() as patch:
        forked = SimpleNamespace(**vars(subprocess) | {"Popen": ForkedWriter})
        patch.setattr("ranktape.capture.staging.process.subprocess", forked)
        patch.setattr("ranktape.capture.staging.process.MAX_DEFAULT_NBYTES", MIN_DEFAULT_NBYTES)
        yield


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """An S3 server on loopback, started once: moto."""
    server = MotoServer()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def ceph_server(request: pytest.FixtureRequest) -> Iterator[CephServer]:
    """Ceph's S3 gateway on loopback, started once; for tests that leave it as it is."""
    server = _start_ceph(request)
    yield server
    server.stop()


@pytest.fixture
def new_ceph_server(request: pytest.FixtureRequest) -> Iterator[Callable[[], CephServer]]:
    """Starts Ceph's S3 gateway for one test that stops it, hangs it or takes its rights away."""
    with contextlib.ExitStack() as running:

        def start() -> CephServer:
            server = _start_ceph(request)
            running.callback(server.stop)
            return server

        yield start


def _start_ceph(request: pytest.FixtureRequest) -> CephServer:
    try:
        return CephServer()
    except CephUnavailableError as error:
        if request.config.getoption("--require-s3"):
            pytest.fail(f"{error}; --require-s3 was given")
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def chromium(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """A headless browser, started once, for pages from disk; without a network."""
    try:
        browser = start_browser(tmp_path_factory.mktemp("chromium"))
    except BrowserUnavailableError as error:
        if request.config.getoption("--require-browser"):
            pytest.fail(f"{error}; --require-browser was given")
        pytest.skip(str(error))
    yield browser
    browser.quit()
