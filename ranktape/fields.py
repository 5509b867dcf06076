"""The table of a record's fields, which defines columns, filters, options of commands, and frames."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass


class FieldKind(enum.Enum):
    """The kind of a field's values."""

    INTEGER = enum.auto()
    """An integer."""
    OPTIONAL_INTEGER = enum.auto()
    """An integer or None, which is NaN in a column."""
    REAL = enum.auto()
    """A number."""
    OPTIONAL_REAL = enum.auto()
    """A number or None, which is NaN in a column."""
    TEXT = enum.auto()
    """A string."""
    JSON = enum.auto()
    """A list or a dictionary, which is a JSON text in a column."""
    CHECKSUM = enum.auto()
    """`crc32c:` and eight hexadecimal digits, which is a number in a column."""


@dataclass(frozen=True, slots=True)
class RecordField:
    """One field of a record."""

    name: str
    """Name in Python, in documents, in filters and on the command line."""
    kind: FieldKind
    """Kind of the values."""
    help: str = ""
    """Help of the option that filters by it; empty if only `--where` can."""
    _: KW_ONLY
    is_identity: bool = True
    """Whether it distinguishes records. Tables show such fields, in this order."""
    is_early: bool = True
    """Whether it is known when a tensor is captured, so that a capture can select by it."""


RECORD_FIELDS = (
    RecordField("iteration", FieldKind.INTEGER, "Training step: 20, 10:20:2, 0-9."),
    RecordField("rank", FieldKind.INTEGER, "Global rank: 3, 0-3, 0,2,5."),
    RecordField(
        "attempt",
        FieldKind.INTEGER,
        "Restart count of the ranks; the latest attempt by default.",
        is_early=False,
    ),
    RecordField("microbatch", FieldKind.INTEGER, "Index of the forward and backward pass within the step."),
    RecordField("call", FieldKind.INTEGER, "Index of the call of the same module within the microbatch."),
    RecordField("mode", FieldKind.TEXT, "train or eval; both by default."),
    RecordField("layer_type", FieldKind.TEXT, "attention, linear, or the user's own."),
    RecordField("layer_stack", FieldKind.TEXT, "Path of a stack of layers, if there are several: encoder.block."),
    RecordField("layer_idx", FieldKind.INTEGER, "Index of the layer in its stack; -1 outside of all stacks."),
    RecordField("module", FieldKind.TEXT, "Dotted path of the module: 'layers.*.attn.*'."),
    RecordField("operation", FieldKind.TEXT, "forward or backward."),
    RecordField("phase", FieldKind.TEXT, "pre, post, or the user's own."),
    RecordField("component", FieldKind.TEXT, "FA, linear, or the user's own."),
    RecordField("quant_type", FieldKind.TEXT, "bf16, mxfp8, or the user's own."),
    RecordField("tensor_name", FieldKind.TEXT, "query, input, grad_weight, ...; 'grad_*'."),
    RecordField("dtype", FieldKind.TEXT, "Dtype as captured: bfloat16."),
    RecordField("compute_dtype", FieldKind.TEXT, "Dtype in which the operation computed."),
    RecordField("shape", FieldKind.JSON),
    RecordField("batch_size", FieldKind.OPTIONAL_INTEGER, "Number of samples in the microbatch.", is_identity=False),
    RecordField("sample_dim", FieldKind.OPTIONAL_INTEGER, is_identity=False, is_early=False),
    RecordField("sample_ids", FieldKind.JSON, is_identity=False, is_early=False),
    RecordField("layout", FieldKind.TEXT, is_identity=False, is_early=False),
    RecordField("keep", FieldKind.TEXT, is_identity=False, is_early=False),
    RecordField("placement", FieldKind.JSON, is_identity=False, is_early=False),
    RecordField("metadata", FieldKind.JSON, is_identity=False, is_early=False),
    RecordField("counter", FieldKind.INTEGER, is_identity=False, is_early=False),
    RecordField("timestamp", FieldKind.REAL, is_identity=False, is_early=False),
    RecordField("nbytes", FieldKind.INTEGER, is_identity=False),
    RecordField("checksum", FieldKind.CHECKSUM, is_identity=False, is_early=False),
)
"""All fields except `overflow`, whose counts have their own columns."""


def field_names(chosen: Callable[[RecordField], bool]) -> tuple[str, ...]:
    """The names of the fields that satisfy a predicate, in the order of the table."""
    return tuple(field.name for field in RECORD_FIELDS if chosen(field))


INT_FIELDS, OPTIONAL_INT_FIELDS, STRING_FIELDS, JSON_FIELDS = (
    field_names(lambda field, kind=kind: field.kind is kind)  # type: ignore[misc]  # the kind of this turn
    for kind in (FieldKind.INTEGER, FieldKind.OPTIONAL_INTEGER, FieldKind.TEXT, FieldKind.JSON)
)
"""The names of the fields of each kind."""

SAMPLE = "sample"
"""The name of the sample dimension, also when records are grouped by it."""
