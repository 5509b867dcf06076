"""Gives the numbers in what users pass: arrays of numpy, tensors of torch, nested lists."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import DTYPES

if TYPE_CHECKING:
    import torch

    from ranktape.analyze.numerics.histograms.histogram import AnyArray

HALF_NBYTES = 2
"""Up to this width, numpy and torch do not have the same types."""


def numbers_of(x: Any) -> AnyArray:
    """The numbers of an array of numpy, of nested lists or of a tensor of torch, in the byte order of this machine.

    Of any shape, and of any type that records hold: NaN, infinities and signs of zeros stay. No copy is made of an
    array in that order, nor of a tensor in the memory of the CPU; other tensors are copied there.

    Raises:
        UsageError: the elements are of another type, lists are ragged, or a tensor is sparse or has no values.
    """
    given = tensor_or_array(x)
    if not isinstance(given, np.ndarray):
        check_readable(given)
        _check_known(str(given.dtype).removeprefix("torch."))
        return array_of(given.cpu())
    _check_known(given.dtype.name)
    return given if given.dtype.isnative else given.astype(given.dtype.newbyteorder("="))


def tensor_or_array(x: Any) -> torch.Tensor | AnyArray:
    """A tensor of torch itself, and anything else as an array of numpy; no element is looked at.

    Raises:
        UsageError: lists are ragged.
    """
    imported = sys.modules.get("torch")
    if imported is not None and isinstance(x, imported.Tensor):  # who has a tensor has imported torch
        return cast("torch.Tensor", x)
    try:
        return np.asarray(x)
    except ValueError as error:
        raise UsageError(f"this is no array of numbers ({error}): give lists of the same length") from error


def _check_known(dtype: str) -> None:
    if dtype not in DTYPES:
        raise UsageError(f"elements of {dtype} are no numbers that records hold: give one of {', '.join(DTYPES)}")


def check_readable(tensor: torch.Tensor) -> None:
    """Whether the tensor has values, one after the other.

    Raises:
        UsageError: it is sparse, or on the device meta.
    """
    import torch

    if tensor.layout is not torch.strided:
        raise UsageError(f"a tensor in the layout {tensor.layout} cannot be read: make it dense with .to_dense() first")
    if tensor.is_meta:
        raise UsageError("a tensor on the device meta has a shape and no values: there is nothing to read")


def array_of(tensor: torch.Tensor) -> AnyArray:
    """The same memory as an array of numpy: of a dense tensor on a CPU, of a type that records hold."""
    import torch

    dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")].numpy_dtype
    plain = tensor.detach().resolve_conj().resolve_neg()
    if dtype.itemsize > HALF_NBYTES:
        array: AnyArray = plain.numpy()
        return array
    pattern = torch.int16 if dtype.itemsize == HALF_NBYTES else torch.uint8
    return plain.view(pattern).numpy().view(dtype)
