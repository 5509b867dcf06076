"""What does a small tensor in an S3 store cost the client, beside zarr's `create_array` over s3fs?

Processor time of this process, all its threads, against Ceph's S3 gateway on loopback, which has processes of its own.
The bars: at most a tenth of `create_array`; under 20 objects for 1,000 tensors. Without Ceph's packages (`make ceph`)
nothing is measured.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import numpy as np
import zarr

from ranktape.storage.format.record_info import RecordInfo
from tests.ceph import CephServer, CephUnavailableError
from tests.runs import describe, start

ROUNDS = 5
NUM_TENSORS = 1000
NUM_CREATED = 30
FORMS = ((4, 16, 64), (4, 32, 32), (64,), (4, 64, 16))
"""Shapes of float32, in turn, as layers of a small model have."""

Tensors = list[tuple[np.ndarray[Any, Any], RecordInfo]]


def make() -> Tensors:
    """Small tensors of a few shapes with their identities."""
    bits = np.random.default_rng(0)
    tensors = []
    for number in range(NUM_TENSORS):
        array = bits.standard_normal(FORMS[number % len(FORMS)], dtype=np.float32)
        tensors.append((array, describe(array, module=f"layers.{number}.up", layer_idx=number, counter=number)))
    return tensors


def run_seconds(server: CephServer, tensors: Tensors) -> tuple[float, int]:
    """Processor time for each tensor of an iteration and its commit; and the objects that it has."""
    backend, _, [writer] = start(server.new_url(), storage_options=server.storage_options)
    before = len(backend.list_keys(""))
    begun = time.process_time()
    for array, info in tensors:
        writer.write(array, info=info)
    writer.commit(0, expected=[], silent_sites={})
    return (time.process_time() - begun) / len(tensors), len(backend.list_keys("")) - before


def create_array_seconds(server: CephServer, tensors: Tensors) -> float:
    """Processor time for each tensor as an array of its own in a group."""
    group = zarr.create_group(server.new_url(), storage_options=server.storage_options)
    begun = time.process_time()
    for array, info in tensors[:NUM_CREATED]:
        options: Any = {"shape": array.shape, "dtype": array.dtype, "chunks": array.shape, "compressors": None}
        created = group.create_array(info.module, attributes=info.to_json(), **options)
        created[...] = array
    return (time.process_time() - begun) / NUM_CREATED


def main() -> None:
    """Measure the ways in turn; print medians and ratios."""
    try:
        server = CephServer()
    except CephUnavailableError as error:
        print(f"not measured: {error}")
        return
    tensors = make()
    created: list[float] = []
    ours: list[float] = []
    num_objects = 0
    for _ in range(ROUNDS):
        created.append(create_array_seconds(server, tensors))
        seconds, num_objects = run_seconds(server, tensors)
        ours.append(seconds)
    server.stop()
    print(f"create_array over s3fs: {statistics.median(created) * 1e3:.2f} ms of processor time for a small tensor")
    ratio = statistics.median(other / own for other, own in zip(created, ours, strict=True))
    print(f"run: {statistics.median(ours) * 1e3:.3f} ms, a {ratio:.0f}th of create_array (bar: a 10th)")
    print(f"{num_objects} objects for {NUM_TENSORS} small tensors (bar: under 20)", flush=True)
    # Closing its connections as the interpreter ends, s3fs fails in a loop that is not theirs, and says so at length.
    os._exit(0)


if __name__ == "__main__":
    main()
