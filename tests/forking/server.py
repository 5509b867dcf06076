"""Serves Python processes that have modules imported already: each is a fork of this one.

Started as `python server.py SOCKET MODULE[:FUNCTION]...`; it ends with its stdin. What a fork runs, `client.py` and
`forked.py` ask for. To import torch takes 2 s of processor, and a writer 1.4 s until it is ready.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing.process
import multiprocessing.spawn
import os
import select
import signal
import socket
import struct
import sys
import threading
import types
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

NUM_STREAMS = 3
MAX_DESCRIPTORS = 64
PATH = sys.path[1:]
"""The standard library and what is installed."""


def serve(path: str) -> dict[str, Any]:
    """Fork for each request; returns it, in the fork."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    return supervise(connection)
    os._exit(0)


def supervise(connection: socket.socket) -> dict[str, Any]:
    """Fork what was asked for, and tell the client how it ended; returns the request, in the fork.

    A client that is killed takes its process with it, unless that outlives its parent.
    """
    data, received, _, _ = socket.recv_fds(connection, 4, MAX_DESCRIPTORS)
    (size,) = struct.unpack("i", data)
    data = connection.recv(size, socket.MSG_WAITALL)
    asked: dict[str, Any] = json.loads(data)
    pid = os.fork()
    if pid == 0:
        connection.close()
        # Those that were received may have the numbers that others are to have.
        above = max(asked["descriptors"]) + 1
        apart = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in received]
        for descriptor in received:
            os.close(descriptor)
        for descriptor, number in zip(apart, asked["descriptors"], strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        return asked
    for descriptor in (*received, *range(NUM_STREAMS)):
        os.close(descriptor)
    connection.sendall(struct.pack("i", pid))
    ended = os.pidfd_open(pid)
    waiting: list[Any] = [ended] if asked["outlives"] else [ended, connection]
    if ended not in select.select(waiting, [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    try:
        connection.sendall(struct.pack("i", status))
    finally:
        os._exit(0)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def become(request: dict[str, Any]) -> None:
    """Take over directory, environment and the options before the program."""
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    # Where spawned children look for the script.
    multiprocessing.process.ORIGINAL_DIR = request["cwd"]  # type: ignore[attr-defined]
    parent: int = request["parent"]
    os.getppid = lambda: parent if is_running(parent) else 1
    # Its ranks and their writers are forks, too.
    sys.executable = os.environ.get("PYTHON_EXEC", sys.executable)
    multiprocessing.spawn.set_executable(sys.executable)
    words: list[str] = request["words"]
    sys.orig_argv = [sys.executable, *words]
    is_unbuffered = words[0] == "-u"
    del words[: int(is_unbuffered)]
    while words[0] == "-W":
        sys.warnoptions.append(words[1])
        warnings._processoptions(words[1:2])  # type: ignore[attr-defined]  # what Python does with them
        del words[:2]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(  # noqa: SIM115  (as long as the process)
            number,
            "w" if number else "r",
            encoding="utf-8",
            errors="surrogateescape" if number < NUM_STREAMS - 1 else "backslashreplace",
            closefd=False,
        )
        if number:
            stream.reconfigure(line_buffering=number > 1 or stream.isatty(), write_through=is_unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *PATH]


def keep_default_groups(distributed: types.ModuleType) -> None:
    """Have each default process group live as long as the process.

    So it does where DDP is the first to import torch._dynamo, which is imported already. Else a training with gloo and
    DDP may never end: `tests/capture/programs/gloo_hang.py` says why.
    """
    begin = distributed.init_process_group
    kept = []

    @functools.wraps(begin)
    def init_process_group(*words: Any, **options: Any) -> None:
        begin(*words, **options)
        kept.append(distributed.group.WORLD)

    distributed.init_process_group = distributed.distributed_c10d.init_process_group = init_process_group  # type: ignore[attr-defined]


class Torch(MetaPathFinder, Loader):
    """Gives torch to the program when it imports it, with what torch does at the end of its own import."""

    def __init__(self) -> None:
        self.module = sys.modules.pop("torch")
        self.spec = self.module.__spec__

    def find_spec(self, name: str, _path: object, _target: object = None) -> ModuleSpec | None:
        """Find torch alone, once."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        return ModuleSpec(name, self)

    def create_module(self, _spec: ModuleSpec) -> types.ModuleType:
        """The module that is imported already."""
        return self.module

    def exec_module(self, module: types.ModuleType) -> None:
        """Call the entry points of torch's backends."""
        module.__spec__ = self.spec
        keep_default_groups(module.distributed)
        if module._is_device_backend_autoload_enabled():
            module._import_device_backends()


class SmallRings(MetaPathFinder):
    """Has captures stage in as little as where memory is scarce: to touch 512 MiB takes half a second of processor."""

    class Loader(SourceFileLoader):
        """Lowers the default."""

        def exec_module(self, module: types.ModuleType) -> None:
            """Execute the module that has it."""
            super().exec_module(module)
            vars(module)["MAX_DEFAULT_NBYTES"] = module.MIN_DEFAULT_NBYTES

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find that module alone."""
        if name != "ranktape.capture.staging.process":
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = self.Loader(name, spec.origin)
        return spec


def run(words: list[str]) -> None:
    """Run the program as `python words` does, in `__main__`, where it stays."""
    sys.meta_path.insert(0, SmallRings())
    if "torch" in sys.modules:
        sys.meta_path.insert(0, Torch())
    main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    if words[0] == "-m":
        import runpy

        sys.argv[:] = words[1:]
        sys.path.insert(0, str(Path.cwd()))
        sys.modules.pop(words[1], None)
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]  # what `python -m` calls
        return
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        sys.path.insert(0, "")
        code = compile(words[1], "<string>", "exec", dont_inherit=True)
    else:
        sys.argv[:] = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        code = compile(Path(words[0]).read_bytes(), words[0], "exec", dont_inherit=True)
        main.__file__ = words[0]
        main.__loader__ = SourceFileLoader("__main__", words[0])
    exec(code, vars(main))  # noqa: S102  (what a fork is for)


def show(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Print a traceback without our frames."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def status_of(words: list[str]) -> int:
    """Run the program; its exit status, where that is no message."""
    try:
        run(words)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            raise
        return int(ended.code or 0) & 0xFF
    return 0


def end(status: int) -> None:
    """End as the interpreter does, but leave to the system the modules that were imported.

    It takes 0.25 s of processor to free torch, as each page is copied first. What the program made is freed.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # it waits for threads
    atexit._run_exitfuncs()
    # Other threads do not run any more.
    sys.setswitchinterval(60)
    vars(sys.modules["__main__"]).clear()
    gc.collect()
    with contextlib.suppress(OSError):  # nobody reads it any more
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        os._exit(status)


if __name__ == "__main__":
    for module, _, function in (name.partition(":") for name in sys.argv[2:]):
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    gc.collect()
    gc.freeze()
    asked = serve(sys.argv[1])
    become(asked)
    sys.excepthook = show
    end(status_of(asked["words"]))
