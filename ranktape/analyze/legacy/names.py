"""Parses and formats the names of the legacy tools' files.

Names of single tensors; parts in brackets are optional, and older names have none of them:

    {timestamp}_{counter}[_iter{iteration}]_{layer_type}[_L{layer_idx}]_{operation}_{phase}_{component}
        _{quant_type}[_rank{rank}][_sample{sample_idx}][_group{group_idx}]_{tensor_name}.pt

Names in a folder of layer outputs: embedding_output.pt, layer_N_output.pt with N from 1, statistics.pt, metadata.pt.

Users choose the tags, which can contain underscores, such as `grad_output` and `mxfp_fp8_e4m3`. A name is therefore
parsed by its unambiguous parts (digits, `iter`, `L`, the two operations, `rank`, `sample`, `group`), the first match of
each; phase and component contain no underscores. If no such part separates the last two tags, the tensor's name is the
longest match in `TENSOR_NAMES`. Tags that would be parsed differently, or could leave the folder, are percent-escaped
when they are written.
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
"""The longest name that file systems allow."""

TENSOR_NAMES = (
    *("query", "key", "value", "input", "weight", "output", "bias", "attention_weights"),
    *("grad_query", "grad_key", "grad_value", "grad_input", "grad_weight", "grad_output", "grad_bias"),
    *("input_A", "input_B", "grad_input_A", "grad_input_B", "attention_probs", "grad_attention_probs"),
)
"""The tensor names of the legacy tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFileName:
    """The fields in the name of a tensor's file."""

    timestamp: str
    """Local time of the machine that wrote it: `YYYYMMDD_HHMMSS`."""
    counter: int
    """Number of the file in the order in which its process wrote them."""
    iteration: int | None = None
    """Training step; None if not in the name."""
    layer_type: str
    """`attention`, `linear`, or a user-defined tag."""
    layer_idx: int | None = None
    """Index of the layer; None if not in the name."""
    operation: Operation
    """Direction of the pass."""
    phase: str
    """`pre`, `post`, `unknown`, or a user-defined tag."""
    component: str
    """`FA`, `linear`, `unknown`, or a user-defined tag."""
    quant_type: str
    """`bf16`, `mxfp8`, `hifp8`, `mxfp4`, or a user-defined tag."""
    rank: int | None = None
    """Rank that wrote it; None if not in the name."""
    sample_idx: int | None = None
    """Index of the sample or microbatch, as the tool counted it; None if not in the name."""
    group_idx: int | None = None
    """Number of times the layer was written before: in the original tool, instead of or besides the sample."""
    tensor_name: str
    """Name of the tensor as written; `recorded_tensor_name` gives the name in records."""


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
    """Parse the name of a tensor's file; None if it is not such a name."""
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
    """The file name that `parse_tensor_file_name` parses to the same fields; parts that are None are left out.

    Tags are percent-escaped only if they would be parsed differently otherwise. The name cannot leave its folder,
    whatever the tags are.

    Raises:
        UsageError: the timestamp is invalid, the name is too long, or a number cannot be represented.
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
        # Escapes one tag at a time, since a misread tag also causes those after it to be misread.
        misread = [tag for tag in shown if read is None or getattr(read, tag) != tags[tag]]
        hidden.add((misread or shown)[0])


def recorded_tensor_name(name: TensorFileName) -> str:
    """The name in records of a tensor that a legacy tool saved to a file."""
    fields = {field: getattr(name, field) for field in ("operation", "layer_type", "component", "phase")}
    return recorded_name(name.tensor_name, **fields)


def name_timestamp(seconds: float) -> str:
    """Seconds since the epoch as a timestamp in a file name, in UTC."""
    return datetime.fromtimestamp(seconds, tz=UTC).strftime(_TIMESTAMP)


def name_seconds(name: TensorFileName) -> float:
    """The time of writing, in seconds since the epoch. It is taken as UTC, since names do not contain the time zone."""
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
    """The tag with percent signs and slashes escaped; if `hide`, it cannot be mistaken for another part of the name."""
    # Hiding also escapes the first character, because parts such as `iter0` have no underscore.
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
        # Percent signs of another tool.
        return text


STATISTICS, METADATA = "statistics.pt", "metadata.pt"
"""The names of the description files in a folder of layer outputs."""

_EMBEDDING = "embedding_output.pt"
_LAYER = re.compile(r"layer_([0-9]{1,9})_output\.pt")


def parse_layer_output_name(name: str) -> int | None:
    """The index of the decoder layer whose output a file contains, from 0; -1 for the embedding.

    None if the name is not that of a layer output. In names, layers count from 1, and layer 0 is the embedding.
    """
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        return int(layer[1]) - 1
    return -1 if name == _EMBEDDING else None


def format_layer_output_name(layer_idx: int) -> str:
    """The file name that `parse_layer_output_name` parses to the same index."""
    return _EMBEDDING if layer_idx < 0 else f"layer_{layer_idx + 1}_output.pt"
