"""The key of each part of a run.

zarr.json                          the run
lease_000/zarr.json                the launch that is recording into the run
attempt_000-1f3a9c2e/zarr.json     one start of the worker group; `_ATTEMPT_KEYS` has the keys below it

The name of an attempt ends in a random token, so that two attempts never share a key, even if the run was deleted
and another one was created at the same URL. A late writer can therefore leave unused objects, but cannot change
another attempt. Readers ignore an attempt that has no document.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from ranktape.storage.format.record_info import Mode, RecordInfo

DOCUMENT = "zarr.json"
"""The document of every group and array."""

CATALOGUE = "catalogue"
"""The name of a rank's catalogue. It cannot be that of a tensor, which has commas, or of a stack (`stack_...`)."""

ANALYSIS = "analysis"
"""The array at the top of a run below which analysis caches digests. It may be deleted: digests are computed again.

It is an array because plain Zarr does not look for members below an array.
"""

_MAX_NAME_LENGTH = 200

MAX_KEY_LENGTH = 560
"""The longest key below the run: attempt, rank, iteration, a tensor's name, and the suffix of a temporary file."""

ATTEMPT_GROUPS = ("commits", "iterations", "closed", "dropped")
"""The groups below an attempt other than those of its ranks."""


class Mark(enum.StrEnum):
    """The outcome of one iteration on one rank."""

    COMMITTED = "committed"
    """Everything the rank recorded is stored and committed."""
    SKIPPED = "skipped"
    """The rank could not take the iteration and recorded nothing."""
    FAILED = "failed"
    """The rank started the iteration and did not finish it."""


class KeyKind(enum.Enum):
    """The kind of object at a key of an attempt."""

    ATTEMPT = enum.auto()
    """The attempt's document."""
    GROUP = enum.auto()
    """The document of one of `ATTEMPT_GROUPS`."""
    PLAN = enum.auto()
    VERDICT = enum.auto()
    RANK = enum.auto()
    """The document of a rank."""
    RANK_COMMIT = enum.auto()
    MEMBER = enum.auto()
    """A part of a rank's commit."""
    OPENED = enum.auto()
    MARKER = enum.auto()
    ITERATION_COMMIT = enum.auto()
    ITERATION_CATALOGUE = enum.auto()
    CLOSED = enum.auto()
    DROPPED = enum.auto()
    TRIGGER_GROUP = enum.auto()
    """The document of the group of all triggers; it exists from the first trigger on."""
    TRIGGER = enum.auto()
    """An event on a rank that makes all ranks store the iterations they hold."""
    CONTROL_GROUP = enum.auto()
    """The document of the group of all requests; it exists from the first request on."""
    REQUEST = enum.auto()
    ANSWER = enum.auto()


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """The fields of a key of an attempt."""

    kind: KeyKind
    """The kind of object."""
    iteration: int = -1
    """Training step; -1 if the key names none."""
    rank: int = -1
    """Global rank; -1 if the key names none."""
    mark: Mark | None = None
    """The outcome of the iteration on the rank, if the object is a marker."""


_ATTEMPT_KEYS = {
    KeyKind.RANK_COMMIT: "{rank}/{iteration}/zarr.json",  # written last
    KeyKind.MEMBER: "{rank}/{iteration}/{member}",  # a large tensor, a stack of small ones, the catalogue
    KeyKind.MARKER: "commits/{iteration}/{rank}.{mark}/zarr.json",  # one LIST gives all states
    KeyKind.OPENED: "commits/{iteration}/zarr.json",
    KeyKind.ITERATION_COMMIT: "iterations/{iteration}/zarr.json",  # written last, after its catalogue
    KeyKind.ITERATION_CATALOGUE: "iterations/{iteration}/c.0",
    KeyKind.CLOSED: "closed/{rank}/zarr.json",  # the rank will commit nothing more
    KeyKind.DROPPED: "dropped/{iteration}/zarr.json",  # it was complete and has been removed (--keep-last)
    KeyKind.TRIGGER: "triggers/{iteration}.{rank}{number}/zarr.json",
    KeyKind.TRIGGER_GROUP: "triggers/zarr.json",
    KeyKind.REQUEST: "control/request_{name}/zarr.json",
    KeyKind.ANSWER: "control/answer_{name}/zarr.json",
    KeyKind.CONTROL_GROUP: "control/zarr.json",
    KeyKind.RANK: "{rank}/zarr.json",
    KeyKind.GROUP: "{group}/zarr.json",
    KeyKind.PLAN: "plan/zarr.json",
    KeyKind.VERDICT: "verdict/zarr.json",
    KeyKind.ATTEMPT: "zarr.json",
}
"""The keys below an attempt. Written keys are formatted with this table; keys that are read are matched against it."""

