"""Do the ranks of a start learn from one another why no capture begins, and whether somebody was only late?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from torch._C._distributed_c10d import TCPStore

from ranktape.capture import rendezvous
from ranktape.capture.rendezvous import RankPlace, Rendezvous, find_place
from ranktape.capture.staging import process
from ranktape.errors import CaptureError, FailedElsewhereError, LateElsewhereError, LateError

Meet = Callable[[int], Rendezvous]


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meet]:
    """A rank of three that waits for no other, all of them in this process, in a store as torchrun's agent has it."""
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    # Each rank is a process otherwise, whose first capture this is.
    monkeypatch.setattr(rendezvous, "_serials", itertools.repeat(0))

    def meet(rank: int) -> Rendezvous:
        place = RankPlace(rank=rank, world_size=3, num_local_ranks=3, restart=0)
        return Rendezvous(place, seconds=0, on_wait=lambda _: None)

    yield meet
    del server


def raised(call: Callable[[], object]) -> CaptureError:
    """What it raises."""
    with pytest.raises(CaptureError) as caught:
        call()
    return caught.value


def test_the_first_rank_that_waited_too_long_speaks_and_the_others_are_late_elsewhere(meet: Meet) -> None:
    errors = [raised(lambda rank=rank: meet(rank)) for rank in (1, 2, 0)]  # type: ignore[misc]  # a default of a lambda
    # Rank 0 says so as well: it is the one that came too late.
    assert [type(error) for error in errors] == [LateError, LateElsewhereError, LateError]
    assert {str(error).partition(",")[0] for error in errors} == {"rank 1 waited 0 s for rank 0 to begin its capture"}


@pytest.mark.parametrize("kind", [LateElsewhereError, FailedElsewhereError])
def test_what_another_rank_reports_ends_the_wait(kind: type[CaptureError], meet: Meet) -> None:
    first, second = meet(0), meet(1)
    first.report_failure("its writer was not ready", is_late=kind is LateElsewhereError)
    error = raised(lambda: second.wait(lambda: False, seconds=60))
    assert type(error) is kind
    assert str(error) == "its writer was not ready"


def test_a_rank_knows_its_place_among_those_of_its_host_and_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "2"}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    assert find_place() == RankPlace(rank=5, world_size=8, num_local_ranks=4, restart=2)
    for name in words:
        monkeypatch.delenv(name)
    assert find_place() == RankPlace(rank=0, world_size=1, num_local_ranks=1, restart=0)


def test_the_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MIN_DEFAULT_NBYTES", 1)
    monkeypatch.setattr(process, "MAX_DEFAULT_NBYTES", 1 << 60)
    alone, shared = (process.default_host_budget_nbytes(num_local_ranks=count) for count in (1, 8))
    assert shared == pytest.approx(alone / 8, rel=0.3)  # what is free changes meanwhile
