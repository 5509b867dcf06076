"""Loads the simulated accelerator; with `--run-gpu` the tests that need none of its controls run on CUDA instead.

A process can have one PrivateUse1 backend, so these tests run in a process of their own: `pytest tests/device`.
`tests/capture/test_device.py` starts it with the others.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ranktape.capture.staging.device import DRIVERS, CudaDriver, Driver
from tests.device.accelerator import Accelerator, NoCompilerError, load


class SimDriver(Driver):
    """Registers host memory with the simulated accelerator, as `CudaDriver` does with CUDA."""

    def __init__(self, sim: Accelerator) -> None:
        self.sim = sim

    def register(self, memory: torch.Tensor, device: torch.device) -> bool:
        if self.sim.host_register(memory.data_ptr(), memory.nbytes) == 0:
            return True
        with pytest.raises(torch.AcceleratorError, match="left by an earlier call"):
            torch.empty(1, device=device).zero_()
        return False

    def unregister(self, memory: torch.Tensor) -> None:
        assert self.sim.host_unregister(memory.data_ptr()) == 0

    def relax_capture_mode(self) -> None:
        self.sim.relax()


class RefusingDriver(CudaDriver):
    """Registers nothing, as a CUDA driver that refuses."""

    def register(self, memory: torch.Tensor, device: torch.device) -> bool:  # noqa: ARG002  (the signature is that of `CudaDriver`)
        return False


_accelerator = pytest.StashKey[Accelerator]()
_refusal = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Load the accelerator before anything trains: autograd creates its threads in the first backward pass."""
    torch.set_num_threads(1)  # inherited by the threads of the streams
    if config.getoption("--run-gpu"):
        return
    try:
        config.stash[_accelerator] = load()
    except NoCompilerError as error:
        if config.getoption("--require-simulator"):
            raise pytest.UsageError(f"{error}; --require-simulator was given") from error
        config.stash[_refusal] = str(error)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip all tests where the accelerator cannot be built."""
    if _refusal in config.stash:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=config.stash[_refusal]))


@pytest.fixture
def sim(request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    """The controls of the simulated accelerator, at rest before and after the test."""
    if _accelerator not in request.config.stash:
        pytest.skip("needs the controls of the simulated accelerator")
    accelerator = request.config.stash[_accelerator]
    accelerator.reset()
    yield accelerator
    accelerator.reset()


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The accelerator's first device: simulated, or CUDA with `--run-gpu`."""
    if _accelerator not in request.config.stash:
        return torch.device("cuda:0")
    request.getfixturevalue("sim")
    return torch.device("sim:0")


@pytest.fixture(params=["registered", "pool"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How copies reach the ring: straight into its registered memory, or through a pool of pinned blocks."""
    if _accelerator not in request.config.stash:
        if request.param == "pool":
            monkeypatch.setitem(DRIVERS, "cuda", RefusingDriver())
    elif request.param == "registered":
        monkeypatch.setitem(DRIVERS, "sim", SimDriver(request.config.stash[_accelerator]))
    return str(request.param)