_SPELLED = {"iteration": "iter_{:08d}", "rank": "rank_{:05d}"}
"""How numbers are written in keys."""

# A number has one spelling, so that an object has one key. All numbers fit into 64 bits.
_MATCHED = {
    "iteration": r"iter_(?P<iteration>[0-9]{8}|[1-9][0-9]{8,17})",
    "rank": r"rank_(?P<rank>[0-9]{5}|[1-9][0-9]{5,8})",
    "mark": f"(?P<mark>{'|'.join(Mark)})",
    "number": r"([.][1-9][0-9]{0,2})?",
    "name": r"[0-9a-f]{20,24}",
    "member": r".+",
    "group": "|".join(ATTEMPT_GROUPS),
}
_NUMBER = r"([0-9]{3}|[1-9][0-9]{3,8})"
_PATTERNS = {
    kind: re.compile(
        key.replace(".", "[.]").format_map({name: f"(?:{one})" for name, one in _MATCHED.items()}), re.DOTALL
    )
    for kind, key in _ATTEMPT_KEYS.items()
}


def _path(kind: KeyKind, attempt: str, **fields: object) -> str:
    """The path of the group or array whose document has a key of this kind."""
    spelled = {name: _SPELLED.get(name, "{}").format(value) for name, value in fields.items()}
    return f"{attempt}/{_ATTEMPT_KEYS[kind].format_map(spelled).removesuffix(f'/{DOCUMENT}')}"


def lease_path(number: int) -> str:
    """The group that names the launch that is recording into the run."""
    return f"lease_{number:03d}"


def attempt_path(number: int, *, token: str) -> str:
    """The group of one start of the worker group; the other functions take it as `attempt`."""
    return f"attempt_{number:03d}-{token}"


def rank_path(attempt: str, rank: int) -> str:
    """The group of one process."""
    return _path(KeyKind.RANK, attempt, rank=rank)


def rank_iteration_path(attempt: str, rank: int, iteration: int) -> str:
    """The group of one iteration on one rank: the unit of commit."""
    return _path(KeyKind.RANK_COMMIT, attempt, rank=rank, iteration=iteration)


def catalogue_path(attempt: str, rank: int, iteration: int) -> str:
    """The array that holds the catalogue of one iteration on one rank."""
    return _path(KeyKind.MEMBER, attempt, rank=rank, iteration=iteration, member=CATALOGUE)


def stack_name(number: int, *, dtype: str, shape: Sequence[int], layout: str) -> str | None:
    """The name of an array of small tensors, relative to their iteration; None if it would be too long."""
    extents = "x".join(str(extent) for extent in shape) or "scalar"
    letters = f"_{layout}" if layout.isascii() and layout.isalnum() else ""
    name = f"stack_{dtype}_{extents}{letters}_{number}"
    return name if len(name) <= _MAX_NAME_LENGTH else None


def commits_path(attempt: str) -> str:
    """The group of all markers."""
    return _path(KeyKind.GROUP, attempt, group="commits")


def opened_path(attempt: str, iteration: int) -> str:
    """The group that exists once an iteration has started."""
    return _path(KeyKind.OPENED, attempt, iteration=iteration)


def marker_path(attempt: str, iteration: int, rank: int, mark: Mark) -> str:
    """The group that exists once a rank has reported the outcome of an iteration."""
    return _path(KeyKind.MARKER, attempt, iteration=iteration, rank=rank, mark=mark)


