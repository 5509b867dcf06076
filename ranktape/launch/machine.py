"""Looks at what a machine has of what ranktape needs, and says of what it lacks how to get it."""

from __future__ import annotations

import enum
import functools
import importlib.metadata
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranktape.errors import RanktapeError
from ranktape.lazy_names import __version__
from ranktape.storage.format.memory import available_nbytes, nbytes_text

COMPILE_SECONDS = 60
"""Longer than a C++ compiler takes for a line on a loaded machine."""

USERS_EXTRAS = ("dask", "notebook", "tensorboard", "parquet")
"""The extras that users ask for; the others are for those who work on ranktape."""


class State(enum.StrEnum):
    """How it stands with one thing."""

    GOOD = "good"
    """It is there."""
    OPTIONAL = "optional"
    """It is not there, and needed for some work alone, which the way out names."""
    LACKING = "lacking"
    """It is not there, or does not work, and a capture or an analysis needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """One thing that was looked at."""

    area: str
    """What it belongs to: `packages`, `gpu`, ..."""
    name: str
    """What it is."""
    found: str
    """What is there, in words."""
    state: State
    """Whether that is enough."""
    way_out: str = ""
    """How to get what is missing, or what it is for; empty where nothing is."""


def examine(url: str | None = None, *, storage_options: Mapping[str, Any] | None = None) -> Iterator[Examined]:
    """Everything in turn, as soon as it is known; a URL is written to, and what was written there is removed."""
    for look in (_system, _packages, _backends, _gpu, _compiler, _kernels, _memory):
        yield from look()
    if url is not None:
        yield from _place(url, storage_options)


def _system() -> Iterator[Examined]:
    is_linux = sys.platform == "linux"
    way_out = "" if is_linux else "ranktape is made for Linux: macOS works without memory files, Windows does not"
    about = functools.partial(Examined, area="system", state=State.GOOD)
    yield about(name="ranktape", found=__version__)
    yield about(name="Python", found=f"{platform.python_version()} ({sys.executable})")
    state = State.GOOD if is_linux else State.OPTIONAL
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Examined(
        area="system", name="platform", found=f"{platform.platform()}, {cores} cores", state=state, way_out=way_out
    )


def _packages() -> Iterator[Examined]:
    """The packages that our own metadata names, with the versions that are there."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires("ranktape") or []
    except importlib.metadata.PackageNotFoundError:
        found, way_out = "not installed, only imported: what it needs is not known", "pip install ranktape"
        yield Examined(area="packages", name="ranktape", found=found, state=State.LACKING, way_out=way_out)
        return
    seen: set[str] = set()
    for requirement in map(Requirement, lines):
        extra = next((one for one in ("", *USERS_EXTRAS) if _is_for(requirement, extra=one)), None)
        if extra is None or requirement.name in seen:
            continue
        seen.add(requirement.name)
        asked = "ranktape" if not extra else f"ranktape[{extra}]"
        way_out = f"pip install '{asked}'" + (f", for what the extra {extra} is for" if extra else "")
        missing = State.OPTIONAL if extra else State.LACKING
        about = functools.partial(Examined, area="packages", name=requirement.name)
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield about(found="not installed", state=missing, way_out=way_out)
            continue
        if requirement.specifier.contains(version, prereleases=True):
            yield about(found=version, state=State.GOOD)
        else:
            way_out = f"pip install --upgrade '{requirement.name}{requirement.specifier}'"
            found = f"{version}, and {requirement.specifier} is needed"
            yield about(found=found, state=missing, way_out=way_out)


def _is_for(requirement: Any, *, extra: str) -> bool:
    """Whether a requirement holds on this machine for an extra, or for all where that is empty."""
    if requirement.marker is None:
        return not extra
    return requirement.marker.evaluate({"extra": extra}) and not (extra and requirement.marker.evaluate({"extra": ""}))


def _backends() -> Iterator[Examined]:
    """What ranks talk over."""
    import torch
    import torch.distributed as dist

    about = functools.partial(Examined, area="torch.distributed")
    if not dist.is_available():
        way_out = "install a build of torch with torch.distributed"
        yield about(name="torch.distributed", found="not in this build", state=State.LACKING, way_out=way_out)
        return
    has_gpu = torch.cuda.is_available()
    for name, is_there, is_needed in (
        ("gloo", dist.is_gloo_available(), not has_gpu),
        ("nccl", dist.is_nccl_available(), has_gpu),
    ):
        if is_there:
            yield about(name=name, found="in this build of torch", state=State.GOOD)
            continue
        state = State.LACKING if is_needed else State.OPTIONAL
        for_what = "trainings on GPUs" if name == "nccl" else "trainings on CPUs"
        way_out = f"install a build of torch with {name}, for {for_what}"
        yield about(name=name, found="not in this build of torch", state=state, way_out=way_out)


def _gpu() -> Iterator[Examined]:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        found = "none" if built is None else f"none that works; torch is built for CUDA {built}"
        way_out = "install a build of torch for CUDA, and its driver" if built is None else "see that nvidia-smi works"
        way_out = f"only for trainings on GPUs: {way_out}"
        yield Examined(area="gpu", name="CUDA", found=found, state=State.OPTIONAL, way_out=way_out)
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found = f"{device.name}, {nbytes_text(device.total_memory)}, CUDA {torch.version.cuda}"
        yield Examined(area="gpu", name=f"cuda:{index}", found=found, state=State.GOOD)


