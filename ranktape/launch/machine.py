"""Gives `ranktape doctor`: what this machine has of what ranktape needs, and how to get the rest."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ranktape.errors import RanktapeError
from ranktape.launch.place import CommandAnswer, command_of, count_text
from ranktape.lazy_names import __version__
from ranktape.storage.format.memory import available_nbytes, nbytes_text
from ranktape.storage.places.backend import without_credentials
from ranktape.storage.places.failures import printable

USERS_EXTRAS = ("", "dask", "notebook", "tensorboard", "parquet")
"""The extras that users install; the others are for developers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """One thing that was examined."""

    name: str
    """What it is."""
    found: str
    """What is there, in words."""
    is_lacking: bool = False
    """Whether a capture or an analysis needs more than this."""
    way_out: str = ""
    """How to get what is missing, and what needs it; empty where nothing is missing."""


def doctor(url: str | None = None, *, storage_options: Mapping[str, Any] | None = None) -> list[Examined]:
    """Show what this machine has of what ranktape needs, and how to get what is missing.

    Checks versions of Python and packages, backends of torch.distributed, GPUs, the C++ compiler of torch.compile, the
    compiled kernels and the memory. At URL, where one is given, a small object is written, read and removed. Exits with
    3 when something is lacking that a capture or an analysis needs.
    """
    found = [
        Examined(name="ranktape", found=__version__),
        Examined(name="Python", found=f"{platform.python_version()} ({sys.executable})"),
        Examined(name="platform", found=f"{platform.platform()}, {os.cpu_count()} cores"),
        *_packages(),
        *_torch(),
        _kernels(),
        Examined(name="memory", found=f"{nbytes_text(available_nbytes())} available"),
    ]
    return found if url is None else [*found, _store(url, storage_options)]


def _packages() -> Iterator[Examined]:
    """The packages that the metadata of ranktape requires, with the installed versions."""
    from packaging.requirements import Requirement

    try:
        needed = list(map(Requirement, importlib.metadata.requires("ranktape") or []))
    except importlib.metadata.PackageNotFoundError:
        yield Examined(name="packages", found="not known", is_lacking=True, way_out="pip install ranktape")
        return
    seen: set[str] = set()
    for extra in USERS_EXTRAS:
        for one in needed:
            if one.name in seen or not (one.marker is None or one.marker.evaluate({"extra": extra})):
                continue
            seen.add(one.name)
            try:
                version = importlib.metadata.version(one.name)
            except importlib.metadata.PackageNotFoundError:
                asked = f"pip install 'ranktape[{extra}]'" if extra else "pip install ranktape"
                yield Examined(name=one.name, found="not installed", is_lacking=not extra, way_out=asked)
                continue
            is_good = one.specifier.contains(version, prereleases=True)
            found = version if is_good else f"{version}, but {one.specifier} is required"
            way_out = "" if is_good else f"pip install --upgrade '{one.name}{one.specifier}'"
            yield Examined(name=one.name, found=found, is_lacking=not (is_good or extra), way_out=way_out)


def _torch() -> Iterator[Examined]:
    """What trainings use of torch: backends of torch.distributed, GPUs, the compiler of torch.compile."""
    import torch
    import torch.distributed as dist

    has_gpu = torch.cuda.is_available()
    for name, is_there, is_needed in (
        ("gloo", dist.is_available() and dist.is_gloo_available(), not has_gpu),
        ("nccl", dist.is_available() and dist.is_nccl_available(), has_gpu),
    ):
        found = "in this build of torch" if is_there else "not in this build of torch"
        way_out = "" if is_there else f"only for distributed trainings over {name}: install a build of torch with it"
        yield Examined(name=name, found=found, is_lacking=is_needed and not is_there, way_out=way_out)
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield Examined(name=f"cuda:{index}", found=f"{device.name}, {nbytes_text(device.total_memory)}")
    if not has_gpu:
        way_out = "only for trainings on GPUs: install a build of torch for CUDA, and its driver"
        yield Examined(name="CUDA", found="no usable GPU", way_out=way_out)
    compiler = (shlex.split(os.environ.get("CXX", "")) or ["g++"])[0]
    path = shutil.which(compiler)
    way_out = "" if path else "only for torch.compile on CPUs: apt-get install g++, or name another compiler in CXX"
    yield Examined(name="C++ compiler", found=path or f"no {compiler} on the PATH", way_out=way_out)


def _kernels() -> Examined:
    """The compiled kernels of a writer, which are loaded, or compiled and cached for the next process."""
    from ranktape.analyze.numerics import kernels
    from ranktape.analyze.numerics.histograms.moments import warm_up

    warm_up()  # puts the compiled loops in their places
    stats: Any = kernels.count.stats  # type: ignore[attr-defined]  # numba's, which has no types
    if stats.cache_path is None:
        way_out = "set NUMBA_CACHE_DIR to a folder that can be written"
        return Examined(name="kernels", found="compiled anew by each process", is_lacking=True, way_out=way_out)
    return Examined(name="kernels", found=f"cached in {stats.cache_path}")


def _store(url: str, storage_options: Mapping[str, Any] | None) -> Examined:
    """Whether a small object can be written to a URL, read and removed again."""
    from ranktape.capture.settings.options import CaptureOptions
    from ranktape.capture.starting import missing_folders, open_place, remove_folders

    name = without_credentials(url) if "://" in url else url
    key, content = f"ranktape-doctor-{secrets.token_hex(4)}", secrets.token_bytes(1024)
    step = "opened"
    try:
        backend = open_place(url, CaptureOptions(storage_options=storage_options))
        folders = missing_folders(backend)
        steps: tuple[tuple[str, Callable[[], object]], ...] = (
            ("written", lambda: backend.put(key, [content])),
            ("read", lambda: _same(backend.get(key), content)),
            ("removed", lambda: backend.delete_keys([key])),
        )
        try:
            for name_of_step, work in steps:
                step = name_of_step
                work()
        finally:
            remove_folders(folders)
    except RanktapeError as error:
        left = f"; the object {key} is left there" if step in {"read", "removed"} else ""
        found, way_out = f"cannot be {step}: {error}{left}", "correct what the message names, and try again"
        return Examined(name=name, found=found, is_lacking=True, way_out=way_out)
    return Examined(name=name, found="an object can be written, read and removed")


def _same(read: bytes | None, written: bytes) -> None:
    if read != written:
        raise RanktapeError("the object that is read is not the one that was written")


@command_of(doctor)
def command(found: Sequence[Examined], given: Mapping[str, Any]) -> CommandAnswer:  # noqa: ARG001 - its signature
    """One line for each thing, with the way to get it where it is missing, and the verdict last."""
    lacking = [one.name for one in found if one.is_lacking]
    width = max(len(one.name) for one in found if "://" not in one.name)
    lines = [
        f"{'lacking' if one.is_lacking else 'optional' if one.way_out else 'good':<8}  {one.name:<{width}}  {one.found}"
        + (f" ({one.way_out})" if one.way_out else "")
        for one in found
    ]
    verdict = "nothing is lacking" if not lacking else f"{count_text(len(lacking), 'thing')} lacking"
    document = {"findings": [dataclasses.asdict(one) for one in found], "lacking": lacking}
    problem = f"{', '.join(map(printable, lacking))}: see above how to get it" if lacking else None
    return CommandAnswer(text="\n".join([*map(printable, lines), verdict]), document=document, problem=problem)
