"""Reads the pickle of a `.pt` file as data, without running it.

Its instructions build lists, dictionaries, texts and numbers of this module's own, and a name stands for something only
if it is in `_CALLS`, in `_STORAGES` or names an element type; any other ends the reading. No name is imported, no
function of the file's choice is called, and memory grows with the pickle's own length alone. The instructions are those
that `torch.load(weights_only=True)` takes.
"""

from __future__ import annotations

import itertools
import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, NoReturn

from ranktape.errors import DataError
from ranktape.storage.format.dtypes import DTYPES

MAX_NBYTES = 1 << 22
"""Length of a pickle; those that describe one tensor take hundreds of bytes."""

MAX_DIMENSIONS = 32
"""More than any tensor that was trained with; numpy ends at 64."""

_MAX_NUMBER = 2**63
"""Extents, strides and offsets are below: torch has no larger ones, and to multiply such numbers takes long."""

_MAX_ARGUMENTS = 16
"""More than any call that torch writes."""


class Storage(NamedTuple):
    """A run of bytes elsewhere in the file."""

    key: str
    """Its name in the file."""
    num_elements: int
    """How many it holds, as the pickle says."""
    dtype: str
    """Of the elements: `uint8` where a storage knows bytes only."""


class TensorData(NamedTuple):
    """Which elements of a storage a tensor is."""

    storage: Storage
    """Where its values are."""
    dtype: str
    """Element type, in torch's words."""
    offset: int
    """Of its first element, in elements."""
    shape: tuple[int, ...]
    """Elements along each dimension."""
    strides: tuple[int, ...]
    """Elements from one to the next along each dimension."""


@dataclass(slots=True)
class Pairs:
    """A dictionary as it was written; its keys are not hashed, as a stranger chose them."""

    items: list[tuple[Any, Any]]
    """Keys and values in their order."""

    def get(self, key: str) -> Any:
        """The last value under a text; None where there is none."""
        return next((value for name, value in reversed(self.items) if type(name) is str and name == key), None)

    def names(self) -> list[str]:
        """The keys that are texts."""
        return [name for name, _ in self.items if type(name) is str]


class _Name(NamedTuple):
    """A name that the pickle asks for."""

    text: str


_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
"""The element types of the storages of torch that we can hold."""

_UNTYPED = "torch.storage.UntypedStorage"


def read_pickle(source: IO[bytes], *, place: str, storages: dict[str, Storage] | None = None) -> Any:
    """What the pickle at the position of `source` says; the position is behind it then.

    Dictionaries come as `Pairs`, tensors as `TensorData`, sets as lists. The storages that it names are added to
    `storages`.

    Raises:
        DataError: it is cut off or damaged, or names something that is neither a tensor nor plain data.
    """
    machine = _Machine(place, storages={} if storages is None else storages)
    try:
        for name, argument in _instructions(source, place=place):
            if name == "STOP":
                return machine.pop()
            machine.step(name, argument)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise DataError(f"{place} is damaged: its pickle cannot be read ({error})") from error
    raise DataError(f"{place} is damaged: its pickle has no end")


def _instructions(source: IO[bytes], *, place: str) -> Iterator[tuple[str, Any]]:
    """The names of the instructions with what stands behind each; one that is not known ends the reading."""
    start = source.tell()
    for count in itertools.count():
        code = source.read(1)
        if not code:
            return
        opcode = _OPCODES.get(code)
        if opcode is None:
            raise DataError(f"{place} is not read: its pickle holds the byte {code!r}, where torch writes none such")
        if opcode.name == "GLOBAL":
            argument: Any = _read_name(source)
        else:
            argument = None if opcode.arg is None else opcode.arg.reader(source)
        # Only these are long; of the others, many are.
        if (opcode.name == "BINUNICODE" or count % 1024 == 0) and source.tell() - start > MAX_NBYTES:
            raise DataError(f"{place} is not read: its pickle is longer than {MAX_NBYTES} bytes")
        yield opcode.name, argument


