"""Builds and loads the simulated accelerator: the torch device "sim", two of them, for machines without a GPU.

    accelerator = load()                        # compiles once for each source, torch and Python: 20 s of one core
    x = torch.randn(4, device="sim:0")
    accelerator.set_delay(kernel_us=200, copy_us=2000, is_random=True)
    with accelerator.watching() as waits: step()    # waits.here: what this thread waited for
    accelerator.fail_next("copy")               # alloc launch copy record wait query sync pin register async

A process can have one PrivateUse1 backend, and autograd creates its threads in the first backward pass: load it in a
process of its own, before anything trains. Not simulated: speed, two copy engines, peer copies, NCCL, generators,
autocast, `torch.compile`, fork, the limit of locked memory, memory pools of graphs.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.util
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.utils.backend_registration

SOURCE = Path(__file__).with_name("accelerator.cpp")
CACHE_VARIABLE = "SIMULATED_ACCELERATOR_CACHE"
"""Names the folder of the built libraries in place of the user's cache."""


class NoCompilerError(Exception):
    """The library is not in the cache, and no C++ compiler or no ninja is on the PATH."""


class Waits:
    """What the host has waited for since the block began, by thread."""

    def __init__(self, backend: ModuleType) -> None:
        self._backend = backend
        self._before = backend.waits()

    @property
    def here(self) -> dict[str, int]:
        """The waits of the calling thread, by reason."""
        thread = threading.get_native_id()
        before, now = self._before.get(thread, {}), self._backend.waits().get(thread, {})
        return {reason: num - before.get(reason, 0) for reason, num in now.items() if num != before.get(reason, 0)}


class Accelerator:
    """The controls of the simulation; those without a method here are the functions of the library."""

    def __init__(self, backend: ModuleType) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def set_delay(self, *, kernel_us: int = 0, copy_us: int = 0, is_random: bool = False) -> None:
        """Delay each kernel, and each copy between host and device; if `is_random`, by up to twice that."""
        self._backend.set_delay(kernel_us, copy_us, is_random)

    def fail_next(self, kind: str, *, after: int = 0, sticky: bool = False) -> None:
        """Fail one call of a kind, `after` that many others; if `sticky`, all later calls fail too."""
        self._backend.fail_next(kind, after, sticky)

    @contextlib.contextmanager
    def watching(self) -> Iterator[Waits]:
        """Count the waits of a block."""
        yield Waits(self._backend)

    def reset(self) -> None:
        """Wait for all streams; clear delays, errors and counters."""
        self.set_delay()
        self._backend.poison(False)  # noqa: FBT003  (a function of the library)
        self._backend.drain()
        self._backend.reset_errors()
        self._backend.get_last_error()
        self._backend.reset_counters()


def load() -> Accelerator:
    """Build the library if it is not in the cache, and register the backend; once in a process.

    Raises:
        NoCompilerError: it has to be built, and cannot be.
    """
    backend = _library()
    torch.utils.backend_registration.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _device_module(backend))
    torch.utils.backend_registration.generate_methods_for_privateuse1_backend()
    # The streams' threads never end: none may run a kernel while the process exits.
    atexit.register(lambda: None if backend.is_forked() else backend.drain())
    return Accelerator(backend)


def _library() -> ModuleType:
    key = f"{torch.__version__} {sys.version} {SOURCE.read_text()}"
    name = f"simulated_accelerator_{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get(CACHE_VARIABLE) or home / "ranktape" / "simulated_accelerator") / name
    if not (folder / "complete").exists():
        missing = [program for program in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(program) is None]
        if missing:
            raise NoCompilerError(f"the simulated accelerator cannot be built without {' and '.join(missing)}")
        from torch.utils import cpp_extension

        folder.mkdir(parents=True, exist_ok=True)
        # Takes a lock file: other processes that build the same wait.
        built: ModuleType = cpp_extension.load(
            name, [str(SOURCE)], extra_cflags=["-O1", "-g0"], build_directory=str(folder)
        )
        (folder / "complete").touch()
        return built
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.so")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _device_module(backend: ModuleType) -> Any:
    """What torch looks for under `torch.sim`."""
    module: Any = ModuleType("torch.sim")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 2
    module.current_device = backend.current_device
    module.set_device = lambda device: backend.set_device(torch.device("sim", torch.device(device).index or 0).index)
    module.current_stream = torch.accelerator.current_stream
    module.synchronize = torch.accelerator.synchronize
    module._is_in_bad_fork = backend.is_forked
    module.manual_seed_all = module.manual_seed = lambda _seed: None  # kernels draw from the CPU's generator
    module.get_rng_state = lambda _device="sim": torch.get_rng_state()
    module.set_rng_state = lambda state, _device="sim": torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.Stream, module.Event = torch.Stream, torch.Event
    return module


if __name__ == "__main__":
    load()
