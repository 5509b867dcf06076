"""Gives `ranktape doctor`: what this machine has of what ranktape needs, and how to get the rest."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ranktape._version import __version__
from ranktape.errors import RanktapeError
from ranktape.launch.place import CommandAnswer, command_of, count_text, shown
from ranktape.storage.places.backend import available_nbytes, nbytes_text
from ranktape.storage.places.failures import printable

EXTRAS = ("", "dask", "notebook", "tensorboard", "parquet")
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
    return [
        Examined(name="ranktape", found=__version__),
        Examined(name="Python", found=f"{platform.python_version()} ({sys.executable})"),
        Examined(name="platform", found=f"{platform.platform()}, {os.cpu_count()} cores"),
        *_packages(),
        *_torch(),
        _kernels(),
        Examined(name="memory", found=f"{nbytes_text(available_nbytes())} available"),
        *([] if url is None else [_store(url, storage_options)]),
    ]


def _packages() -> Iterator[Examined]:
    """The packages that the metadata of ranktape requires, with the installed versions."""
    from packaging.requirements import Requirement

    needed = [Requirement(text) for text in importlib.metadata.requires("ranktape") or ()]
    extra_of: dict[str, tuple[Requirement, str]] = {}
    for extra in EXTRAS:
        for one in needed:
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                extra_of.setdefault(one.name, (one, extra))
    for name, (needs, extra) in extra_of.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            way_out = f"pip install 'ranktape[{extra}]'" if extra else "pip install ranktape"
            yield Examined(name=name, found="not installed", is_lacking=not extra, way_out=way_out)
            continue
        if needs.specifier.contains(version, prereleases=True):
            yield Examined(name=name, found=version)
        else:
            found = f"{version}, but {needs.specifier} is required"
            way_out = f"pip install --upgrade '{name}{needs.specifier}'"
            yield Examined(name=name, found=found, is_lacking=not extra, way_out=way_out)


def _torch() -> Iterator[Examined]:
    """What trainings use of torch: backends of torch.distributed, GPUs, the compiler of torch.compile."""
    import torch
    import torch.distributed as dist

    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = ", ".join(f"{device.name} ({nbytes_text(device.total_memory)})" for device in devices)
    compiler = (shlex.split(os.environ.get("CXX", "")) or ["g++"])[0]
    has_gloo, has_nccl = (dist.is_available() and one() for one in (dist.is_gloo_available, dist.is_nccl_available))
    for name, found, is_needed, way_out in (
        ("gloo", has_gloo and "available", not gpus, "for trainings on CPUs: a build of torch with gloo"),
        ("nccl", has_nccl and "available", gpus, "for trainings on GPUs: a build of torch with NCCL"),
        ("GPUs", gpus, False, "for trainings on GPUs: a build of torch for CUDA, and its driver"),
        ("C++ compiler", shutil.which(compiler), False, "for torch.compile: apt-get install g++, or set CXX"),
    ):
        text = found or (f"no {compiler} on the PATH" if name == "C++ compiler" else "not available")
        is_lacking = bool(is_needed and not found)
        yield Examined(name=name, found=text, is_lacking=is_lacking, way_out="" if found else way_out)


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
    from ranktape.capture.starting import open_place, try_writing

    try:
        try_writing(open_place(url, CaptureOptions(storage_options=storage_options)))
    except RanktapeError as error:
        way_out = "correct what the message names, and try again"
        return Examined(name=shown(url), found=f"cannot be used: {error}", is_lacking=True, way_out=way_out)
    return Examined(name=shown(url), found="an object can be written, read and removed")


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