def _read_name(source: IO[bytes]) -> str:
    """A module and a name in it, each on a line; `pickletools` would read escapes in them, and complain of some."""
    lines = (source.readline(), source.readline())
    if not all(line.endswith(b"\n") for line in lines):
        raise ValueError("a name has no end")
    return " ".join(line[:-1].decode("ascii") for line in lines)


class _Machine:
    """The stack and the memory that a pickle's instructions work on."""

    def __init__(self, place: str, *, storages: dict[str, Storage]) -> None:
        self._place = place
        self._storages = storages
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def pop(self) -> Any:
        """The value on top."""
        return self._stack.pop()

    def step(self, name: str, argument: Any) -> None:
        """Do one instruction."""
        if name in _LITERALS:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name]())
        elif name in _SIZES:
            taken = [self.pop() for _ in range(_SIZES[name])]
            self._stack.append(tuple(reversed(taken)))
        elif name in _FILLS:
            self._fill(name)
        elif name in _STEPS:
            _STEPS[name](self, argument)

    def put(self, index: int) -> None:
        """Remember the value on top."""
        self._memo[index] = self._stack[-1]

    def get(self, index: int) -> None:
        """Bring back what was remembered."""
        self._stack.append(self._memo[index])

    def mark(self, _: Any) -> None:
        """Begin a group of values."""
        self._marks.append(self._stack)
        self._stack = []

    def name(self, argument: str) -> None:
        """Something that the pickle asks for by name."""
        text = argument.replace(" ", ".")
        module, _, name = text.rpartition(".")
        if text == _UNTYPED or (module == "torch" and name in _STORAGES) or text in _CALLS:
            self._stack.append(_Name(text))
        elif module == "torch" and name in DTYPES:
            self._stack.append(text)
        else:
            self._refuse(f"the name {text[:100]}")

    def storage(self, _: Any) -> None:
        """A run of bytes elsewhere in the file."""
        kind, storage_type, key, _location, num_elements, *view = self._few(self.pop())
        is_known = kind == "storage" and isinstance(storage_type, _Name) and type(key) in _WORDS
        if not is_known or any(view) or type(num_elements) is not int:
            self._refuse("a storage of a form that torch does not write now")
        module, _, name = storage_type.text.rpartition(".")
        if storage_type.text != _UNTYPED and (module != "torch" or name not in _STORAGES):
            self._refuse(f"a storage of the type {storage_type.text}")
        found = Storage(key=str(key), num_elements=num_elements, dtype=_STORAGES.get(name, "uint8"))
        if self._storages.setdefault(found.key, found) != found:
            self._refuse(f"two storages of the name {found.key[:100]}")
        self._stack.append(found)

    def call(self, _: Any) -> None:
        """A function of a few arguments, by its name."""
        arguments, called = self.pop(), self.pop()
        if not isinstance(called, _Name) or called.text not in _CALLS:
            self._refuse("a call of something that is no function")
        self._stack.append(_CALLS[called.text](self, *self._few(arguments)))

    def _few(self, values: Any) -> tuple[Any, ...]:
        """The same, if it is as short as what torch writes: a long one, taken many times, would take for ever."""
        if not isinstance(values, tuple) or len(values) > _MAX_ARGUMENTS:
            self._refuse("a call with other arguments than torch writes")
        return values

    def _fill(self, name: str) -> None:
        """The instructions that take everything down to the last mark, or the one or two values on top."""
        if name in {"APPEND", "SETITEM"}:
            taken = self._stack[-1:] if name == "APPEND" else self._stack[-2:]
            del self._stack[-len(taken) :]
        else:
            taken, self._stack = self._stack, self._marks.pop()
        if name == "TUPLE":
            self._stack.append(tuple(taken))
        elif name in {"APPEND", "APPENDS"}:
            target = self._stack[-1]
            if not isinstance(target, list):
                self._refuse(f"{name} to something that is no list")
            target.extend(taken)
        else:
            target = self._stack[-1]
            if not isinstance(target, Pairs) or len(taken) % 2:
                self._refuse(f"{name} in something that is no dictionary")
            target.items.extend(zip(taken[::2], taken[1::2], strict=True))

    def _refuse(self, what: str) -> NoReturn:
        raise DataError(
            f"{self._place} is not read: its pickle holds {what}, which is neither a dense tensor nor plain data; "
            f"nothing of it was run"
        )

    def size(self, extents: Any) -> tuple[Any, ...]:
        """The shape of a tensor."""
        if len(extents) > MAX_DIMENSIONS:
            self._refuse(f"a size of {len(extents)} dimensions, more than {MAX_DIMENSIONS}")
        return tuple(extents)

    def device(self, *words: Any) -> str:
        """Where a tensor was."""
        if any(type(word) not in _WORDS for word in words):
            self._refuse("a device of another name than torch writes")
        return ":".join(map(str, words))

    def set_of(self, entries: Any = ()) -> Any:
        """A set, as the list that it was made of."""
        if not isinstance(entries, list | tuple):
            self._refuse("a set of something that is no list")
        return entries

    def tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> TensorData:
        """As `_rebuild_tensor_v2` has it; what follows `rest` of two is what makes it no plain tensor."""
        return self._tensor(storage, (offset, shape, strides), dtype=None, extra=rest[2:])

    def tensor_of_dtype(self, storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> TensorData:
        """As `_rebuild_tensor_v3` has it: the element type is apart from the storage."""
        if len(rest) < 3 or type(rest[2]) is not str:  # noqa: PLR2004 - requires_grad, hooks, dtype
            self._refuse("a tensor without an element type")
        return self._tensor(storage, (offset, shape, strides), dtype=rest[2].rpartition(".")[2], extra=rest[3:])

    def _tensor(self, storage: Any, geometry: tuple[Any, Any, Any], *, dtype: str | None, extra: Any) -> TensorData:
        offset, shape, strides = geometry
        if not isinstance(storage, Storage) or any(extra):
            raise DataError(
                f"{self._place} is not read: its tensor is conjugated, negated or without a storage, so that the "
                "values in the file are not its own: save tensor.resolve_conj().resolve_neg().clone() instead"
            )
        if len(shape) > MAX_DIMENSIONS:
            self._refuse(f"a tensor of {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
        numbers = (offset, *shape, *strides) if len(shape) == len(strides) else (None,)
        if not all(type(number) is int and 0 <= number < _MAX_NUMBER for number in numbers):
            self._refuse("a tensor of an impossible shape")
        if dtype is not None and dtype not in DTYPES:
            self._refuse(f"elements of the type {dtype[:100]}")
        return TensorData(
            storage=storage, dtype=dtype or storage.dtype, offset=offset, shape=tuple(shape), strides=tuple(strides)
        )


_WORDS = (str, int)
"""What a name is of; a text is made of nothing else, as what is nested may be endless."""

_LITERALS = frozenset({"BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "LONG1"})
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": lambda: Pairs([]),
}
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "MARK": _Machine.mark,
    "GLOBAL": _Machine.name,
    "BINPERSID": _Machine.storage,
    "REDUCE": _Machine.call,
}
_SIZES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_FILLS = frozenset({"TUPLE", "APPEND", "APPENDS", "SETITEM", "SETITEMS"})
_CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _Machine.tensor,
    "torch._utils._rebuild_tensor_v3": _Machine.tensor_of_dtype,
    # A parameter is the tensor in it; a tensor with attributes of its own is the tensor without them.
    "torch._utils._rebuild_parameter": lambda _, tensor, *__: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda _, tensor, *__: tensor,
    "collections.OrderedDict": lambda _: Pairs([]),
    "torch.Size": _Machine.size,
    "torch.device": _Machine.device,
    "builtins.set": _Machine.set_of,
    "__builtin__.set": _Machine.set_of,
}
"""What a name may be called for, and what we make of it."""

_OPCODES = {
    opcode.code.encode("latin-1"): opcode
    for opcode in pickletools.opcodes
    if opcode.name in {*_LITERALS, *_CONSTANTS, *_STEPS, *_SIZES, *_FILLS, "PROTO", "STOP"}
}
"""The instructions that are read, by their bytes."""
