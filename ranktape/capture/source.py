"""The source of a captured tensor, and its role there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ranktape.storage.format.layout import TensorSite
from ranktape.storage.format.record_info import Operation

if TYPE_CHECKING:
    from ranktape.capture.passes.tracker import Call


# Tuples, because both are keys of many dictionaries on the training thread, and the hash of a tuple is fast.
class Source(NamedTuple):
    """A module, or a function call inside one, whose tensors are recorded."""

    module: str
    """Dotted path without the names that wrappers add."""
    layer_type: str
    """`linear`, `attention`, or the user's own."""
    layer_idx: int
    """Number of the layer in its stack; -1 outside any stack."""
    component: str
    """`linear`, `FA`, `unknown`, or the user's own."""
    layer_stack: str = ""
    """Dotted path of the stack with the layer; empty outside any stack."""


class TensorRole(NamedTuple):
    """The role of a tensor in its source."""

    operation: Operation
    """Forward or backward."""
    phase: str
    """`pre`, `post`, or the user's own."""
    tensor_name: str
    """`input`, `grad_output`, ..."""
    has_samples: bool = True
    """Whether the tensor has a sample dimension, unlike weights."""
    layouts: tuple[str, ...] = ()
    """The letters of the dimensions, one string for each possible number of dimensions; empty if they are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """Additional information about a recorded tensor."""

    quant_type: str | None = None
    """The type in which it was computed; None for that of the capture or the call."""
    sample_ids: tuple[int | str, ...] | None = None
    """Identifiers of its samples; None for those of the call."""
    metadata: str = "null"
    """Metadata as JSON."""


NO_TAGS = Tags()
"""Tags without any information."""

DIFFERENTIABLE = Tags(metadata='{"create_graph": true}')
"""The tags of gradients of a backward pass with `create_graph`. A backward pass through it adds to the same call."""


def site_of(source: Source, role: TensorRole, *, call: Call, quant_type: str | None) -> TensorSite:
    """The site of a tensor in its iteration. `quant_type` is by default that of the call."""
    fields = source._asdict()
    del fields["layer_stack"]
    return TensorSite(
        **fields,
        operation=role.operation,
        phase=role.phase,
        quant_type=quant_type or call.quant_type,
        tensor_name=role.tensor_name,
        microbatch=call.microbatch,
        call=call.index,
        mode=str(call.mode),
    )


def source_name(source: Source) -> str:
    """The name of a source in messages: its module, or, if that is empty, its layer type and number."""
    return source.module or f"{source.layer_type} {source.layer_idx}"


def site_name(source: Source, role: TensorRole) -> str:
    """The name of a tensor's site in messages: module, direction, phase and name."""
    return f"{source_name(source)} {role.operation} {role.phase} {role.tensor_name}"
