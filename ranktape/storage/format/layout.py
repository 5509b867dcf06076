"""The key under which each part of a run lies.

zarr.json                                                   the run
lease_000/zarr.json                                         the launch that records into it, while it does
attempt_000-1f3a9c2e/zarr.json                              one start of the worker group
<attempt>/rank_00003/zarr.json                              one process of it
<attempt>/rank_00003/iter_00001234/zarr.json                rank commit, written last
<attempt>/rank_00003/iter_00001234/<site>/zarr.json         one large tensor
<attempt>/rank_00003/iter_00001234/stack_float32_64_0/zarr.json  small tensors of one dtype and shape
<attempt>/rank_00003/iter_00001234/catalogue/zarr.json      what was recorded, as columns
<attempt>/commits/iter_00001234/zarr.json                   the iteration was begun
<attempt>/commits/iter_00001234/rank_00003.committed/zarr.json   markers: one LIST tells all states
<attempt>/iterations/iter_00001234/zarr.json                iteration commit, written last: its catalogue
<attempt>/closed/rank_00003/zarr.json                       the rank will commit nothing more
<attempt>/dropped/iter_00001234/zarr.json                   the iteration was complete, and was removed (--keep-last)
<attempt>/plan/zarr.json                                    further iterations, when the first ones were not enough
<attempt>/verdict/zarr.json                                 whether the guaranteed minimum is there

The end of an attempt's name is drawn by lot when it begins: no key of it is ever a key of another attempt, even
of one in another run that has since been made at the same place. A late writer can therefore leave debris, but
change nothing. An attempt without its document is such debris, and readers pass it over.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from ranktape.errors import RunFormatError
from ranktape.storage.format.record_info import Mode

if TYPE_CHECKING:
    from ranktape.storage.format.record_info import RecordInfo

DOCUMENT = "zarr.json"
"""The document of every group and array."""

CATALOGUE = "catalogue"
"""The name of a rank's catalogue; the names of tensors have commas, and those of stacks begin with `stack_`."""

ANALYSIS = "analysis"
"""The array at the top of a run below which analysis keeps what it counted: it can be deleted, and is counted again.

An array, because plain Zarr looks for no members below one.
"""

_MAX_NAME_LENGTH = 200

MAX_KEY_LENGTH = 560
"""No key of a run is longer, below the run: attempt, rank, iteration, a tensor's name, and what a file is called while
it is written."""

ATTEMPT_GROUPS = ("commits", "iterations", "closed", "dropped")
"""The groups below an attempt, beside those of its ranks."""

# Numbers are spelled as below, so that one thing has one key, and fit into 64 bits.
_STEP = r"([0-9]{8}|[1-9][0-9]{8,17})"
_RANK = r"([0-9]{5}|[1-9][0-9]{5,8})"
_MARKER = re.compile(rf"iter_{_STEP}/rank_{_RANK}\.([a-z]+)/zarr\.json")
_ITERATION = re.compile(rf"iter_{_STEP}/zarr\.json")
_CLOSED = re.compile(rf"rank_{_RANK}/zarr\.json")
_ATTEMPT = re.compile(r"attempt_([0-9]{3}|[1-9][0-9]{3,8})(-[0-9a-f]+)?")
_LEASE = re.compile(r"lease_([0-9]{3}|[1-9][0-9]{3,8})")


class Mark(enum.StrEnum):
    """What became of one iteration on one rank."""

    COMMITTED = "committed"
    """Everything the rank recorded is stored and committed."""
    SKIPPED = "skipped"
    """The rank could not take the iteration and recorded nothing."""
    FAILED = "failed"
    """The rank began the iteration and did not end it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """One rank's word on one iteration, read off a key."""

    iteration: int
    """Training step."""
    rank: int
    """Global rank."""
    mark: Mark
    """What became of it."""


def lease_path(number: int) -> str:
    """The group that says which launch records into the run."""
    return f"lease_{number:03d}"


def attempt_path(number: int, *, token: str) -> str:
    """The group of one start of the worker group; the other functions take it as `attempt`."""
    return f"attempt_{number:03d}-{token}"


def rank_path(attempt: str, rank: int) -> str:
    """The group of one process."""
    return f"{attempt}/rank_{rank:05d}"


def rank_iteration_path(attempt: str, rank: int, iteration: int) -> str:
    """The group of one iteration on one rank: the unit of commit."""
    return f"{rank_path(attempt, rank)}/iter_{iteration:08d}"


