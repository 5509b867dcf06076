"""Puts exported files in their place, and says what became of an export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ranktape.analyze.console import write_whole, writing
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from ranktape.analyze.views.exports.series import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export gave to another program."""

    place: str
    """The file."""
    what: str
    """How much of what was exported, in words."""
    is_kept: bool = False
    """Whether the file was there already and holds the same."""
    next_step: str = ""
    """The command that looks at it."""

    def message(self) -> str:
        """What was done, and what to do next."""
        kept = "; it was there already" if self.is_kept else ""
        return "\n".join([f"{self.place}: {self.what}{kept}", *([self.next_step] if self.next_step else [])])


def put_file(path: Path, data: bytes, *, what: str, overwrite: bool) -> bool:
    """Write a file whole or not at all; whether it was there already with the same bytes, and was left alone.

    Raises:
        StorageError: it cannot be written.
        UsageError: the file is there and holds something else, and `overwrite` was not given.
    """
    with writing(path, what=what, option="folder"):
        if path.is_file():
            if path.stat().st_size == len(data) and path.read_bytes() == data:
                return True
            if not overwrite:
                raise UsageError(f"{path} is there and holds something else: add --overwrite, or choose another folder")
    write_whole(path, data, what=what, option="folder")
    return False


def check_folder(target: str) -> Path:
    """The folder that files go to, which need not be there.

    Raises:
        UsageError: it is a file, a URL, or no path.
    """
    if "://" in target:
        raise UsageError(f"{target} is a URL, and files are written to a folder of this machine: name one")
    path = Path(target)
    try:
        is_file = path.exists() and not path.is_dir()
    except (OSError, ValueError) as error:
        raise UsageError(f"{target} is not a path: {error}: name a folder") from error
    if is_file:
        raise UsageError(f"{target} is a file: name a folder")
    return path


def missing_package(package: str, extra: str, error: ImportError) -> UsageError:
    """What to say where a package is not installed that an export needs."""
    return UsageError(f"--to {extra} needs {package} ({error}): pip install 'ranktape[{extra}]'")


def counted(numbers: Sequence[tuple[int, str]]) -> str:
    """Numbers of things in words, those of which there are none left out: `3 scalars, 1 picture`."""
    return ", ".join(f"{number:,} {what}{'' if number == 1 else 's'}" for number, what in numbers if number)


def amount(points: Sequence[Point], pictures: Mapping[str, bytes]) -> str:
    """How much is exported over the iterations, in words."""
    num_scalars = sum(len(point.metrics) for point in points)
    num_histograms = sum(one is not None for point in points for one in (point.values, point.binades))
    return counted([(num_scalars, "scalar"), (num_histograms, "histogram"), (len(pictures), "picture")])
