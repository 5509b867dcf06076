"""The metadata of a record: the names and values that describe one captured tensor.

They are the public vocabulary: the same in Python, Zarr attributes, the catalogue, command line filters and JSON.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ranktape.errors import UsageError

MAX_TERM_LENGTH = 64
"""The longest term of an open vocabulary (`layer_type`, `phase`, ...), in characters."""

RUN = 1 << 21
"""The number of elements of one part when a record is read in parts. A part has whole samples, at least one."""


class Compression(enum.StrEnum):
    """The compression of a tensor's values."""

    NONE = "none"
    """No compression."""
    ZSTD = "zstd"
    """Zstandard, level 1: about 80 % of the size of bfloat16."""
    BLOSC = "blosc"
    """Zstandard after a bit shuffle: about 70 % of the size of bfloat16, for up to 1.5 times the processor time."""


class Operation(enum.StrEnum):
    """The direction of the pass that the tensor belongs to."""

    __hash__ = str.__hash__  # faster on the training thread than the hash of enums, which is written in Python

    FORWARD = "forward"
    BACKWARD = "backward"


class Mode(enum.StrEnum):
    """The kind of pass in which a tensor was recorded."""

    __hash__ = str.__hash__  # faster on the training thread than the hash of enums, which is written in Python

    TRAIN = "train"
    """The module was in training mode and gradients were enabled."""
    EVAL = "eval"
    """Validation or inference: the module was in evaluation mode or gradients were disabled."""


class Keep(enum.StrEnum):
    """The part of a tensor that is stored."""

    VALUES = "values"
    """All values."""
    HISTOGRAM = "histogram"
    """The count of each of the 65,536 bit patterns of a 16-bit value. Values of 32 and 64 bits are first rounded to the
    compute dtype."""
    STATISTICS = "statistics"
    """Sums over the finite values: see `ranktape.storage.format.statistics`."""

    def not_kept(self, wanted: Keep) -> str:
        """The error message if this was kept and `wanted` is read."""
        verb, reader = {
            Keep.VALUES: ("were", "read"),
            Keep.HISTOGRAM: ("was", "histogram"),
            Keep.STATISTICS: ("were", "statistics"),
        }[self]
        return f"the {self} {verb} kept, not the {wanted}: use {reader}()"


RECORDED_NAMES = {
    ("pre", "input"): "grad_output",
    ("pre", "weight"): "weight",
    ("post", "output"): "grad_input",
    ("post", "weight"): "grad_weight",
    ("unknown", "input"): "grad_output",
    ("unknown", "output"): "grad_input",
}
"""Our tensor name for each tensor that legacy tools save of the backward pass of a linear layer, by phase and name.

They call what enters the backward pass `input` (the gradient of the output) and what leaves it `output`. The weight
of phase `pre` is that of the forward pass."""


def recorded_name(tensor_name: str, *, operation: Operation, layer_type: str, component: str, phase: str) -> str:
    """Our name for a legacy tensor: by `RECORDED_NAMES` in the backward pass of a linear layer, else unchanged."""
    if operation is Operation.BACKWARD and "linear" in {layer_type, component}:
        return RECORDED_NAMES.get((phase, tensor_name), tensor_name)
    return tensor_name


def check_term(value: str, *, field: str) -> str:
    """Return `value` if it is valid in an open vocabulary (`layer_type`, `phase`, `component`, ...).

    Any printable text is allowed; the store escapes characters that a path cannot contain.

    Raises:
        UsageError: the value is empty, too long, not a string, or has control characters.
    """
    is_text: Any = isinstance(value, str)  # callers without type checks pass anything
    if not (is_text and 0 < len(value) <= MAX_TERM_LENGTH and value.isprintable()):
        raise UsageError(
            f"{field}={value!r} is not allowed: give 1 to {MAX_TERM_LENGTH} printable characters, such as 'linear'"
        )
    return value


WIDE = "wide_"
"""The prefix of the name of an operand before a layer quantised it."""


def is_parameter(tensor_name: str) -> bool:
    """Whether a tensor of that name is a parameter of the model or a copy of one, so that it has no samples."""
    return tensor_name.rpartition(".")[2].removeprefix("master_").removeprefix(WIDE) in {"weight", "bias"}