def catalogue_path(attempt: str, rank: int, iteration: int) -> str:
    """The array that holds the catalogue of one iteration on one rank."""
    return f"{rank_iteration_path(attempt, rank, iteration)}/{CATALOGUE}"


def stack_name(number: int, *, dtype: str, shape: Sequence[int], layout: str) -> str | None:
    """The name of an array of small tensors, below their iteration; None where it would be too long for a name."""
    extents = "x".join(str(extent) for extent in shape) or "scalar"
    letters = f"_{layout}" if layout.isascii() and layout.isalnum() else ""
    name = f"stack_{dtype}_{extents}{letters}_{number}"
    return name if len(name) <= _MAX_NAME_LENGTH else None


def commits_path(attempt: str) -> str:
    """The group of all markers."""
    return f"{attempt}/commits"


def opened_path(attempt: str, iteration: int) -> str:
    """The group whose presence says that an iteration was begun."""
    return f"{commits_path(attempt)}/iter_{iteration:08d}"


def marker_path(attempt: str, iteration: int, rank: int, mark: Mark) -> str:
    """The group whose presence is one rank's word on one iteration."""
    return f"{opened_path(attempt, iteration)}/rank_{rank:05d}.{mark}"


def iterations_path(attempt: str) -> str:
    """The group of all iteration commits."""
    return f"{attempt}/iterations"


def iteration_path(attempt: str, iteration: int) -> str:
    """The array that holds the merged catalogue of an iteration; its document is the commit."""
    return f"{iterations_path(attempt)}/iter_{iteration:08d}"


def closed_path(attempt: str, rank: int) -> str:
    """The group that says that a rank will commit nothing more."""
    return f"{attempt}/closed/rank_{rank:05d}"


def dropped_path(attempt: str, iteration: int) -> str:
    """The group that says that a complete iteration was removed on purpose."""
    return f"{attempt}/dropped/iter_{iteration:08d}"


def plan_path(attempt: str) -> str:
    """The group that names the iterations to capture, where the options' were not enough."""
    return f"{attempt}/plan"


def verdict_path(attempt: str) -> str:
    """The group that says whether the guaranteed minimum is there."""
    return f"{attempt}/verdict"


def document_key(path: str) -> str:
    """The key of the document of the group or array at `path`; the empty path is the run itself."""
    return f"{path}/{DOCUMENT}" if path else DOCUMENT


def parse_attempt(name: str) -> int | None:
    """The number in the name of an attempt's group; None for other names."""
    match = _ATTEMPT.fullmatch(name)
    return int(match[1]) if match else None


def parse_lease(name: str) -> int | None:
    """The number in the name of a lease's group; None for other names."""
    match = _LEASE.fullmatch(name)
    return int(match[1]) if match else None


def is_part_of_run(name: str) -> bool:
    """Whether a name at the top of a run is one that the layout gives."""
    return name in {DOCUMENT, ANALYSIS} or parse_attempt(name) is not None or parse_lease(name) is not None


def parse_marker(key: str) -> Marker | None:
    """The marker at a key below `commits_path`; None for other keys."""
    match = _MARKER.fullmatch(key)
    if match is None or match[3] not in set(Mark):
        return None
    return Marker(iteration=int(match[1]), rank=int(match[2]), mark=Mark(match[3]))


def parse_iteration(key: str) -> int | None:
    """The iteration whose group's document is at a key such as `iter_00000003/zarr.json`; None for other keys."""
    match = _ITERATION.fullmatch(key)
    return int(match[1]) if match else None


def parse_rank(name: str) -> int | None:
    """The rank whose group has a name; None for other names."""
    return parse_closed(f"{name}/{DOCUMENT}")


def parse_closed(key: str) -> int | None:
    """The rank whose closing is at a key below `closed`; None for other keys."""
    match = _CLOSED.fullmatch(key)
    return int(match[1]) if match else None


MAX_PATH_LENGTH = 400
"""Characters in a site's path: object stores end keys at 1,024 bytes, and the run's own prefix comes first."""

_HASH_LENGTH = 32

_SHORTENED = "+"
"""Before the hash. Encoding leaves none in a field: no name that is whole looks like one that is not."""

_SEGMENT_LENGTH = 200
"""Characters in one segment of a path: file systems end names at 255 bytes."""