def _compiler() -> Iterator[Examined]:
    """Inductor's C++ compiler, by having it compile what inductor needs."""
    about = functools.partial(Examined, area="compiler", name="C++ of torch.compile")
    only = "only for trainings with torch.compile on CPUs"
    words = shlex.split(os.environ.get("CXX", "")) or ["clang++" if sys.platform == "darwin" else "g++"]
    if shutil.which(words[0]) is None:
        way_out = f"{only}: apt-get install g++, or name another compiler in CXX"
        yield about(found=f"no {words[0]} on the PATH", state=State.OPTIONAL, way_out=way_out)
        return
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "trial.cpp"
        source.write_text("#include <vector>\n#include <Python.h>\nint trial() { return 0; }\n", encoding="ascii")
        include = f"-I{sysconfig.get_paths()['include']}"
        command = [*words, "-shared", "-fPIC", include, str(source), "-o", str(Path(folder) / "trial.so")]
        began = time.perf_counter()
        try:
            ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_SECONDS)
            problem = next(iter(ended.stderr.strip().splitlines()), f"exit code {ended.returncode}")
            is_good = ended.returncode == 0
        except (OSError, subprocess.TimeoutExpired) as error:
            problem, is_good = str(error), False
    if is_good:
        yield about(found=f"{words[0]} compiles in {time.perf_counter() - began:.1f} s", state=State.GOOD)
        return
    way_out = f"{only}: apt-get install g++ python3-dev, or name another compiler in CXX"
    yield about(found=f"{words[0]} fails: {problem}", state=State.OPTIONAL, way_out=way_out)


def _kernels() -> Iterator[Examined]:
    """The compiled kernels of a writer, which are loaded, or compiled and kept for the next process."""
    began = time.perf_counter()
    from ranktape.analyze.numerics.histograms.moments import warm_up
    from ranktape.analyze.numerics.kernels import count

    warm_up()
    seconds = time.perf_counter() - began
    about = functools.partial(Examined, area="kernels", name="of the writer")
    stats: Any = count.stats  # type: ignore[attr-defined]  # numba's, whose types say nothing of it
    if stats.cache_path is None:
        found = f"compiled in {seconds:.1f} s, and kept nowhere: every writer does it again"
        way_out = "set NUMBA_CACHE_DIR to a folder that can be written"
        yield about(found=found, state=State.LACKING, way_out=way_out)
        return
    done = "compiled" if stats.cache_misses else "loaded"
    yield about(found=f"{done} in {seconds:.1f} s, kept in {stats.cache_path}", state=State.GOOD)


def _memory() -> Iterator[Examined]:
    """The room for rings, and that one can be made."""
    from ranktape.capture.staging.process import default_host_budget_nbytes
    from ranktape.capture.staging.ring_file import create_ring_file

    ranks = 1
    budget = default_host_budget_nbytes(num_local_ranks=ranks)
    left = nbytes_text(available_nbytes())
    about = functools.partial(Examined, area="memory", name="ring")
    try:
        os.close(create_ring_file(budget))
    except RanktapeError as error:
        yield about(found=str(error), state=State.LACKING, way_out="free memory, or lower --host-budget-nbytes")
        return
    found = f"{left} left; {nbytes_text(budget)} for the ring of one rank by default, less with several on a host"
    yield about(found=found, state=State.GOOD)


def _place(url: str, storage_options: Mapping[str, Any] | None) -> Iterator[Examined]:
    """Whether a small object can be written to a URL, read and removed again, and how long each takes."""
    from ranktape.capture.settings.options import CaptureOptions
    from ranktape.capture.starting import missing_folders, open_place, remove_folders
    from ranktape.storage.places.backend import without_credentials

    about = functools.partial(Examined, area="store", name=without_credentials(url) if "://" in url else url)
    key, content = f"ranktape-doctor-{secrets.token_hex(4)}", secrets.token_bytes(1024)
    step = "opened"
    try:
        backend = open_place(url, CaptureOptions(storage_options=storage_options))
        folders = missing_folders(backend)
        times: dict[str, float] = {}
        try:
            for step, work in (
                ("written", lambda: backend.put(key, [content])),
                ("read", lambda: _same(backend.get(key), content)),
                ("removed", lambda: backend.delete_keys([key])),
            ):
                times[step] = _seconds(work)
        finally:
            remove_folders(folders)
    except RanktapeError as error:
        left = f"; the object {key} is left there" if step in {"read", "removed"} else ""
        found, way_out = f"cannot be {step}: {error}{left}", "mend what the message names, and try again"
        yield about(found=found, state=State.LACKING, way_out=way_out)
        return
    found = ", ".join(f"{step} in {1000 * seconds:.3g} ms" for step, seconds in times.items())
    yield about(found=f"1 kB {found}", state=State.GOOD)


def _same(read: bytes | None, written: bytes) -> None:
    if read != written:
        raise RanktapeError("what was written is not what is read")


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
