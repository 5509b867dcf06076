"""Reads and writes the names of the legacy tools' files.

Names of single tensors; what is in brackets may be missing, and the older form is the one without all of it:

    {timestamp}_{counter}[_iter{iteration}]_{layer_type}[_L{layer_idx}]_{operation}_{phase}_{component}
        _{quant_type}[_rank{rank}][_sample{sample_idx}][_group{group_idx}]_{tensor_name}.pt

Names in a folder of layer outputs: embedding_output.pt, layer_N_output.pt with N from 1, statistics.pt, metadata.pt.

The tags are the users' own and may hold underscores, as `grad_output` and `mxfp_fp8_e4m3` do. So a name is read from
its closed parts (digits, `iter`, `L`, the two operations, `rank`, `sample`, `group`), of which the first that fits
counts; phase and component are one word each; and where no closed part stands between the last two tags, the
tensor's name is the longest of `TENSOR_NAMES` that fits. What would not be read back so is written in percent-escapes
when we write it, as is everything that could leave the folder.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

from ranktape.errors import UsageError
from ranktape.storage.format.record_info import Operation, check_term, recorded_name

MAX_NAME_NBYTES = 255
"""What file systems allow a name."""

TENSOR_NAMES = (
    *("query", "key", "value", "input", "weight", "output", "bias", "attention_weights"),
    *("grad_query", "grad_key", "grad_value", "grad_input", "grad_weight", "grad_output", "grad_bias"),
    *("input_A", "input_B", "grad_input_A", "grad_input_B", "attention_probs", "grad_attention_probs"),
)
"""Tensor names that the legacy tools wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFileName:
    """What the name of a tensor's file says."""

    timestamp: str
    """Local time of the machine that wrote it: `YYYYMMDD_HHMMSS`."""
    counter: int
    """Order in which its process wrote it."""
    iteration: int | None = None
    """Training step; None where the name does not say."""
    layer_type: str
    """`attention`, `linear`, or the user's own."""
    layer_idx: int | None = None
    """Index of the layer; None where the name does not say."""
    operation: Operation
    """Direction of the pass."""
    phase: str
    """`pre`, `post`, `unknown`, or the user's own."""
    component: str
    """`FA`, `linear`, `unknown`, or the user's own."""
    quant_type: str
    """`bf16`, `mxfp8`, `hifp8`, `mxfp4`, or the user's own."""
    rank: int | None = None
    """Process that wrote it; None where the name does not say."""
    sample_idx: int | None = None
    """Index of the sample or of the microbatch, as the tool counted it; None where the name does not say."""
    group_idx: int | None = None
    """What the original tool wrote in place of, or beside, the sample: how often the layer had been written."""
    tensor_name: str
    """As written; `recorded_tensor_name` says what it is in our words."""


_HEAD = re.compile(
    r"(?P<timestamp>[0-9]{8}_[0-9]{6})_(?P<counter>[0-9]{4,18})(?:_iter(?P<iteration>[0-9]{1,18}))?"
    r"_(?P<layer_type>.+?)(?:_L?(?P<layer_idx>-?[0-9]{1,9}))?_(?P<operation>forward|backward)"
    r"_(?P<phase>[^_]+)_(?P<component>[^_]+)_(?P<rest>.+)\.pt",
    re.DOTALL,
)
_ANCHORED = re.compile(
    r"(?P<quant_type>.+?)(?=_(?:rank|sample|group)[0-9]{1,18}_)"
    r"(?:_rank(?P<rank>[0-9]{1,18})(?=_))?(?:_sample(?P<sample_idx>[0-9]{1,18})(?=_))?"
    r"(?:_group(?P<group_idx>[0-9]{1,18})(?=_))?_(?P<tensor_name>.+)",
    re.DOTALL,
)
_TAGS = ("layer_type", "phase", "component", "quant_type", "tensor_name")
_NUMBERS = ("counter", "iteration", "layer_idx", "rank", "sample_idx", "group_idx")
_TIMESTAMP = "%Y%m%d_%H%M%S"


def parse_tensor_file_name(name: str) -> TensorFileName | None:
    """What the file name says; None if it is not the name of a tensor's file."""
    head = _HEAD.fullmatch(name) if len(name) <= MAX_NAME_NBYTES else None
    if head is None or not _is_time(head["timestamp"]):
        return None
    tail = _read_tail(head["rest"])
    if tail is None:
        return None
    parts = head.groupdict() | tail
    try:
        values: dict[str, Any] = {tag: check_term(_unescape(parts[tag] or ""), field=tag) for tag in _TAGS}
    except UsageError:
        return None
    for number in _NUMBERS:
        values[number] = None if parts[number] is None else int(parts[number])
    return TensorFileName(timestamp=head["timestamp"], operation=Operation(head["operation"]), **values)


