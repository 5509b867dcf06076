"""A record: the words that name one captured tensor, everywhere.

The field names and values here are the public vocabulary. They are the same in Python, in Zarr
attributes, in the catalogue, in command line filters and in JSON.
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
"""Characters in a term of an open vocabulary (`layer_type`, `phase`, ...)."""

RUN = 1 << 21
"""Elements of a part of a record without samples; and of samples together, unless a single one has more."""


class Compression(enum.StrEnum):
    """How the values of a tensor are packed."""

    NONE = "none"
    """As they are."""
    ZSTD = "zstd"
    """With Zstandard, level 1: about 80 % of the size of bfloat16."""
    BLOSC = "blosc"
    """With Zstandard behind a shuffle of bits: about seven tenths, for up to half as much processor time more."""


class Operation(enum.StrEnum):
    """The direction of the pass that the tensor belongs to."""

    __hash__ = str.__hash__  # that of enums is a function of Python, and tables of the training thread ask it

    FORWARD = "forward"
    BACKWARD = "backward"


class Mode(enum.StrEnum):
    """Which kind of pass a tensor was seen in."""

    __hash__ = str.__hash__  # that of enums is a function of Python, and tables of the training thread ask it

    TRAIN = "train"
    """The module was in training mode, and gradients were wanted."""
    EVAL = "eval"
    """One of them was not so: validation, inference, a forward pass without gradients."""


class Keep(enum.StrEnum):
    """What is kept of a tensor."""

    VALUES = "values"
    """All of its values."""
    HISTOGRAM = "histogram"
    """How often each of the 65,536 bit patterns of a 16-bit value occurs in it; 32- and 64-bit values are rounded to
    the compute dtype first."""
    STATISTICS = "statistics"
    """What its finite values add up to: `ranktape.storage.format.statistics`."""

    def not_kept(self, wanted: Keep) -> str:
        """What to say where this was kept and something else is wanted: what reads it."""
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
"""What the tensors that legacy tools save of the backward pass of a linear layer are in our words, by phase and name.

They name what goes into that pass `input`, which is the gradient of the output, and what comes out of it `output`. The
weight before it is the forward's."""


def recorded_name(tensor_name: str, *, operation: Operation, layer_type: str, component: str, phase: str) -> str:
    """A tensor's name in our words; `RECORDED_NAMES` for the backward pass of a linear layer, else as it is."""
    if operation is Operation.BACKWARD and "linear" in {layer_type, component}:
        return RECORDED_NAMES.get((phase, tensor_name), tensor_name)
    return tensor_name


def check_term(value: str, *, field: str) -> str:
    """Return `value` if it can stand in an open vocabulary (`layer_type`, `phase`, `component`, ...).

    Any printable text is allowed; the store escapes what a path cannot hold.

    Raises:
        UsageError: empty, too long, not text, or with control characters.
    """
    is_text: Any = isinstance(value, str)  # callers without type checks pass anything
    if not (is_text and 0 < len(value) <= MAX_TERM_LENGTH and value.isprintable()):
        raise UsageError(
            f"{field}={value!r} is not allowed: give 1 to {MAX_TERM_LENGTH} printable characters, such as 'linear'"
        )
    return value


WIDE = "wide_"
"""Before the name of an operand: what a layer that quantises its operands has made this one of."""


def is_parameter(tensor_name: str) -> bool:
    """Whether a tensor of that name is a parameter of the model, or a copy of one: no sample has a part in it."""
    return tensor_name.rpartition(".")[2].removeprefix("master_").removeprefix(WIDE) in {"weight", "bias"}