def is_one_sample(sample_ids: Any, *, tensor_name: str) -> bool:
    """Whether a tensor without a sample dimension is one sample: it is not a parameter, and one sample id is given."""
    return isinstance(sample_ids, list) and len(sample_ids) == 1 and not is_parameter(tensor_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementTally:
    """The number of elements of one kind."""

    count: int
    """Number of elements."""
    ratio: float
    """`count` divided by the number of elements of the tensor; 0 for an empty tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflow:
    """Counts of a tensor's values at the limits of its dtype, and its extremes.

    NaN counts in `nan` only; an infinity counts in `inf` and in `upper` or `lower`. Integer and boolean dtypes have
    neither. `minimum`, `maximum` and `absmax` ignore NaN, include infinities, and are None if all values are NaN or
    the tensor is empty.
    """

    upper: ElementTally
    """Beyond the dtype's largest finite value: positive infinities."""
    lower: ElementTally
    """Beyond the dtype's smallest (most negative) finite value: negative infinities."""
    underflow: ElementTally
    """Nonzero and smaller in magnitude than the dtype's smallest normal number."""
    nan: ElementTally
    """Not a number."""
    inf: ElementTally
    """Infinities of either sign."""
    zero: ElementTally
    """Zeros of either sign."""
    minimum: float | None
    """Smallest value that is not NaN."""
    maximum: float | None
    """Largest value that is not NaN."""
    absmax: float | None
    """Largest magnitude that is not NaN."""
    per_sample: dict[str, list[int]] | None = None
    """The counts of `upper`, `lower`, `underflow`, `nan`, `inf` and `zero` in every sample; None if the tensor has no
    sample dimension."""

    @property
    def total(self) -> int:
        """`upper` and `lower` together, in elements."""
        return self.upper.count + self.lower.count

    @property
    def ratio(self) -> float:
        """`upper` and `lower` together, over all elements."""
        return self.upper.ratio + self.lower.ratio

    def to_json(self) -> dict[str, Any]:
        """The counts as a dictionary for JSON, with infinities as strings."""
        document = self.to_attributes()
        for kind in TALLY_KINDS:
            document[kind]["ratio"] = getattr(self, kind).ratio
        return {**document, "total": self.total, "ratio": self.ratio}

    def to_attributes(self) -> dict[str, Any]:
        """The counts as a dictionary for Zarr attributes, without ratios and sums, which follow from the counts."""
        document: dict[str, Any] = {
            kind: {"count": tally.count} for kind, tally in zip(TALLY_KINDS, _tallies(self), strict=True)
        }
        for name in EXTREMES:
            value = getattr(self, name)
            document[name] = value if value is None or abs(value) != float("inf") else str(value)
        document["per_sample"] = self.per_sample
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any], *, num_elements: int) -> Overflow:
        """The counts from the result of `to_json` or `to_attributes`, for a tensor of `num_elements` elements."""
        counts = {kind: document[kind]["count"] for kind in TALLY_KINDS}
        parts: dict[str, Any] = {
            kind: ElementTally(count=count, ratio=count / num_elements if num_elements else 0.0)
            for kind, count in counts.items()
        }
        parts |= {name: None if document[name] is None else float(document[name]) for name in EXTREMES}
        return cls(**parts, per_sample=document.get("per_sample"))


TALLY_KINDS = ("upper", "lower", "underflow", "nan", "inf", "zero")
"""The kinds of elements that `Overflow` counts."""

_tallies = operator.attrgetter(*TALLY_KINDS)

