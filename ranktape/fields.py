"""The fields of a record, in one table: columns, filters, options of commands and frames follow from it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass


class FieldKind(enum.Enum):
    """What a field holds."""

    INTEGER = enum.auto()
    """A whole number."""
    OPTIONAL_INTEGER = enum.auto()
    """A whole number, or nothing; NaN in a column of numbers."""
    REAL = enum.auto()
    """A number."""
    TEXT = enum.auto()
    """Words."""
    JSON = enum.auto()
    """A list or a dictionary; its JSON in a column of texts."""
    CHECKSUM = enum.auto()
    """`crc32c:` and eight digits; the number in a column."""


@dataclass(frozen=True, slots=True)
class RecordField:
    """One field of a record."""

    name: str
    """The word for it in Python, in documents, in filters and on the command line."""
    kind: FieldKind
    """What it holds."""
    help: str = ""
    """Of the option that filters by it; empty where `--where` alone does."""
    _: KW_ONLY
    is_identity: bool = False
    """Whether it tells a record from others; tables show it in this order."""
    is_early: bool = False
    """Whether it is known when a tensor is captured, so that a capture can choose by it."""


RECORD_FIELDS = (
    RecordField("iteration", FieldKind.INTEGER, "Training step: 20, 10:20:2, 0-9.", is_identity=True, is_early=True),
    RecordField("rank", FieldKind.INTEGER, "Global rank: 3, 0-3, 0,2,5.", is_identity=True, is_early=True),
    RecordField(
        "attempt",
        FieldKind.INTEGER,
        "Restart count of the worker group; the latest of each iteration by default.",
        is_identity=True,
    ),
    RecordField(
        "microbatch",
        FieldKind.INTEGER,
        "Index of the forward and backward pass within the step.",
        is_identity=True,
        is_early=True,
    ),
    RecordField(
        "call",
        FieldKind.INTEGER,
        "How many times the same place had fired before within the microbatch.",
        is_identity=True,
        is_early=True,
    ),
    RecordField("mode", FieldKind.TEXT, "train or eval; both by default.", is_identity=True, is_early=True),
    RecordField("layer_type", FieldKind.TEXT, "attention, linear, or the user's own.", is_identity=True, is_early=True),
    RecordField(
        "layer_stack",
        FieldKind.TEXT,
        "Which of several stacks of layers: encoder.block, '*decoder*'.",
        is_identity=True,
        is_early=True,
    ),
    RecordField(
        "layer_idx",
        FieldKind.INTEGER,
        "Index of the layer in its stack; -1 outside of any.",
        is_identity=True,
        is_early=True,
    ),
    RecordField(
        "module", FieldKind.TEXT, "Dotted path of the module: 'layers.*.attn.*'.", is_identity=True, is_early=True
    ),
    RecordField("operation", FieldKind.TEXT, "forward or backward.", is_identity=True, is_early=True),
    RecordField("phase", FieldKind.TEXT, "pre, post, or the user's own.", is_identity=True, is_early=True),
    RecordField("component", FieldKind.TEXT, "FA, linear, or the user's own.", is_identity=True, is_early=True),
    RecordField("quant_type", FieldKind.TEXT, "bf16, mxfp8, or the user's own.", is_identity=True, is_early=True),
    RecordField(
        "tensor_name", FieldKind.TEXT, "query, input, grad_weight, ...; 'grad_*'.", is_identity=True, is_early=True
    ),
    RecordField("dtype", FieldKind.TEXT, "As captured: bfloat16.", is_identity=True, is_early=True),
    RecordField("compute_dtype", FieldKind.TEXT, "What the operation computed in.", is_identity=True, is_early=True),
    RecordField("shape", FieldKind.JSON, is_identity=True, is_early=True),
    RecordField("batch_size", FieldKind.OPTIONAL_INTEGER, "Samples in the microbatch.", is_early=True),
    RecordField("sample_dim", FieldKind.OPTIONAL_INTEGER),
    RecordField("sample_ids", FieldKind.JSON),
    RecordField("layout", FieldKind.TEXT),
    RecordField("keep", FieldKind.TEXT),
    RecordField("placement", FieldKind.JSON),
    RecordField("metadata", FieldKind.JSON),
    RecordField("counter", FieldKind.INTEGER),
    RecordField("timestamp", FieldKind.REAL),
    RecordField("nbytes", FieldKind.INTEGER, is_early=True),
    RecordField("checksum", FieldKind.CHECKSUM),
)
"""All fields but `overflow`, whose counts have columns of their own."""


def field_names(chosen: Callable[[RecordField], bool]) -> tuple[str, ...]:
    """The names of the fields that are chosen, in the order of the table."""
    return tuple(field.name for field in RECORD_FIELDS if chosen(field))


def names_of_kind(*kinds: FieldKind) -> tuple[str, ...]:
    """The names of the fields of some kinds."""
    return field_names(lambda field: field.kind in kinds)


INT_FIELDS = names_of_kind(FieldKind.INTEGER)
OPTIONAL_INT_FIELDS = names_of_kind(FieldKind.OPTIONAL_INTEGER)
STRING_FIELDS = names_of_kind(FieldKind.TEXT)
JSON_FIELDS = names_of_kind(FieldKind.JSON)
