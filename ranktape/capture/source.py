"""Names what a captured tensor comes from, and what it is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ranktape.storage.format.layout import TensorSite
from ranktape.storage.format.record_info import Operation

if TYPE_CHECKING:
    from ranktape.capture.passes.passes import Call


# Both are keys of many tables for each tensor on the training thread: a tuple's hash needs no step of Python.
class Source(NamedTuple):
    """A module, or what stands for one, whose tensors are recorded."""

    module: str
    """Dotted path, without the wrappers' prefixes."""
    layer_type: str
    """`linear`, `attention`, or the user's own."""
    layer_idx: int
    """Layer in the stack; -1 outside of it."""
    component: str
    """`linear`, `FA`, `unknown`, or the user's own."""
    layer_stack: str = ""
    """Dotted path of the list that holds the layer; empty outside of any."""


class TensorRole(NamedTuple):
    """What a tensor is to its source."""

    operation: Operation
    """Forward or backward."""
    phase: str
    """`pre`, `post`, or the user's own."""
    tensor_name: str
    """`input`, `grad_output`, ..."""
    has_samples: bool = True
    """Whether one of its dimensions holds samples; weights have none."""
    layouts: tuple[str, ...] = ()
    """Letters of its dimensions, where the role knows them; the one that is as long as the tensor has dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """What the user says of a tensor that is recorded by hand."""

    quant_type: str | None = None
    """What it was computed in; the capture's own tag where None."""
    sample_ids: tuple[int | str, ...] | None = None
    """Identifiers of its samples."""
    metadata: str = "null"
    """The user's own words, as JSON."""


NO_TAGS = Tags()
"""Of a tensor that a hook recorded."""

DIFFERENTIABLE = Tags(metadata='{"create_graph": true}')
"""Of the gradients of a backward pass with `create_graph`: a backward pass through them adds to the same call."""


def site_of(source: Source, role: TensorRole, *, call: Call, quant_type: str | None) -> TensorSite:
    """The place of a tensor in its iteration; what it was computed in is the call's where no other is given."""
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
    """What messages call a source: its module, or where it has none its kind and layer."""
    return source.module or f"{source.layer_type} {source.layer_idx}"


def site_name(source: Source, role: TensorRole) -> str:
    """What messages call a tensor's place: module, direction, phase and name."""
    return f"{source_name(source)} {role.operation} {role.phase} {role.tensor_name}"
