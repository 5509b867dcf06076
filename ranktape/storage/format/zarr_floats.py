"""Teaches zarr the small floats: bfloat16 and the 8-, 6- and 4-bit ones.

One class of Zarr v3 data type for each row of `ranktape.storage.format.dtypes` that numpy knows only through
ml_dtypes, under the name that tensorstore reads. Importing this module imports zarr and registers the types.

Fill values in JSON follow Zarr v3: a number, "NaN", "Infinity", "-Infinity", or the bits as "0x7fc1". What
tensorstore writes is read; what is written names every bit pattern, because a NaN has many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Self, overload

import numpy as np

# First the whole of zarr: where another thread is in the middle of importing it, this waits for its end.
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

# It is in zarr.errors from zarr 3.3 on, and the old place then warns when it is asked.
_NotThisTypeError: type[ValueError] = (
    getattr(zarr.errors, "DataTypeValidationError", None) or zarr_common.DataTypeValidationError
)

_CONSTANTS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""The values that Zarr v3 spells as strings."""


_WITHOUT_ZERO = "float8_e8m0fnu"
"""The type of scales, whose values are powers of two and one NaN."""


class SmallFloat(ZDType[np.dtype[Any], Any], HasItemSize):
    """A Zarr v3 data type over one of the floats of ml_dtypes."""

    _zarr_v3_name: ClassVar[str]
    dtype_cls: ClassVar[Any]

    @classmethod
    def from_native_dtype(cls, dtype: TBaseDType) -> Self:
        """The data type of arrays of that numpy dtype; zarr asks every class in turn."""
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
        """The name, as it stands in a `zarr.json`.

        Raises:
            UsageError: `zarr_format` is 2.
        """
        if zarr_format != 3:  # noqa: PLR2004 - a version, as zarr counts them
            raise UsageError(f"Zarr v2 has no name for {self._zarr_v3_name}: create the array with zarr_format=3")
        return self._zarr_v3_name

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return self.to_native_dtype().itemsize

    def _check_scalar(self, data: object) -> bool:
        try:
            self.cast_scalar(data)
        except (TypeError, ValueError):
            return False
        return True

    def cast_scalar(self, data: object) -> Any:
        """The nearest value of the type; also from the strings of Zarr v3.

        A NaN keeps its bits when it is of the type already. Zero becomes the code 0 in `float8_e8m0fnu`, which
        has no zero, as in tensorstore; a number beyond the largest becomes it in the 6- and 4-bit floats.

        Raises:
            TypeError: not a number.
            ValueError: a number without a neighbour in the type: an infinity or a NaN where it has none, a negative
                one where it has no sign, one beyond its largest; or bits that do not fit.
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
        # The 6- and 4-bit floats lie in the low bits of a byte; ml_dtypes does not say what the others would mean.
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
        """A fill value as it was read from a `zarr.json`; refuses what `cast_scalar` refuses."""
        return self.cast_scalar(data)

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> JSON:  # noqa: ARG002 - zarr's signature
        """A fill value for a `zarr.json`, from which every bit comes back."""
        scalar = self.cast_scalar(data)
        bits = self._bits(scalar)
        number = float(scalar)
        for text, constant in _CONSTANTS.items():
            # A NaN has many bits, and the string stands for one of them.
            if (number == constant or (math.isnan(number) and text == "NaN")) and self._bits(
                self._nearest(constant)
            ) == bits:
                return text
        # tensorstore 0.1.86 takes numbers of this type for others 2**64 times as large.
        if math.isfinite(number) and self._zarr_v3_name != _WITHOUT_ZERO:
            return number
        return f"0x{bits:0{2 * self.item_size}x}"

    def _bits(self, scalar: Any) -> int:
        return int.from_bytes(np.asarray(scalar).tobytes(), "little")

    def __reduce__(self) -> tuple[Any, ...]:
        """What dask sends to its workers: the classes are made from a table, so that pickle cannot import them."""
        return data_type, (self._zarr_v3_name,)


def _make(name: str) -> type[SmallFloat]:
    native = DTYPES[name].numpy_dtype
    # The bytes codec writes its endianness only for types that have one.
    bases = (SmallFloat, HasEndianness) if native.itemsize > 1 else (SmallFloat,)
    namespace = {
        "__doc__": f"Zarr v3's {name}.",
        "__module__": __name__,
        "_zarr_v3_name": name,
        "dtype_cls": type(native),
    }
    return dataclass(frozen=True, kw_only=True)(type(name, bases, namespace))


DATA_TYPES: dict[str, type[SmallFloat]] = {row.name: _make(row.name) for row in DTYPES.values() if row.is_ml_dtype}
"""The classes by the name they have in a `zarr.json`."""


def register() -> None:
    """Register the small floats with zarr, so that plain `zarr.open` reads them; doing it again changes nothing.

    A type that somebody else has registered under the same name, such as a later zarr, is kept. `open_run` calls this
    where zarr has been imported, and readers that use zarr do, too; who uses zarr alone calls it once before.
    """
    for name, its_type in DATA_TYPES.items():
        if name not in data_type_registry.contents:
            data_type_registry.register(name, its_type)


register()


def data_type(name: str) -> SmallFloat:
    """The data type of that name, as zarr's functions take it."""
    return DATA_TYPES[name]()
