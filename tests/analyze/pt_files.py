"""Writes `.pt` files for tests: as torch and the legacy tools write them, and files of bad faith."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any

import torch

TIME = "20250908_095220"


def save(path: Path, payload: Any, *, legacy: bool = False) -> Path:
    """A file as torch writes it; `legacy` as the legacy saver had torch write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(payload, path, _use_new_zipfile_serialization=not legacy)
    return path


def legacy_file(folder: Path, tensor: torch.Tensor, *, legacy: bool = True, **parts: Any) -> Path:
    """A file as the legacy saver wrote it, tags in its name and in itself."""
    tags = {
        "counter": 1,
        "iteration": 0,
        "layer_type": "linear",
        "layer_idx": 1,
        "operation": "forward",
        "phase": "pre",
        "component": "linear",
        "quant_type": "mxfp8",
        "rank": 0,
        "tensor_name": "input",
    } | parts
    sample = "" if "sample_idx" not in tags else f"_sample{tags['sample_idx']:03d}"
    name = (
        f"{TIME}_{tags['counter']:04d}_iter{tags['iteration']:03d}_{tags['layer_type']}_L{tags['layer_idx']}"
        f"_{tags['operation']}_{tags['phase']}_{tags['component']}_{tags['quant_type']}_rank{tags['rank']:02d}"
        f"{sample}_{tags['tensor_name']}.pt"
    )
    payload = {
        "tensor": tensor,
        "tensor_info": {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype),
            "device": "cuda:0",
            "min": float("nan"),
        },
        "metadata": {**tags, "save_time": "2025-09-08 09:52:20", "experiment": "first"},
    }
    return save(folder / name, payload, legacy=legacy)


def archive(path: Path, pickle: bytes, *, compress: bool = False, **members: bytes) -> Path:
    """An archive as torch's, with a pickle of one's own; members are given with `__` for a slash."""
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("archive/data.pkl", pickle)
        file.writestr("archive/version", b"3\n")
        for name, data in members.items():
            file.writestr(f"archive/{name.replace('__', '/')}", data)
    return path


def text(value: str) -> bytes:
    """The instruction that puts a text on a pickle's stack."""
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    """The instruction that puts a number on a pickle's stack."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def numbers(*values: int) -> bytes:
    """The instructions that put a tuple of numbers on a pickle's stack."""
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor_pickle(
    *,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    num_elements: int,
    offset: int = 0,
    storage: str = "FloatStorage",
) -> bytes:
    """The pickle of a file that holds one tensor, with whatever extents it declares."""
    identity = b"(" + text("storage") + f"ctorch\n{storage}\n".encode() + text("0") + text("cpu") + number(num_elements)
    geometry = number(offset) + numbers(*shape) + numbers(*strides) + b"\x89" + b"ccollections\nOrderedDict\n)R"
    return b"\x80\x02" + b"ctorch._utils\n_rebuild_tensor_v2\n(" + identity + b"tQ" + geometry + b"tR."
