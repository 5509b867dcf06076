"""Zarr data types for small floats: bfloat16 and the 8-, 6- and 4-bit floats.

There is a class for each row of `ranktape.storage.format.dtypes` whose numpy dtype is from ml_dtypes, with the name
that tensorstore uses. Importing this module imports zarr and registers the types.

Fill values in JSON follow Zarr v3: a number, "NaN", "Infinity", "-Infinity", or the bits as "0x7fc1". Values written by
tensorstore can be read. Written values preserve every bit pattern, because NaN has many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Self, overload

import numpy as np

# Import all of zarr first, which waits if another thread is importing it.
import zarr
import zarr.errors
from zarr.core.dtype import common as zarr_common
from zarr.core.dtype.common import DTypeJSON, DTypeSpec_V2, DTypeSpec_V3, HasEndianness, HasItemSize
from zarr.dtype import ZDType, data_type_registry

from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import DTYPES

if TYPE_CHECKING:
    from zarr.core.common import JSON, ZarrFormat
    from zarr.core.dtype.wrapper import TBaseDType

# From zarr 3.3 on it is in zarr.errors, and the old name warns.
_NotThisTypeError: type[ValueError] = (
    getattr(zarr.errors, "DataTypeValidationError", None) or zarr_common.DataTypeValidationError
)

_CONSTANTS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""The values that Zarr v3 writes as strings."""


_WITHOUT_ZERO = "float8_e8m0fnu"
"""The type of scales. Its values are powers of two and one NaN."""


