"""Reads the pickle of a `.pt` file as data, without running it, and gives what it says as JSON has it.

Python's own unpickler does the work, with the instructions that `torch.load(weights_only=True)` takes and no others. A
name stands for something only if it is in `_CALLS`, in `_STORAGES` or names an element type; any other ends the
reading. No name is imported, no function of the file's choice is called, and memory grows with the pickle's own length
alone.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from ranktape.errors import DataError
from ranktape.storage.format.dtypes import DTYPES

MAX_NBYTES = 1 << 22
"""Length of the pickles of a file; those that describe one tensor take hundreds of bytes."""

MAX_DIMENSIONS = 32
"""More than any tensor that was trained with; numpy ends at 64."""

MAX_NODES = 100_000
"""Values that `plain` gives at most: what refers to itself or to one list many times is endless otherwise."""

MAX_DEPTH = 64
"""Lists and dictionaries within one another that `plain` follows."""

MAX_CHARACTERS = 1 << 24
"""Characters that `plain` gives at most: a pickle names one long text many times in few bytes."""

_NUMBER_CHARACTERS = 26
"""The most that a number of a tensor takes."""

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

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def get(self, key: str) -> Any:
        """The last value under a text; None where there is none."""
        return next((value for name, value in reversed(self.items) if type(name) is str and name == key), None)

    def names(self) -> list[str]:
        """The keys that are texts."""
        return [name for name, _ in self.items if type(name) is str]


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


class _Name(NamedTuple):
    """A name that the pickle asks for."""

    text: str


class _RefusedError(Exception):
    """The pickle holds what is neither a dense tensor nor plain data; its text says what."""


def read_pickle(source: io.BytesIO, *, place: str, storages: dict[str, Storage] | None = None) -> Any:
    """What the pickle at the position of `source` says; the position is behind it then.

    Dictionaries come as `Pairs`, tensors as `TensorData`, sets as lists. The storages that it names are added to
    `storages`.

    Raises:
        DataError: it is cut off or damaged, or names something that is neither a tensor nor plain data.
    """
    try:
        return _Machine(source, {} if storages is None else storages).load()
    except _RefusedError as error:
        raise DataError(
            f"{place} is not read: its pickle holds {error}, which is neither a dense tensor nor plain data; "
            "nothing of it was run"
        ) from None
    except EOFError as error:
        raise DataError(f"{place} is damaged: its pickle has no end") from error
    except (ValueError, LookupError, TypeError, AttributeError, struct.error, pickle.UnpicklingError) as error:
        raise DataError(f"{place} is damaged: its pickle cannot be read ({error})") from error


def _refuse(what: str) -> NoReturn:
    raise _RefusedError(what)


class _Instructions(dict[int, Callable[..., None]]):
    """What is done for each byte."""

    def __missing__(self, code: int) -> NoReturn:
        _refuse(f"the byte {bytes([code])!r}, where torch writes none such")


_Unpickler: Any = pickle._Unpickler  # noqa: SLF001 - that of C has no table of instructions
_KNOWN = b"".join(
    (
        *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.GLOBAL),
        *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT, pickle.BINUNICODE),
        *(pickle.SHORT_BINSTRING, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
        *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST),
        *(pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.BINPERSID),
    )
)


class _Machine(_Unpickler):  # type: ignore[misc]  # torch's own reader narrows it in the same way
    """Python's unpickler with the instructions that are known, for stand-ins of ours."""

    def __init__(self, source: io.BytesIO, storages: dict[str, Storage]) -> None:
        super().__init__(source, encoding="latin-1")
        self._storages = storages

    def load_empty_dict(self) -> None:
        """A dictionary whose keys are not hashed."""
        self.append(Pairs([]))

    def load_reduce(self) -> None:
        """A function of a few arguments, by its name."""
        arguments, called = self.stack.pop(), self.stack.pop()
        if not isinstance(called, _Name) or called.text not in _CALLS:
            _refuse("a call of something that is no function")
        self.append(_CALLS[called.text](*_few(arguments)))

    def find_class(self, module: str, name: str) -> _Name | str:
        """Something that the pickle asks for by name."""
        text = f"{module}.{name}"
        if text == _UNTYPED or (module == "torch" and name in _STORAGES) or text in _CALLS:
            return _Name(text)
        if module == "torch" and name in DTYPES:
            return text
        _refuse(f"the name {text[:100]}")

    def persistent_load(self, pid: Any) -> Storage:
        """A run of bytes elsewhere in the file."""
        kind, storage_type, key, _location, num_elements, *view = _few(pid)
        is_known = kind == "storage" and isinstance(storage_type, _Name) and type(key) in _WORDS
        if not is_known or any(view) or type(num_elements) is not int:
            _refuse("a storage of a form that torch does not write now")
        module, _, name = storage_type.text.rpartition(".")
        if storage_type.text != _UNTYPED and (module != "torch" or name not in _STORAGES):
            _refuse(f"a storage of the type {storage_type.text}")
        found = Storage(key=str(key), num_elements=num_elements, dtype=_STORAGES.get(name, "uint8"))
        if self._storages.setdefault(found.key, found) != found:
            _refuse(f"two storages of the name {found.key[:100]}")
        return found

    dispatch = _Instructions(
        {code: _Unpickler.dispatch[code] for code in _KNOWN}
        | {pickle.EMPTY_DICT[0]: load_empty_dict, pickle.REDUCE[0]: load_reduce}
    )


