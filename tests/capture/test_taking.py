"""Are the statistics that the training thread takes those that the writer would make of the values?"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from ranktape.analyze.numerics.histograms.histogram import measure
from ranktape.analyze.numerics.histograms.moments import statistics_of
from ranktape.capture.tensors.taking import HostStatistics
from ranktape.capture.writing.counting import taken_from
from ranktape.storage.format.dtypes import numpy_dtype
from ranktape.storage.format.record_info import Overflow
from ranktape.storage.format.statistics import Statistics

TAKER = HostStatistics()
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.float8_e4m3fn)


def taken(tensor: torch.Tensor, *, sample_dim: int | None) -> tuple[Statistics, Overflow]:
    payload = TAKER.compute(tensor, sample_dim=sample_dim)
    words = np.frombuffer(payload, dtype="<f8")
    vector, overflow = taken_from(words, per_sample=sample_dim is not None)
    return Statistics.from_vector(vector), overflow


def as_array(tensor: torch.Tensor) -> np.ndarray:
    whole = tensor.contiguous()
    flat = whole.reshape(-1).view(torch.uint8).numpy() if whole.numel() else np.zeros(0, np.uint8)
    return flat.view(numpy_dtype(str(tensor.dtype).removeprefix("torch."))).reshape(tuple(tensor.shape))


def check(tensor: torch.Tensor, *, sample_dim: int | None, tolerance: float = 1e-9) -> None:
    statistics, overflow = taken(tensor, sample_dim=sample_dim)
    array = as_array(tensor)
    assert overflow == measure(array, sample_dim=sample_dim)
    expected = statistics_of(array).to_vector()
    np.testing.assert_allclose(statistics.to_vector(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "sample_dim"),
    [((4, 7, 50), 0), ((4, 7, 50), 1), ((3, 5000), None), ((), None), ((0, 3), 0), ((1,), None)],
)
@pytest.mark.parametrize("special", [None, 0.0, 1e-39, torch.inf, -torch.inf, torch.nan])
def test_they_are_those_of_the_values(
    dtype: torch.dtype, shape: tuple[int, ...], sample_dim: int | None, special: float | None
) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    if special is not None and tensor.numel() and dtype.is_floating_point:
        tensor.view(-1)[tensor.numel() // 2] = special
    check(tensor.to(dtype), sample_dim=sample_dim)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 255, 256, 257, 4095, 4096, 4097, 4351, 4352, 4353, 12289])
@pytest.mark.parametrize("place", [0, -1])
def test_the_first_and_the_last_element_of_every_size(size: int, place: int) -> None:
    tensor = torch.randn(2, size, generator=torch.Generator().manual_seed(0))
    for special in (100.0, -100.0, 1e-39, 0.0, torch.inf):
        tensor[1, place] = special
        check(tensor, sample_dim=0)


def test_nothing_is_read_beyond_the_end(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(np.ones(2 * mmap.PAGESIZE // 4, np.float32).tobytes())
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 2 * mmap.PAGESIZE) as memory:
        file.truncate(mmap.PAGESIZE)  # to read from the second page ends the process now
        tensor = torch.frombuffer(memory, dtype=torch.float32, count=mmap.PAGESIZE // 4)
        assert taken(tensor, sample_dim=None)[0].sum == mmap.PAGESIZE // 4
        del tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_order_of_dimensions_and_any_stride(dtype: torch.dtype) -> None:
    tensor = torch.randn(4, 6, 8, 10).to(dtype)
    check(tensor.transpose(1, 2), sample_dim=0)
    check(tensor.permute(3, 1, 0, 2), sample_dim=2)
    check(tensor[:, ::2, 1:], sample_dim=0)
    check(tensor[0].expand(4, 6, 8, 10), sample_dim=0)
    check(torch.full((300, 300), 1.5).to(dtype), sample_dim=None)


def test_what_is_written_to_is_looked_at_again() -> None:
    tensor = torch.ones(2, 50)
    assert taken(tensor, sample_dim=0)[0].sum == 100
    assert taken(tensor.view(2, 5, 10), sample_dim=0)[0].sum == 100
    tensor.mul_(2)
    assert taken(tensor, sample_dim=0)[0].sum == 200
    del tensor
    # Another tensor may be given the same memory.
    sums = [taken(torch.full((2, 50), float(number)), sample_dim=0)[0].sum for number in range(20)]
    assert sums == [100.0 * number for number in range(20)]


def views() -> list[tuple[torch.Tensor, int | None]]:
    """Tensors that begin at the same place, and have as many elements: some are the same ones, some are not."""
    whole = torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(0))
    halves = [whole[:4], whole[:, :4], whole[:, :, :4], whole[::2], whole[:, ::2]]
    same = [whole[:4].reshape(16, 16), whole[:4].transpose(1, 2), whole[:4].transpose(0, 1), whole[0].expand(4, 8, 8)]
    both = torch.randn(4, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    parts = [both.imag, both.conj().imag, both, both.conj()]
    return [(view, dim) for view in (*halves, *same, *parts) for dim in (None, 0, 1)]


def test_what_begins_at_the_same_place_is_the_same_only_where_all_elements_are() -> None:
    taker = HostStatistics()
    for view, dim in views():
        assert taker.compute(view, sample_dim=dim) == HostStatistics().compute(view, sample_dim=dim), (
            view.stride(),
            dim,
        )


def test_all_views_of_the_same_elements_are_looked_at_once() -> None:
    taker = HostStatistics()
    whole = torch.randn(4, 6, 8, 10)
    first = taker.compute(whole, sample_dim=0)
    for view in (whole.detach(), whole.view(4, 48, 10), whole.transpose(1, 2), whole[None].squeeze(0)):
        assert taker.compute(view, sample_dim=0) is first
    other = taker.compute(whole[:, :3], sample_dim=0)
    assert taker.compute(whole[:, :3].transpose(1, 3), sample_dim=0) is other
    assert other != first


def test_another_storage_at_the_same_address_is_another_tensor() -> None:
    # A sharded parameter lives on, with its memory given back to the allocator: the next one gets it.
    memory = torch.ones(100)
    kept = torch.frombuffer(memory.numpy(), dtype=torch.float32)
    assert taken(kept, sample_dim=None)[0].sum == 100
    memory.mul_(2)
    again = torch.frombuffer(memory.numpy(), dtype=torch.float32)
    assert (again.data_ptr(), again._version) == (kept.data_ptr(), kept._version)
    assert taken(again, sample_dim=None)[0].sum == 200


def test_gradients_are_added_up_where_they_are_without_us() -> None:
    hidden = torch.randn(8, 16, requires_grad=True) * 1
    both = hidden + torch.nn.Linear(16, 16)(hidden)
    places = []
    for tensor in (both, hidden):
        tensor.register_hook(lambda grad: places.append(grad.data_ptr()))
    both.register_hook(lambda grad: TAKER.compute(grad, sample_dim=0) and None)
    both.square().sum().backward()
    assert places[0] == places[1]


def test_a_large_mean_takes_nothing_from_small_differences() -> None:
    # Of the sum of cubes nothing but cancelling is left: it is 190 in place of 10^17.
    check(1e4 + torch.randn(64, 1000), sample_dim=0, tolerance=1e-7)


def test_a_mean_that_moves_takes_nothing_from_small_differences() -> None:
    # Each row is far from the mean of those before it.
    steps = torch.arange(64.0).square().view(64, 1) * 100
    check(steps + torch.randn(64, 5000) * 1e-2, sample_dim=0)
    check(torch.cat([torch.zeros(9000), torch.full((9000,), 1e30), torch.randn(9000)]), sample_dim=None)
    check(-torch.rand(3, 5000) - 1e-3, sample_dim=0)