def is_one_sample(sample_ids: Any, *, tensor_name: str) -> bool:
    """Whether a tensor without a dimension of samples is one sample: the only one that is named, and no parameter."""
    return isinstance(sample_ids, list) and len(sample_ids) == 1 and not is_parameter(tensor_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementTally:
    """How many elements are of one kind."""

    count: int
    """Elements."""
    ratio: float
    """`count` over all elements of the tensor; 0 for an empty tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflow:
    """What a tensor's values do at the limits of its own dtype.

    NaN counts in `nan` alone; an infinity counts in `inf` and in `upper` or `lower`; integer and
    boolean dtypes have neither. `minimum`, `maximum` and `absmax` are over the numbers that are not
    NaN (infinities included) and None where there are none.
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
    """For each of `upper`, `lower`, `underflow`, `nan`, `inf`, `zero`: the count in every sample; None where
    the tensor has no dimension of samples."""

    @property
    def total(self) -> int:
        """`upper` and `lower` together, in elements."""
        return self.upper.count + self.lower.count

    @property
    def ratio(self) -> float:
        """`upper` and `lower` together, over all elements."""
        return self.upper.ratio + self.lower.ratio

    def to_json(self) -> dict[str, Any]:
        """A dictionary for JSON; infinities become the strings that JSON lacks."""
        document = self.to_attributes()
        for kind in TALLY_KINDS:
            document[kind]["ratio"] = getattr(self, kind).ratio
        return {**document, "total": self.total, "ratio": self.ratio}

    def to_attributes(self) -> dict[str, Any]:
        """The same for Zarr attributes, without what follows from the rest: ratios and sums."""
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
        """Rebuild what `to_json` or `to_attributes` wrote of a tensor with so many elements."""
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
"""The extreme values that `Overflow` holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordInfo:
    """Everything that is known of one captured tensor, without its values."""

    iteration: int
    """Training step, counted from 0."""
    rank: int
    """Global rank of the process that recorded it."""
    attempt: int
    """Restart count of the worker group."""
    microbatch: int
    """Index of the forward and backward pass within the step, from 0."""
    call: int
    """Index of the call of the same site within the microbatch, from 0."""
    sample_dim: int | None
    """The dimension that holds samples; None for weights, for a tensor that is one sample, and where it is not
    known."""
    sample_ids: list[int | str] | None
    """The user's identifiers of the samples, in order; None where none were given."""
    batch_size: int | None
    """Samples in the microbatch; None where it is not known."""
    module: str
    """Dotted path of the module, without the wrappers' prefixes; empty outside of a module."""
    layer_type: str
    """`attention`, `linear`, `embedding`, `hidden`, or the user's own."""
    layer_idx: int
    """Global index of the layer in the stack; -1 outside of it."""
    operation: str
    """`forward` or `backward`."""
    phase: str
    """`pre`, `post`, `unknown`, or the user's own."""
    component: str
    """`FA`, `linear`, `unknown`, or the user's own."""
    quant_type: str
    """What the run computed in, as tagged: `bf16`, `mxfp8`, or the user's own."""
    tensor_name: str
    """`query`, `key`, `value`, `output`, `input`, `weight`, `bias`, `grad_` of each; `wide_input` and `wide_weight`, of
    which a layer has made its quantised operands; or the user's own."""
    dtype: str
    """As seen, in torch's words: `bfloat16`."""
    shape: tuple[int, ...]
    """As seen, in elements."""
    layout: str
    """One letter for each dimension where they are known (`BHTD`), else empty."""
    compute_dtype: str
    """What the operation computed in; differs from `dtype` under autocast."""
    placement: dict[str, Any] | None
    """Of a shard: mesh axes, coordinates, placements, global shape, offset; None for whole tensors."""
    metadata: dict[str, Any] | None
    """The user's own words about it, as JSON; None where there are none."""
    overflow: Overflow
    """Counts at the limits of the dtype."""
    counter: int
    """Order in which the rank recorded it, from 0."""
    timestamp: float
    """When it was recorded, in seconds since the epoch."""
    nbytes: int
    """Size of what is kept, in bytes."""
    checksum: str
    """CRC-32C of its raw little-endian bytes in C order: `crc32c:` and eight hexadecimal digits."""
    keep: str = Keep.VALUES.value
    """What is kept: `values`, their `histogram`, or their `statistics`."""
    mode: str = Mode.TRAIN.value
    """`train`, or `eval`: the kind of pass that it was seen in."""
    layer_stack: str = ""
    """Dotted path of the list that holds its layer, such as `encoder.block`: of several each counts its own layers;
    empty outside of any, and where it is not known."""

    @property
    def num_samples(self) -> int:
        """Samples that can be told apart: those of `sample_dim`, or the one that the tensor is as a whole; else 0."""
        if self.sample_dim is not None:
            return self.shape[self.sample_dim]
        return int(is_one_sample(self.sample_ids, tensor_name=self.tensor_name))

    def to_json(self) -> dict[str, Any]:
        """A dictionary for JSON, field by field."""
        return {**self.to_attributes(), "overflow": self.overflow.to_json()}

    def to_attributes(self) -> dict[str, Any]:
        """The same for Zarr attributes, without what follows from other fields."""
        return dict(zip(FIELDS, map(attribute_of, fields_of(self)), strict=True))

    def spelled(self) -> RecordInfo:
        """The same, with lone surrogates spelled out, as they come with names of files that are no text."""
        if "".join(_texts(self)).isascii() and self.metadata is None and self.sample_ids is None:
            return self
        values = {name: getattr(self, name) for name in (*_TEXTS, "metadata", "sample_ids")}
        changed = {name: text for name, value in values.items() if (text := spelled(value)) != value}
        return dataclasses.replace(self, **changed)

    def with_checksum(self, checksum: str) -> RecordInfo:
        """The same with another checksum; `dataclasses.replace` takes longer than a small tensor's share of a write."""
        clone = object.__new__(RecordInfo)
        for put, value in zip(_SETTERS, fields_of(self), strict=True):
            put(clone, value)
        _SETTERS[_CHECKSUM](clone, checksum)
        return clone

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> RecordInfo:
        """Rebuild what `to_json` wrote; unknown keys are ignored."""
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
    """The value of a field as Zarr attributes have it."""
    if isinstance(value, Overflow):
        return value.to_attributes()
    return list(value) if isinstance(value, tuple) else value


_SETTERS = tuple(RecordInfo.__dict__[name].__set__ for name in FIELDS)
"""Of the fields of a frozen instance that is being made."""

_CHECKSUM = FIELDS.index("checksum")

_TEXTS = tuple(field.name for field in dataclasses.fields(RecordInfo) if field.type == "str")

_texts = operator.attrgetter(*_TEXTS)


def spelled(value: Any) -> Any:
    r"""What JSON is made of, with `\udcff` spelled out for each lone surrogate: strict readers refuse its escape."""
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case Mapping():
            return {spelled(name): spelled(item) for name, item in value.items()}
        case list() | tuple():
            return [spelled(item) for item in value]
    return value
