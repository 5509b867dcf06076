"""Finds the owner of a parameter, and records weights and biases once for each value, and their gradients.

In an iteration, a weight is recorded with its first call, and again with each call that uses another value: the weight
was written to, or the call gets another tensor, such as the fast weights of `torch.func.functional_call`. If nothing
updates the weights, for example if each token of a generation is an iteration, a stored weight is not stored again.

Autocast casts a parameter once for all its uses, whose gradients are added in the lower precision. An alias of the
parameter would be cast again for each use, and the gradients added in float32, which changes bits. Therefore the
gradient of such a weight is recorded on the weight itself: the sum over one graph, with the last call of the backward
pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ranktape.capture.hooks.hook import Hook
from ranktape.capture.passes.tracker import Call, Frame
from ranktape.capture.roles.known import role_of
from ranktape.capture.source import NO_TAGS, Source, Tags, TensorRole
from ranktape.capture.tensors.parts import PLAIN, is_plain
from ranktape.capture.torch_private import base_of, in_backward, parameters_of, storage_id, version_of

if TYPE_CHECKING:
    from torch import nn

    from ranktape.capture.recorder import Recorder
    from ranktape.capture.roles.table import FunctionRole, Port


def has_same_values(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same object, or the same elements of one storage in any shape."""
    if tensor is other:
        return True
    if type(tensor) not in PLAIN or type(other) not in PLAIN or tensor.layout is not torch.strided:
        return False
    if (tensor.dtype, tensor.numel(), tensor.storage_offset()) != (other.dtype, other.numel(), other.storage_offset()):
        return False
    is_alike = (tensor.shape, tensor.stride()) == (other.shape, other.stride())
    if not is_alike and not (tensor.is_contiguous() and other.is_contiguous()):
        return False
    return storage_id(tensor) == storage_id(other)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key that identifies the values of a tensor as long as its storage, or the tensor, is alive.

    For a plain tensor, it consists of the storage, the part of it, and the version counter. The storage is not
    identified by its address, because FSDP frees the memory of a weight and allocates it again. The version counter
    alone is not sufficient, because `parameter.data = other` does not increase it.
    """
    if not is_plain(tensor):
        return -id(tensor), version_of(tensor)
    return storage_id(tensor), version_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _reference(tensor: torch.Tensor) -> Any:
    """A weak reference to the storage, whose identity it keeps from reuse, or to a tensor that is not plain."""
    return StorageWeakRef(tensor.untyped_storage()) if is_plain(tensor) else weakref.ref(tensor)


@dataclass(slots=True)
class _Recorded:
    """The last recorded weight of a source."""

    identity: tuple[Any, ...]
    """The key that identifies its values."""
    reference: Any
    """A weak reference to the storage or the tensor."""
    is_stored: bool
    """Whether later iterations may rely on the record."""
    is_current: bool = True
    """Whether the weight was used in this iteration."""
    is_due: bool = False
    """Whether to record the weight again even if it has not changed."""

    def is_of(self, tensor: torch.Tensor, identity: tuple[Any, ...]) -> bool:
        """Whether a tensor with this identity has the recorded values."""
        is_alive = not isinstance(self.reference, weakref.ref) or self.reference() is tensor
        return self.identity == identity and is_alive


class Weights:
    """Records each weight and bias of a source unless it is the one that was recorded last.

    If two weights alternate, each is recorded each time, so the last record before a call is always of the weight that
    the call used.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[Source, str, str], _Recorded] = {}

    def begin(self, *, keeps: bool) -> None:
        """Start an iteration. `keeps` tells whether it may rely on the records of earlier iterations."""
        self._last = {key: one for key, one in self._last.items() if keeps or one.is_current}
        for one in self._last.values():
            one.is_current = False
            one.is_due = not (keeps and one.is_stored)

    def record(
        self,
        recorder: Recorder,
        source: Source,
        role: TensorRole,
        tensor: torch.Tensor,
        *,
        call: Call,
        placement: str | None,
        tags: Tags = NO_TAGS,
    ) -> None:
        """Record a weight or bias, unless it is the one that was recorded last."""
        key = source, role.tensor_name, call.mode
        identity = *_identity(tensor), role.layouts  # another product may take it transposed
        last = self._last.get(key)
        if last is not None and not last.is_due and last.is_of(tensor, identity):
            if not last.is_current:
                last.is_current = True
                recorder.expected.excuse(source, role, call)
            return
        is_known = recorder.record(source, role, tensor, call=call, placement=placement, tags=tags)
        is_stored = is_known and type(tensor) in PLAIN and not tensor.is_inference()
        is_reused = last is not None and last.identity[0] == identity[0] > 0
        reference = last.reference if last is not None and is_reused else _reference(tensor)
        self._last[key] = _Recorded(identity, reference, is_stored)