def iteration_path(attempt: str, iteration: int) -> str:
    """The array that holds the merged catalogue of an iteration; its document is the commit."""
    return _path(KeyKind.ITERATION_COMMIT, attempt, iteration=iteration)


def closed_path(attempt: str, rank: int) -> str:
    """The group that exists once a rank will commit nothing more."""
    return _path(KeyKind.CLOSED, attempt, rank=rank)


def dropped_path(attempt: str, iteration: int) -> str:
    """The group that exists once a complete iteration has been removed on purpose."""
    return _path(KeyKind.DROPPED, attempt, iteration=iteration)


def triggers_path(attempt: str) -> str:
    """The group of all triggers."""
    return _path(KeyKind.TRIGGER_GROUP, attempt)


def trigger_path(attempt: str, iteration: int, rank: int, *, number: int = 0) -> str:
    """The group of one trigger on a rank in an iteration; `number` distinguishes several of them."""
    suffix = f".{number}" if number else ""
    return _path(KeyKind.TRIGGER, attempt, iteration=iteration, rank=rank, number=suffix)


def control_path(attempt: str) -> str:
    """The group of all requests to the running training."""
    return _path(KeyKind.CONTROL_GROUP, attempt)


def request_path(attempt: str, name: str) -> str:
    """The group of one request."""
    return _path(KeyKind.REQUEST, attempt, name=name)


def answer_path(attempt: str, name: str) -> str:
    """The group of the coordinator's answer to the request of that name."""
    return _path(KeyKind.ANSWER, attempt, name=name)


def plan_path(attempt: str) -> str:
    """The group that names the iterations to capture if they differ from those of the options."""
    return _path(KeyKind.PLAN, attempt)


def verdict_path(attempt: str) -> str:
    """The group of the verdict: whether the guaranteed minimum is stored."""
    return _path(KeyKind.VERDICT, attempt)


def document_key(path: str) -> str:
    """The key of the document of the group or array at `path`; the empty path is the run itself."""
    return f"{path}/{DOCUMENT}" if path else DOCUMENT


def parse_key(key: str) -> AttemptKey | None:
    """The fields of a key below an attempt; None for a key that ranktape never writes."""
    for kind, pattern in _PATTERNS.items():
        if (match := pattern.fullmatch(key)) is not None:
            groups = match.groupdict()
            mark = Mark(groups["mark"]) if "mark" in groups else None
            return AttemptKey(kind, int(groups.get("iteration", -1)), int(groups.get("rank", -1)), mark)
    return None


def is_trigger(name: str) -> bool:
    """Whether a name in the group of triggers is that of a trigger."""
    parsed = parse_key(f"triggers/{name}/{DOCUMENT}")
    return parsed is not None and parsed.kind is KeyKind.TRIGGER


def parse_control(name: str) -> tuple[KeyKind | None, str]:
    """The kind and the request's name for a name in the group of requests; `(None, "")` for other names."""
    parsed = parse_key(f"control/{name}/{DOCUMENT}")
    return (None, "") if parsed is None else (parsed.kind, name.rpartition("_")[2])


def parse_attempt(name: str) -> int | None:
    """The number in the name of an attempt's group; None for any other name."""
    match = re.fullmatch(f"attempt_{_NUMBER}(-[0-9a-f]+)?", name)
    return int(match[1]) if match else None


def parse_lease(name: str) -> int | None:
    """The number in the name of a lease's group; None for any other name."""
    match = re.fullmatch(f"lease_{_NUMBER}", name)
    return int(match[1]) if match else None


def is_part_of_run(name: str) -> bool:
    """Whether a name at the top of a run belongs to the layout."""
    return name in {DOCUMENT, ANALYSIS} or parse_attempt(name) is not None or parse_lease(name) is not None