def format_tensor_file_name(name: TensorFileName) -> str:
    """The file name, from which `parse_tensor_file_name` gives the same back; parts that are None are left out.

    Tags stand as they are where they can be read back so, and in percent-escapes where they cannot. The name cannot
    leave its folder, whatever the tags are.
    """
    if not _is_time(name.timestamp):
        raise UsageError(f"timestamp {name.timestamp!r} is not a time: write YYYYMMDD_HHMMSS")
    tags = {tag: check_term(getattr(name, tag), field=tag) for tag in _TAGS}
    hidden: set[str] = set()
    while True:
        text = _join(name, {tag: _escape(value, hide=tag in hidden) for tag, value in tags.items()})
        if len(text.encode()) > MAX_NAME_NBYTES:
            raise UsageError(
                f"file name {text[:60]!r}... takes {len(text.encode())} bytes and file systems allow "
                f"{MAX_NAME_NBYTES}: shorten the tags"
            )
        read = parse_tensor_file_name(text)
        if read == name:
            return text
        shown = [tag for tag in _TAGS if tag not in hidden]
        if not shown:
            raise UsageError(f"no file name can hold the numbers of {name}: give numbers from 0 below 10**9")
        # One at a time, as the tags behind a misread one are misread for its sake.
        misread = [tag for tag in shown if read is None or getattr(read, tag) != tags[tag]]
        hidden.add((misread or shown)[0])


def recorded_tensor_name(name: TensorFileName) -> str:
    """The tensor's name in our words, for one that was saved to a file."""
    fields = {field: getattr(name, field) for field in ("operation", "layer_type", "component", "phase")}
    return recorded_name(name.tensor_name, **fields)


def name_timestamp(seconds: float) -> str:
    """Seconds since the epoch as names have them, in UTC."""
    return datetime.fromtimestamp(seconds, tz=UTC).strftime(_TIMESTAMP)


def name_seconds(name: TensorFileName) -> float:
    """When the file was written, in seconds since the epoch, if the machine's clock was set to UTC: no name says."""
    return datetime.strptime(name.timestamp, _TIMESTAMP).replace(tzinfo=UTC).timestamp()


@functools.lru_cache(maxsize=4096)  # a folder has many names of one second
def _is_time(timestamp: str) -> bool:
    try:
        return datetime.strptime(timestamp, _TIMESTAMP).replace(tzinfo=UTC).strftime(_TIMESTAMP) == timestamp
    except ValueError:
        return False


def _read_tail(rest: str) -> dict[str, str | None] | None:
    anchored = _ANCHORED.fullmatch(rest)
    if anchored is not None:
        return anchored.groupdict()
    absent: dict[str, str | None] = dict.fromkeys(("rank", "sample_idx", "group_idx"))
    known = [name for name in TENSOR_NAMES if rest.endswith(f"_{name}") and len(rest) > len(name) + 1]
    if known:
        tensor_name = max(known, key=len)
        return absent | {"quant_type": rest[: -len(tensor_name) - 1], "tensor_name": tensor_name}
    quant_type, _, tensor_name = rest.partition("_")
    return absent | {"quant_type": quant_type, "tensor_name": tensor_name} if quant_type and tensor_name else None


def _join(name: TensorFileName, tags: dict[str, str]) -> str:
    def marked(**numbers: int | None) -> list[str]:
        return [f"{mark}{number}" for mark, number in numbers.items() if number is not None]

    parts = [name.timestamp, f"{name.counter:04d}", *marked(iter=name.iteration), tags["layer_type"]]
    parts += [*marked(L=name.layer_idx), name.operation.value, tags["phase"], tags["component"], tags["quant_type"]]
    parts += marked(rank=name.rank, sample=name.sample_idx, group=name.group_idx)
    return "_".join([*parts, tags["tensor_name"]]) + ".pt"


def _escape(tag: str, *, hide: bool) -> str:
    """The tag without what cannot stand in a name; hidden, without anything that could be taken for another part."""
    # The first character too: `iter0` has no underscore.
    kept = "".join(_percent(character) if character in "%/\\" else character for character in tag)
    if not hide:
        return kept
    first = kept[0] if kept[0] == "%" else _percent(kept[0])
    return first + kept[1:].replace("_", _percent("_"))


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode())


def _unescape(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        # Somebody else's percent signs.
        return text


STATISTICS, METADATA = "statistics.pt", "metadata.pt"
"""What a folder of layer outputs says beside its tensors."""

_EMBEDDING = "embedding_output.pt"
_LAYER = re.compile(r"layer_([0-9]{1,9})_output\.pt")


def parse_layer_output_name(name: str) -> int | None:
    """The decoder layer whose output a file holds, counted from 0 as in the models, and -1 for the embedding.

    None if the name is not one of an output. In names layers count from 1, and layer 0 is the embedding.
    """
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        return int(layer[1]) - 1
    return -1 if name == _EMBEDDING else None


def format_layer_output_name(layer_idx: int) -> str:
    """The file name, from which `parse_layer_output_name` gives the same back."""
    return _EMBEDDING if layer_idx < 0 else f"layer_{layer_idx + 1}_output.pt"