CACHED = "autocast casts it once for all its uses: one gradient for all of them"
"""The reason why the gradient of an operand is not recorded."""


def is_cached_by_autocast(tensor: torch.Tensor) -> bool:
    """Whether autocast is active and caches its cast of this tensor."""
    if tensor.dtype != torch.float32 or not (tensor.requires_grad and tensor.is_leaf) or base_of(tensor) is not None:
        return False
    kind = tensor.device.type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return is_on and torch.is_autocast_cache_enabled()


SUMMED = Tags(metadata='{"summed": true}')
"""The tags of the gradient of a weight that is the sum over several calls."""

Take = Callable[[torch.Tensor, Call, Tags], None]
"""A function that records the gradient of a weight for a call."""


class Leaves:
    """The hooks on weights and biases for one iteration."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._calls: dict[tuple[Source, str], Call] = {}
        self._handles: dict[Source, dict[str, tuple[Port, Any]]] = {}
        self._uses: dict[tuple[Source, str], set[Any]] = {}
        """The calls that contribute to the gradient of each weight, by mode, microbatch and index."""

    def watch(self, source: Source, port: Port, weight: torch.Tensor, *, call: Call, take: Take) -> None:
        """Call `take` with the gradient of a weight, which is the sum over all calls, and the call to record it for."""
        handles = self._handles.setdefault(source, {})
        uses = self._uses.setdefault((source, port.name), set())
        uses.add(call.key)
        if port.name in handles:
            if handles[port.name][0] != port:  # this call uses the weight in another orientation
                self._recorder.refuse(source, port.grad, CACHED, call=call)
            return

        def hook(grad: torch.Tensor) -> None:
            with self._recorder.guarded(source, port.grad):
                # The hook of a leaf does not know the call. It is that of the output gradient that came just before.
                call = self._calls.pop((source, port.name), None)
                if call is not None:
                    num_uses = sum(key[:2] == call.key[:2] for key in uses)  # of its microbatch
                    take(grad, call, SUMMED if num_uses > 1 else NO_TAGS)
                elif self._recorder.tracker.is_in_recorded_pass:
                    self._recorder.refuse(source, port.grad, "no gradient of the output came before it")

        handles[port.name] = port, weight.register_hook(Hook(hook))

    def on_grad_output(self, source: Source) -> Callable[[Call], None] | None:
        """A function to call when the output gradient of a call is computed; None if the source has no hooks here."""
        names = self._handles.get(source)
        if names is None:
            return None
        return lambda call: self._calls.update({(source, name): call for name in names})

    def remove(self) -> None:
        """Remove all hooks."""
        for handles in self._handles.values():
            for _, handle in handles.values():
                handle.remove()
        self._handles.clear()
        self._calls.clear()
        self._uses.clear()


@dataclass(frozen=True, slots=True)
class Owner:
    """A parameter or a part of one, with the module that has it."""

    frame: Frame
    """The module."""
    attribute: str
    """Name of the parameter in the module."""
    first: int | None = None
    """First or only row of the part; None for the whole parameter."""
    last: int | None = None
    """The row after the part; None if the part is a single row."""

    @property
    def path(self) -> str:
        """The name of products with it: the path of the module, the parameter if it is not `weight`, and the rows."""
        name = "" if self.attribute == "weight" else f".{self.attribute.removesuffix('_weight')}"
        rows = "" if self.first is None else f"[{self.first}]" if self.last is None else f"[{self.first}:{self.last}]"
        return f"{self.frame.path}{name}{rows}".lstrip(".")


ANY_KIND = ""
"""The key for a layer of any kind."""

_Owned = tuple[torch.Tensor, Frame, str]
"""A parameter, the module that has it, and its name in the module."""


class Owners:
    """The parameters of all known modules, for one iteration."""

    def __init__(self) -> None:
        # Also references the tensors, because a new tensor could get the `id` of a deleted one.
        self._owners: dict[tuple[int, str], _Owned] = {}
        self._addresses: dict[tuple[int, torch.Size, str], _Owned] | None = None
        """The owners by address and shape of the parameter; None until a recomputation needs them."""
        self.frames: dict[nn.Module, Frame] = {}
        """The known modules."""
        self.met: set[tuple[nn.Module, str]] = set()
        """The module and the name of each parameter with which a product was recorded."""

    def forget(self) -> None:
        """Drop all references to modules and parameters."""
        self._owners.clear()
        self._addresses = None
        self.frames.clear()
        self.met.clear()

    def add(self, frame: Frame) -> None:
        """Add the parameters of a module itself.

        If several modules share a parameter, its owner is the running module, or else the first added one, separately
        for each kind of layer.
        """
        self.frames[frame.module] = frame
        self._addresses = None
        role = role_of(type(frame.module))
        for name, parameter in parameters_of(frame.module).items():
            if parameter is not None:
                for kind in {ANY_KIND, ANY_KIND if role is None else role.layer_type}:
                    self._owners.setdefault((id(parameter), kind), (parameter, frame, name))

    def find(self, weight: torch.Tensor, frame: Frame | None, *, role: FunctionRole) -> Owner | None:
        """The owner of a weight or of some of its rows; None if it is not a known parameter, or is transposed.

        If there are several owners, a layer of the kind of the function's role is preferred: a product with a weight
        that an embedding and an output layer share belongs to the output layer. In a grouped product, a transposed
        weight or a copy in another dtype also has an owner. The running module is searched as well, because under FSDP2
        it has other parameters while it runs.
        """
        found = self._lookup(_origin(weight) if role.is_grouped else weight, frame, kind=role.layer_type)
        if found is not None:
            return Owner(found[1], found[2])
        base = base_of(weight)
        found = None if base is None else self._lookup(base, frame, kind=role.layer_type)
        rows = None if base is None or found is None else rows_of(weight, base)
        return None if rows is None or found is None else Owner(found[1], found[2], *rows)

    def _lookup(self, weight: torch.Tensor, frame: Frame | None, *, kind: str) -> _Owned | None:
        found = self._owners.get((id(weight), kind)) or self._owners.get((id(weight), ANY_KIND))
        if found is not None and found[0] is weight:
            return self._of_running(found, frame)
        if in_backward() and (found := self._at_address(weight, kind=kind)) is not None:
            return self._of_running(found, frame)
        if frame is None:
            return None
        for module in (frame.module, *frame.module.children()):
            for name, parameter in parameters_of(module).items():
                if parameter is weight:
                    return weight, self.frames.get(module, frame), name
        return None

    def _of_running(self, owned: _Owned, frame: Frame | None) -> _Owned:
        """The running module as the owner, if it has the parameter."""
        if frame is None or frame.module is owned[1].module:
            return owned
        names = (name for name, parameter in parameters_of(frame.module).items() if parameter is owned[0])
        name = next(names, None)
        return owned if name is None else (owned[0], self.frames.get(frame.module, frame), name)

    def _at_address(self, weight: torch.Tensor, *, kind: str) -> _Owned | None:
        """The owner of a parameter that is an argument of a reentrant checkpoint, which detaches its arguments."""
        is_detached = weight.is_leaf and not isinstance(weight, torch.nn.Parameter) and type(weight) in PLAIN
        if not is_detached or not weight.numel():
            return None
        if self._addresses is None:
            known = ((owned[0], key[1], owned) for key, owned in self._owners.items() if type(owned[0]) in PLAIN)
            self._addresses = {(one.data_ptr(), one.shape, kind): owned for one, kind, owned in known if one.numel()}
        place = weight.data_ptr(), weight.shape
        return self._addresses.get((*place, kind)) or self._addresses.get((*place, ANY_KIND))


def rows_of(weight: torch.Tensor, base: torch.Tensor) -> tuple[int, int | None] | None:
    """The first row of a view in its base and the row after it, or its only row and None; None if it is not rows."""
    if not base.is_contiguous() or not weight.is_contiguous() or not base.ndim:
        return None
    first, rest = divmod(int(weight.storage_offset() - base.storage_offset()), max(int(base.stride(0)), 1))
    is_row = weight.shape == base.shape[1:]
    if rest or not (is_row or weight.shape[1:] == base.shape[1:]):
        return None
    return first, None if is_row else first + weight.shape[0]


_SAME_VALUES = ("TransposeBackward0", "TBackward0", "PermuteBackward0", "ToCopyBackward0")
"""Autograd nodes whose result has the same values in another order or dtype."""


def _origin(weight: torch.Tensor) -> torch.Tensor:
    """The parameter of which a tensor is a transposed view or a cast; the tensor itself if autograd does not tell."""
    node = weight.grad_fn
    while node is not None and node.name() in _SAME_VALUES:
        node = node.next_functions[0][0]
    own = getattr(node, "variable", None)
    if isinstance(own, torch.Tensor):
        return own
    base = base_of(weight)
    return base if base is not None and base.numel() == weight.numel() else weight