def _few(values: Any) -> tuple[Any, ...]:
    """The same, if it is as short as what torch writes: a long one, taken many times, would take for ever."""
    if not isinstance(values, tuple) or len(values) > _MAX_ARGUMENTS:
        _refuse("a call with other arguments than torch writes")
    return values


def _size(extents: Any) -> tuple[Any, ...]:
    """The shape of a tensor."""
    if len(extents) > MAX_DIMENSIONS:
        _refuse(f"a size of {len(extents)} dimensions, more than {MAX_DIMENSIONS}")
    return tuple(extents)


def _device(*words: Any) -> str:
    """Where a tensor was."""
    if any(type(word) not in _WORDS for word in words):
        _refuse("a device of another name than torch writes")
    return ":".join(map(str, words))


def _set(entries: Any = ()) -> Any:
    """A set, as the list that it was made of."""
    if not isinstance(entries, list | tuple):
        _refuse("a set of something that is no list")
    return entries


def _tensor_v2(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> TensorData:
    """As `_rebuild_tensor_v2` has it; what follows `rest` of two is what makes it no plain tensor."""
    return _tensor(storage, offset, shape, strides, dtype=getattr(storage, "dtype", None), extra=rest[2:])


def _tensor_v3(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> TensorData:
    """As `_rebuild_tensor_v3` has it: the element type is apart from the storage."""
    if len(rest) < 3 or type(rest[2]) is not str:  # noqa: PLR2004 - requires_grad, hooks, dtype
        _refuse("a tensor without an element type")
    return _tensor(storage, offset, shape, strides, dtype=rest[2].rpartition(".")[2], extra=rest[3:])


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *, dtype: Any, extra: Any) -> TensorData:
    if not isinstance(storage, Storage) or any(extra):
        _refuse(
            "a tensor that is conjugated, negated or without a storage, so that the values in the file are not its "
            "own (save tensor.resolve_conj().resolve_neg().clone() instead)"
        )
    if len(shape) > MAX_DIMENSIONS:
        _refuse(f"a tensor of {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
    numbers = (offset, *shape, *strides) if len(shape) == len(strides) else (None,)
    if not all(type(number) is int and 0 <= number < _MAX_NUMBER for number in numbers):
        _refuse("a tensor of an impossible shape")
    if dtype not in DTYPES:
        _refuse(f"elements of the type {dtype[:100]}")
    return TensorData(storage, dtype, offset, tuple(shape), tuple(strides))


_WORDS = (str, int)
"""What a name is of; a text is made of nothing else, as what is nested may be endless."""

_CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    # A parameter is the tensor in it; a tensor with attributes of its own is the tensor without them.
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: tensor,
    "collections.OrderedDict": lambda: Pairs([]),
    "torch.Size": _size,
    "torch.device": _device,
    "builtins.set": _set,
    "__builtin__.set": _set,
}
"""What a name may be called for, and what we make of it."""


def plain(
    value: Any,
    *,
    place: str,
    max_characters: int = MAX_CHARACTERS,
    listed: Callable[[TensorData], Any] = lambda _: None,
) -> Any:
    """The same as JSON has it: dictionaries of texts, lists, numbers; NaN becomes a text.

    A tensor becomes what `listed` gives of it, while half of the characters are not taken yet; else a text.

    Raises:
        DataError: it is larger than any description of a tensor, or refers to itself.
    """
    num_nodes = num_characters = 0

    def counted(text: str) -> str:
        nonlocal num_characters
        num_characters += len(text)
        if num_characters > max_characters:
            raise DataError(f"what {place} says of its tensor is longer than {max_characters} characters")
        return text

    def convert(entry: Any, depth: int) -> Any:
        nonlocal num_nodes
        num_nodes += 1
        if num_nodes > MAX_NODES or depth > MAX_DEPTH:
            raise DataError(f"what {place} says of its tensor is larger than {MAX_NODES} values or refers to itself")
        if isinstance(entry, Pairs):
            return {
                counted(str(key)): convert(inner, depth + 1)
                for key, inner in entry.items
                if not isinstance(key, Pairs | list | tuple)
            }
        if isinstance(entry, TensorData):
            # A pickle may name one tensor many times, too.
            has_room = num_characters + _NUMBER_CHARACTERS * math.prod(entry.shape) <= max_characters // 2
            known = listed(entry) if has_room else None
            text = counted(f"tensor {entry.dtype}{list(entry.shape)}" if known is None else json.dumps(known))
            return text if known is None else known
        if type(entry) in {list, tuple}:
            return [convert(inner, depth + 1) for inner in entry]
        # A number has as many characters as its digits, of which a stranger's may have hundreds.
        text = counted(str(entry))
        is_plain = entry is None or isinstance(entry, int) or (isinstance(entry, float) and math.isfinite(entry))
        return entry if is_plain else text

    return convert(value, 0)