EXTREMES = ("minimum", "maximum", "absmax")
"""The extremes in `Overflow`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordInfo:
    """The metadata of one captured tensor."""

    iteration: int
    """Training step, starting at 0."""
    rank: int
    """Global rank of the process that recorded it."""
    attempt: int
    """Restart count of the worker group."""
    microbatch: int
    """Index of the forward and backward pass within the step, starting at 0."""
    call: int
    """Index of the call of the same site within the microbatch, starting at 0."""
    sample_dim: int | None
    """The dimension of samples; None for weights, for a tensor that is one sample, and if it is not known."""
    sample_ids: list[int | str] | None
    """The user's identifiers of the samples, in order; None if none were given."""
    batch_size: int | None
    """Number of samples in the microbatch; None if it is not known."""
    module: str
    """Dotted path of the module, without the prefixes of wrappers; empty outside a module."""
    layer_type: str
    """`attention`, `linear`, `embedding`, `hidden`, or the user's own."""
    layer_idx: int
    """Global index of the layer in the stack; -1 outside the stack."""
    operation: str
    """`forward` or `backward`."""
    phase: str
    """`pre`, `post`, `unknown`, or the user's own."""
    component: str
    """`FA`, `linear`, `unknown`, or the user's own."""
    quant_type: str
    """The tag that names the precision of the run: `bf16`, `mxfp8`, or the user's own."""
    tensor_name: str
    """`query`, `key`, `value`, `output`, `input`, `weight`, `bias`, or `grad_` of each; `wide_input` and `wide_weight`
    for operands before a layer quantised them; or the user's own."""
    dtype: str
    """Dtype of the captured tensor, in torch's spelling: `bfloat16`."""
    shape: tuple[int, ...]
    """Shape of the captured tensor."""
    layout: str
    """One letter for each dimension (`BHTD`) if they are known, else empty."""
    compute_dtype: str
    """Dtype in which the operation computed; differs from `dtype` under autocast."""
    placement: dict[str, Any] | None
    """Mesh axes, coordinates, placements, global shape and offset of a shard; None for a whole tensor."""
    metadata: dict[str, Any] | None
    """The user's metadata, as JSON; None if there is none."""
    overflow: Overflow
    """Counts at the limits of the dtype."""
    counter: int
    """Index in the order in which the rank recorded its tensors, starting at 0."""
    timestamp: float
    """Time of recording, in seconds since the epoch."""
    nbytes: int
    """Size of the stored part, in bytes."""
    checksum: str
    """CRC-32C of its raw little-endian bytes in C order: `crc32c:` and eight hexadecimal digits."""
    keep: str = Keep.VALUES.value
    """The stored part: `values`, their `histogram`, or their `statistics`."""
    mode: str = Mode.TRAIN.value
    """The kind of pass: `train` or `eval`."""
    layer_stack: str = ""
    """Dotted path of the list of layers that contains its layer, such as `encoder.block`. Each list has its own layer
    indices. Empty outside a list, and if it is not known."""

    @property
    def num_samples(self) -> int:
        """Number of samples: the extent of `sample_dim`, 1 if the whole tensor is one sample, else 0."""
        if self.sample_dim is not None:
            return self.shape[self.sample_dim]
        return int(is_one_sample(self.sample_ids, tensor_name=self.tensor_name))

    def to_json(self) -> dict[str, Any]:
        """The metadata as a dictionary for JSON."""
        return {**self.to_attributes(), "overflow": self.overflow.to_json()}

    def to_attributes(self) -> dict[str, Any]:
        """The metadata as a dictionary for Zarr attributes, without values that follow from other fields."""
        return dict(zip(FIELDS, map(attribute_of, fields_of(self)), strict=True))

    def spelled(self) -> RecordInfo:
        """The metadata with lone surrogates escaped. They occur in file names that are not valid text."""
        if "".join(_texts(self)).isascii() and self.metadata is None and self.sample_ids is None:
            return self
        values = {name: getattr(self, name) for name in (*_TEXTS, "metadata", "sample_ids")}
        changed = {name: text for name, value in values.items() if (text := spelled(value)) != value}
        return dataclasses.replace(self, **changed)

    def with_checksum(self, checksum: str) -> RecordInfo:
        """The metadata with another checksum, made faster than by `dataclasses.replace`."""
        clone = object.__new__(RecordInfo)
        for put, value in zip(_SETTERS, fields_of(self), strict=True):
            put(clone, value)
        _SETTERS[_CHECKSUM](clone, checksum)
        return clone

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> RecordInfo:
        """The metadata from the result of `to_json`. Unknown keys are ignored."""
        values = {field: document[field] for field in FIELDS}
        values["shape"] = tuple(document["shape"])
        num_elements = math.prod(values["shape"])
        values["overflow"] = Overflow.from_json(document["overflow"], num_elements=num_elements)
        return cls(**values)


FIELDS = tuple(field.name for field in dataclasses.fields(RecordInfo))
"""The names of a record's fields, in the order of `RecordInfo`."""

fields_of = operator.attrgetter(*FIELDS)
"""The values of a record's fields, in that order."""


def attribute_of(value: Any) -> Any:
    """The value of a field in the form of Zarr attributes."""
    if isinstance(value, Overflow):
        return value.to_attributes()
    return list(value) if isinstance(value, tuple) else value


_SETTERS = tuple(RecordInfo.__dict__[name].__set__ for name in FIELDS)
"""The setters of the fields of a frozen instance, in the order of `FIELDS`."""

_CHECKSUM = FIELDS.index("checksum")

_TEXTS = tuple(field.name for field in dataclasses.fields(RecordInfo) if field.type == "str")

_texts = operator.attrgetter(*_TEXTS)


def spelled(value: Any) -> Any:
    r"""A value for JSON with lone surrogates replaced by text such as `\udcff`: strict readers refuse their escapes."""
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case Mapping():
            return {spelled(name): spelled(item) for name, item in value.items()}
        case list() | tuple():
            return [spelled(item) for item in value]
    return value
