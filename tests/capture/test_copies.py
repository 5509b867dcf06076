"""Is a copy of the model that is made while it is captured as good as one that is made at another time?"""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from ranktape.capture import Capture
from ranktape.storage import open_run

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.product: Callable[..., torch.Tensor] = F.linear
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(hidden, hidden, hidden)[0]
        heads = hidden.unflatten(-1, (2, -1)).transpose(1, 2)
        hidden = hidden + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        return self.product(hidden, self.up.weight) + self.up(hidden)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return hidden  # type: ignore[no-any-return]


def by_saving(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def by_pickle(model: nn.Module) -> nn.Module:
    pickled = pickle.dumps(model)
    assert b"ranktape" not in pickled
    loaded: nn.Module = pickle.loads(pickled)  # noqa: S301  (it is ours)
    return loaded


def averaged(model: nn.Module) -> nn.Module:
    inner: nn.Module = AveragedModel(model).module
    return inner


def train(url: Path, *, copies: list[nn.Module], make: Callable[[nn.Module], nn.Module] | None) -> nn.Module:
    """A training that copies its model at the boundary, before the backward pass and after it, and runs the copies."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = torch.arange(6).view(2, 3)

    def at_a_moment() -> None:
        if make is not None:
            made = make(model)
            assert all(map(torch.equal, made.state_dict().values(), model.state_dict().values()))
            made(tokens).sum().backward()
            copies.append(made)

    with Capture(
        url, model=model, layers="all", select={"layer_type": ["linear", "attention"]}, min_iterations=2, strict=True
    ):
        for _ in range(2):
            output = model(tokens)
            at_a_moment()
            output.sum().backward()
            at_a_moment()
            optimizer.step()
            optimizer.zero_grad()
            at_a_moment()
    return model


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """The training without copies, and its run."""
    url = tmp_path_factory.mktemp("alone") / "run"
    return train(url, copies=[], make=None), url


@pytest.mark.parametrize("make", [copy.deepcopy, by_saving, by_pickle, averaged])
def test_copies_train_on_their_own_and_are_not_captured(
    tmp_path: Path, alone: tuple[nn.Module, Path], make: Callable[[nn.Module], Any]
) -> None:
    copies: list[nn.Module] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch tells of hooks that a pickle lacks
        model = train(tmp_path / "run", copies=copies, make=make)
    assert all(map(torch.equal, model.state_dict().values(), alone[0].state_dict().values()))
    records = [
        [(record.iteration, record.module, record.tensor_name, record.call) for record in open_run(url).select()]
        for url in (tmp_path / "run", alone[1])
    ]
    assert sorted(records[0]) == sorted(records[1])
    tokens = torch.arange(6).view(2, 3)
    for made in copies:
        made(tokens).sum().backward()
    assert b"ranktape" not in pickle.dumps(model)
    assert copy.deepcopy(copies[-1]).state_dict().keys() == model.state_dict().keys()


CHILD = """
import pickle, sys
sys.modules["ranktape"] = None
import torch
model = pickle.load(open(sys.argv[1], "rb"))
seen = []
for module in model.modules():
    for _ in range(40):
        module.register_forward_pre_hook(lambda module, args: seen.append(len(args)))
        module.register_forward_hook(lambda module, args, output: seen.append(len(args)))
model(torch.ones(2, 8)).sum().backward()
assert len(seen) == 3 * 80, len(seen)
"""


def test_a_pickle_is_good_where_ranktape_is_not_installed_and_takes_new_hooks(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Capture(tmp_path / "run", model=model, min_iterations=2, advance_on="forward"):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
        model(torch.ones(2, WIDTH)).sum().backward()
    command = [sys.executable, "-c", CHILD, str(tmp_path / "model.pickle")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