class SmallFloat(ZDType[np.dtype[Any], Any], HasItemSize):
    """A Zarr v3 data type for a float of ml_dtypes."""

    _zarr_v3_name: ClassVar[str]
    dtype_cls: ClassVar[Any]

    @classmethod
    def from_native_dtype(cls, dtype: TBaseDType) -> Self:
        """The data type for a numpy dtype. zarr calls this on every class in turn."""
        if cls._check_native_dtype(dtype):
            return cls()
        raise _NotThisTypeError(f"numpy dtype {dtype} is not {cls._zarr_v3_name}")

    def to_native_dtype(self) -> np.dtype[Any]:
        """The dtype from ml_dtypes."""
        return DTYPES[self._zarr_v3_name].numpy_dtype

    @classmethod
    def _from_json_v2(cls, data: DTypeJSON) -> NoReturn:
        raise _NotThisTypeError(f"{data!r} is not {cls._zarr_v3_name}: Zarr v2 has no name for it")

    @classmethod
    def _from_json_v3(cls, data: DTypeJSON) -> Self:
        if data == cls._zarr_v3_name:
            return cls()
        raise _NotThisTypeError(f"{data!r} is not {cls._zarr_v3_name}")

    @overload
    def to_json(self, zarr_format: Literal[2]) -> DTypeSpec_V2: ...

    @overload
    def to_json(self, zarr_format: Literal[3]) -> DTypeSpec_V3: ...

    def to_json(self, zarr_format: ZarrFormat) -> DTypeSpec_V2 | DTypeSpec_V3:
        """The name in a `zarr.json`.

        Raises:
            UsageError: `zarr_format` is 2.
        """
        if zarr_format != 3:  # noqa: PLR2004 - a version, as zarr counts them
            raise UsageError(f"Zarr v2 has no name for {self._zarr_v3_name}: create the array with zarr_format=3")
        return self._zarr_v3_name

    @property
    def item_size(self) -> int:
        """Size of one element, in bytes."""
        return self.to_native_dtype().itemsize

    def _check_scalar(self, data: object) -> bool:
        try:
            self.cast_scalar(data)
        except (TypeError, ValueError):
            return False
        return True

    def cast_scalar(self, data: object) -> Any:
        """The nearest value of the type, from a number or a string of Zarr v3.

        A NaN of the type keeps its bits. As in tensorstore, zero becomes code 0 in `float8_e8m0fnu`, which has no zero.
        The 6- and 4-bit floats saturate.

        Raises:
            TypeError: the argument is not a number.
            ValueError: the type cannot represent it: an infinity, a NaN, a negative number or an overflow in a type
                that lacks these, or bits that do not fit.
        """
        native = self.to_native_dtype()
        if isinstance(data, np.generic | np.ndarray) and data.dtype == native and data.ndim == 0:
            return np.asarray(data)[()]
        is_number = isinstance(data, int | float | np.generic) and not isinstance(data, complex | np.complexfloating)
        if not is_number and not isinstance(data, str):
            raise TypeError(self._refusal(data))
        try:
            if isinstance(data, str) and data.startswith("0x"):
                return self._from_bits(int(data, 16))
            return self._nearest(_CONSTANTS[data] if isinstance(data, str) else float(data))  # type: ignore[arg-type]
        except (KeyError, OverflowError, ValueError) as error:
            raise ValueError(self._refusal(data)) from error

    def _nearest(self, number: float) -> Any:
        if number == 0.0 and self._zarr_v3_name == _WITHOUT_ZERO:
            return self.default_scalar()
        with np.errstate(all="ignore"):
            scalar = np.array(number).astype(self.to_native_dtype())[()]
        nearest = float(scalar)
        if math.isnan(nearest) != math.isnan(number) or math.isinf(nearest) != math.isinf(number):
            raise ValueError(number)
        return scalar

    def _from_bits(self, bits: int) -> Any:
        native = self.to_native_dtype()
        if bits >= 1 << self._num_bits:
            raise ValueError(bits)
        return np.array(bits, dtype=f"<u{native.itemsize}").view(native)[()]

    @property
    def _num_bits(self) -> int:
        # The 6- and 4-bit floats use the low bits of a byte; the high bits are undefined.
        return int(self._zarr_v3_name.partition("_")[0].removeprefix("b").removeprefix("float"))

    def _refusal(self, data: object) -> str:
        return (
            f"{data!r} is not a value of {self._zarr_v3_name}: give a number it can hold, 'NaN', 'Infinity' or "
            f"'-Infinity' where it has them, or its {self._num_bits} bits as '0x...'"
        )

    def default_scalar(self) -> Any:
        """The element whose bits are all 0."""
        return np.zeros((), dtype=self.to_native_dtype())[()]

    def from_json_scalar(self, data: JSON, *, zarr_format: ZarrFormat) -> Any:  # noqa: ARG002 - zarr's signature
        """A fill value from a `zarr.json`, with the errors of `cast_scalar`."""
        return self.cast_scalar(data)

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> JSON:  # noqa: ARG002 - zarr's signature
        """A fill value for a `zarr.json` that preserves every bit."""
        scalar = self.cast_scalar(data)
        bits = self._bits(scalar)
        number = float(scalar)
        for text, constant in _CONSTANTS.items():
            # The string "NaN" is only one of the bit patterns of NaN.
            if (number == constant or (math.isnan(number) and text == "NaN")) and self._bits(
                self._nearest(constant)
            ) == bits:
                return text
        # tensorstore 0.1.86 reads numbers of this type as 2**64 times too large.
        if math.isfinite(number) and self._zarr_v3_name != _WITHOUT_ZERO:
            return number
        return f"0x{bits:0{2 * self.item_size}x}"

    def _bits(self, scalar: Any) -> int:
        return int.from_bytes(np.asarray(scalar).tobytes(), "little")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by name, because the classes are created from a table and cannot be imported."""
        return data_type, (self._zarr_v3_name,)


def _make(name: str) -> type[SmallFloat]:
    native = DTYPES[name].numpy_dtype
    # The bytes codec writes the endianness only for types that have one.
    bases = (SmallFloat, HasEndianness) if native.itemsize > 1 else (SmallFloat,)
    namespace = {
        "__doc__": f"Zarr v3's {name}.",
        "__module__": __name__,
        "_zarr_v3_name": name,
        "dtype_cls": type(native),
    }
    return dataclass(frozen=True, kw_only=True)(type(name, bases, namespace))


DATA_TYPES: dict[str, type[SmallFloat]] = {row.name: _make(row.name) for row in DTYPES.values() if row.is_ml_dtype}
"""The classes by their names in a `zarr.json`."""


def register() -> None:
    """Register the small floats with zarr, so that `zarr.open` can read them. Repeated calls have no effect.

    A type that is already registered under the same name, by a later version of zarr for instance, is kept. `open_run`
    calls this if zarr has been imported. If you open runs with zarr only, call it once before.
    """
    for name, its_type in DATA_TYPES.items():
        if name not in data_type_registry.contents:
            data_type_registry.register(name, its_type)


register()


def data_type(name: str) -> SmallFloat:
    """The data type of that name, for zarr's functions."""
    return DATA_TYPES[name]()
