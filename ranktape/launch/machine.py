"""Gives `ranktape doctor`: what this machine has of what ranktape needs, and how to get the rest."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
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
    import torch
    import torch.distributed as dist

    from ranktape.analyze.numerics import kernels
    from ranktape.analyze.numerics.histograms.moments import warm_up

    examined = [
        _examined("ranktape", __version__),
        _examined("Python", f"{platform.python_version()} ({sys.executable})"),
        _examined("platform", f"{platform.platform()}, {os.cpu_count()} cores"),
        *_packages(),
    ]
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = ", ".join(f"{device.name} ({nbytes_text(device.total_memory)})" for device in devices)
    for name, has, kind, is_needed in (("gloo", "gloo", "CPU", not gpus), ("nccl", "NCCL", "GPU", bool(gpus))):
        is_there = dist.is_available() and getattr(dist, f"is_{name}_available")()
        way_out = f"for trainings on {kind}s: a build of torch with {has}"
        examined.append(_examined(name, "available" * is_there, is_needed=is_needed, way_out=way_out))
    compiler = (shlex.split(os.environ.get("CXX", "")) or ["g++"])[0]
    path, absent = shutil.which(compiler) or "", f"no {compiler} on the PATH"
    way_out = "for torch.compile: apt-get install g++, or set CXX"
    no_gpu = "for trainings on GPUs: a build of torch for CUDA, and its driver"
    warm_up()  # loads the compiled kernels of a writer, or compiles them and puts them into the cache
    stats: Any = kernels.count.stats  # type: ignore[attr-defined]  # numba's, which has no types
    cache = f"cached in {stats.cache_path}" if stats.cache_path else ""
    no_cache = "set NUMBA_CACHE_DIR to a folder that can be written"
    examined += [
        _examined("GPUs", gpus, is_needed=False, way_out=no_gpu),
        _examined("C++ compiler", path, absent=absent, is_needed=False, way_out=way_out),
        _examined("kernels", cache, absent="compiled anew by each process", way_out=no_cache),
        _examined("memory", f"{nbytes_text(available_nbytes())} available"),
    ]
    if url is not None:
        from ranktape.capture.settings.options import CaptureOptions
        from ranktape.capture.starting import open_place, try_writing

        there, absent = "an object can be written, read and removed", ""
        try:
            try_writing(open_place(url, CaptureOptions(storage_options=storage_options)))
        except RanktapeError as error:
            there, absent = "", f"cannot be used: {error}"
        way_out = "correct what the message names, and try again"
        examined.append(_examined(shown(url), there, absent=absent, way_out=way_out))
    return examined


def _examined(
    name: str, there: str, *, absent: str = "not available", is_needed: bool = True, way_out: str = ""
) -> Examined:
    """What is there, or `absent` with the way to get it."""
    return Examined(
        name=name, found=there or absent, is_lacking=is_needed and not there, way_out="" if there else way_out
    )


def _packages() -> Iterator[Examined]:
    """The packages that the metadata of ranktape requires, with the installed versions."""
    from packaging.requirements import Requirement

    known: set[str] = set()
    needed = [Requirement(text) for text in importlib.metadata.requires("ranktape") or ()]
    for extra, one in itertools.product(EXTRAS, needed):
        if one.name in known or not (one.marker is None or one.marker.evaluate({"extra": extra})):
            continue
        known.add(one.name)
        try:
            version = importlib.metadata.version(one.name)
        except importlib.metadata.PackageNotFoundError:
            version, absent = "", "not installed"
            way_out = f"pip install 'ranktape[{extra}]'" if extra else "pip install ranktape"
        else:
            absent = f"{version}, but {one.specifier} is required"
            way_out = f"pip install --upgrade '{one.name}{one.specifier}'"
        is_good = version and one.specifier.contains(version, prereleases=True)
        yield _examined(one.name, version if is_good else "", absent=absent, is_needed=not extra, way_out=way_out)


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