def iterations_of(keys: Iterable[str]) -> set[int]:
    """The iterations that have a document among keys such as `iter_00000003/zarr.json`."""
    parsed = (parse_key(f"iterations/{key}") for key in keys)
    return {key.iteration for key in parsed if key is not None and key.kind is KeyKind.ITERATION_COMMIT}


def iterations_named(names: Iterable[str]) -> set[int]:
    """The iterations whose groups have these names."""
    return iterations_of(f"{name}/{DOCUMENT}" for name in names)


def ranks_named(names: Iterable[str]) -> set[int]:
    """The ranks whose groups have these names."""
    parsed = (parse_key(f"{name}/{DOCUMENT}") for name in names)
    return {key.rank for key in parsed if key is not None and key.kind is KeyKind.RANK}


MAX_PATH_LENGTH = 400
"""The longest path of a site, in characters. Object stores limit keys to 1,024 bytes, the run's prefix included."""

_SEGMENT_LENGTH = 200
"""The longest segment of a path, in characters. File systems limit names to 255 bytes."""

_HASH_LENGTH = 32
_SHORTENED, _CONTINUED = "+", "+/"
"""The marks before the hash and between two segments of a long path. An encoded field has no `+`, so that a name with
one is known to be shortened or split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSite:
    """The fields that identify a captured tensor within its rank and iteration."""

    module: str
    """Dotted path of the module; empty outside a module."""
    layer_type: str
    """`attention`, `linear`, or the user's own."""
    layer_idx: int
    """Global index of the layer; -1 outside the stack."""
    operation: str
    """`forward` or `backward`."""
    phase: str
    """`pre`, `post`, `unknown`, or the user's own."""
    component: str
    """`FA`, `linear`, `unknown`, or the user's own."""
    quant_type: str
    """The tag that names the precision of the run."""
    tensor_name: str
    """`query`, `input`, `grad_output`, or the user's own."""
    microbatch: int
    """Index of the forward and backward pass within the step."""
    call: int
    """Index of the site's call within the microbatch, starting at 0."""
    mode: str = Mode.TRAIN.value
    """`train` or `eval`."""

    @classmethod
    def of(cls, info: RecordInfo) -> TensorSite:
        """The site of a record."""
        return cls(**{name: getattr(info, name) for name in SITE_FIELDS})


SITE_FIELDS = tuple(field.name for field in dataclasses.fields(TensorSite))
"""The fields of a record that form its site."""


def site_path(site: TensorSite | RecordInfo) -> str:
    """The path of a site relative to its iteration's group. It is unique to the site.

    A name that is longer than file systems allow is split into segments, joined by slashes.
    """
    terms = (site.operation, site.phase, site.component, site.quant_type, site.tensor_name)
    begin = _begin_name(site.module, site.layer_type, site.layer_idx, *terms)
    # Only modes other than training are written.
    end = "" if site.mode == Mode.TRAIN else f",{site.mode}"
    name = f"{begin},m{site.microbatch},c{site.call}{end}"
    if len(name) > MAX_PATH_LENGTH:
        digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_LENGTH]
        name = f"{name[: MAX_PATH_LENGTH - _HASH_LENGTH - 1]}{_SHORTENED}{digest}"
    return _CONTINUED.join(name[start : start + _SEGMENT_LENGTH] for start in range(0, len(name), _SEGMENT_LENGTH))


def parents_of(path: str) -> list[str]:
    """The groups between an iteration's group and the last segment of a site's path."""
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


@functools.lru_cache(maxsize=1 << 14)
def _begin_name(module: str, layer_type: str, layer_idx: int, *terms: str) -> str:
    """The fields that are the same in every iteration. They are cached because encoding them is slow."""
    name = ",".join([_encode(module), _encode(layer_type), f"L{layer_idx}", *map(_encode, terms)])
    # Zarr reserves names that start with two underscores; names that start with a dot are hidden or special.
    return f"%{ord(name[0]):02X}{name[1:]}" if name[0] in "_." else name


def _encode(text: str) -> str:
    # File names and module names may hold lone surrogates; `surrogatepass` keeps them.
    return quote(text, safe="", encoding="utf-8", errors="surrogatepass")