_CONTINUED = "+/"
"""Between two segments of a long path. Encoding leaves no `+` in a field: what one of them ends is no whole name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSite:
    """What tells one captured tensor from all others of its rank and iteration."""

    module: str
    """Dotted path of the module; empty outside of a module."""
    layer_type: str
    """`attention`, `linear`, or the user's own."""
    layer_idx: int
    """Global index of the layer; -1 outside of the stack."""
    operation: str
    """`forward` or `backward`."""
    phase: str
    """`pre`, `post`, `unknown`, or the user's own."""
    component: str
    """`FA`, `linear`, `unknown`, or the user's own."""
    quant_type: str
    """What the run computed in, as tagged."""
    tensor_name: str
    """`query`, `input`, `grad_output`, or the user's own."""
    microbatch: int
    """Index of the forward and backward pass within the step."""
    call: int
    """How many times the site had fired before within the microbatch."""
    mode: str = Mode.TRAIN.value
    """`train` or `eval`."""

    @classmethod
    def of(cls, info: RecordInfo) -> TensorSite:
        """The site of a record."""
        return cls(
            module=info.module,
            layer_type=info.layer_type,
            layer_idx=info.layer_idx,
            operation=info.operation,
            phase=info.phase,
            component=info.component,
            quant_type=info.quant_type,
            tensor_name=info.tensor_name,
            microbatch=info.microbatch,
            call=info.call,
            mode=info.mode,
        )


def site_path(site: TensorSite) -> str:
    """The path of a site below its iteration's group; `parse_site_path` gives it back where it is not shortened.

    Segments are joined by slashes where a name is longer than file systems allow.
    """
    words = (site.operation, site.phase, site.component, site.quant_type, site.tensor_name)
    begin = _begin_name(site.module, site.layer_type, site.layer_idx, *words)
    # Training is what is left out.
    end = "" if site.mode == Mode.TRAIN else f",{site.mode}"
    name = f"{begin},m{site.microbatch},c{site.call}{end}"
    if len(name) > MAX_PATH_LENGTH:
        digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_LENGTH]
        name = f"{name[: MAX_PATH_LENGTH - _HASH_LENGTH - 1]}{_SHORTENED}{digest}"
    return _CONTINUED.join(name[start : start + _SEGMENT_LENGTH] for start in range(0, len(name), _SEGMENT_LENGTH))


def parse_site_path(path: str) -> TensorSite:
    """The site at a path that `site_path` wrote.

    Raises:
        RunFormatError: the path is not one of a site, or it was shortened.
    """
    name = path.replace(_CONTINUED, "")
    if _SHORTENED in name:
        raise RunFormatError(f"{path!r} is a name that was shortened: its record has the whole")
    fields = [_decode(field) for field in name.split(",")]
    try:
        module, layer_type, layer, operation, phase, component, quant_type, tensor_name, microbatch, call, *rest = (
            fields
        )
        if rest not in ([], [Mode.EVAL.value]) or (layer[0], microbatch[0], call[0]) != ("L", "m", "c"):
            raise ValueError(path)
        return TensorSite(
            module=module,
            layer_type=layer_type,
            layer_idx=int(layer[1:]),
            operation=operation,
            phase=phase,
            component=component,
            quant_type=quant_type,
            tensor_name=tensor_name,
            microbatch=int(microbatch[1:]),
            call=int(call[1:]),
            mode=rest[0] if rest else Mode.TRAIN.value,
        )
    except (ValueError, IndexError) as error:
        raise RunFormatError(
            f"{path!r} is not the path of a captured tensor: it needs ten fields, and 'eval' or nothing"
        ) from error


@functools.lru_cache(maxsize=1 << 14)
def _begin_name(module: str, layer_type: str, layer_idx: int, *words: str) -> str:
    """The fields that are the same in every iteration: encoding them takes longer than all else."""
    name = ",".join([_encode(module), _encode(layer_type), f"L{layer_idx}", *map(_encode, words)])
    # Zarr reserves names that begin with two underscores; names that begin with a dot are hidden or special.
    return f"%{ord(name[0]):02X}{name[1:]}" if name[0] in "_." else name


def _encode(text: str) -> str:
    # Lone surrogates reach us in file names and module names; they too must come back.
    return quote(text, safe="", encoding="utf-8", errors="surrogatepass")


def _decode(text: str) -> str:
    return unquote(text, encoding="utf-8", errors="surrogatepass")
