"""Is every training recorded right, and left alone, in which recorders are known to fail?

One capture sees all trainings of `trap_models.py`, an iteration each. `tests/README.md` has the list of traps.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from ranktape.capture import Capture, ModuleRole, register_role, unregister_role
from ranktape.storage import Records, Run, open_run
from tests.capture import trap_models
from tests.capture.trap_models import BATCH, KEPT, TRAININGS, WIDTH
from tests.capture.verify import verify_run

# What torch says of its older ways of tracing.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

ROLE = ModuleRole(
    classes=(trap_models.Kernel,), layer_type="linear", operands={"input": 0}, parameters={"weight": "weight"}
)
ORIGINAL = F.scaled_dot_product_attention


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, str], dict[str, str]]:
    """The run of one capture, in which each training is an iteration; what each came to without it, and with it."""
    url = tmp_path_factory.mktemp("traps") / "run"
    register_role(ROLE)
    try:
        plain = trap_models.run(TRAININGS)
        found: dict[str, str] = {}
        with Capture(url, advance_on="step", min_iterations=len(TRAININGS)) as capture:
            for name in TRAININGS:
                found |= trap_models.run([name])
                capture.step()
    finally:
        unregister_role(ROLE)
    assert capture.close().met
    return open_run(url), plain, found


Of = Callable[[str], Records]


@pytest.fixture
def of(trained: tuple[Run, dict[str, str], dict[str, str]]) -> Of:
    """Gives the records of a training."""
    names = list(TRAININGS)
    return lambda name: trained[0].select(iteration=names.index(name))


@pytest.fixture
def reasons_of(trained: tuple[Run, dict[str, str], dict[str, str]]) -> Callable[[str], dict[str, str]]:
    """Gives what is missing of a training, but for what other trainings have left."""
    names = list(TRAININGS)

    def reasons(name: str) -> dict[str, str]:
        silent = trained[0].status()[names.index(name)].silent_sites.get(0, {})
        return {site: why for site, why in silent.items() if "was not called" not in why}

    return reasons


Reasons = Callable[[str], dict[str, str]]


@pytest.mark.parametrize("name", TRAININGS)
def test_losses_and_gradients_are_the_same_bit_for_bit(
    name: str, trained: tuple[Run, dict[str, str], dict[str, str]]
) -> None:
    _, plain, found = trained
    assert found[name] == plain[name]


@pytest.mark.parametrize("name", sorted(set(TRAININGS) - {"traced", "gradient_of_a_gradient"}))
def test_nothing_is_missing(name: str, reasons_of: Reasons) -> None:
    assert reasons_of(name) == {}


COUNTS: dict[str, Counter[str]] = {
    "views": Counter(output=5, grad_weight=5, grad_input=4),
    "first_of_kept": Counter(output=4, grad_weight=4, grad_input=4),
    "again_with_kept": Counter(output=4, grad_weight=4, grad_input=4),
    "dictionaries": Counter(output=4, grad_weight=4, grad_input=2),
    "autocast": Counter(output=4, grad_weight=4, grad_input=2),
    "dropout": Counter(output=4, grad_weight=4, grad_input=2),
    "wrapped": Counter(output=2, grad_weight=2, grad_input=2),
    "same_gradient_by_autograd": Counter(output=2, grad_weight=2, grad_input=1),
    "clipped_in_place": Counter(output=4, grad_weight=4, grad_input=2),
    "forward_in_a_backward": Counter(output=1, grad_weight=1),
    "outside_of_modules": Counter(output=1, grad_weight=1),
}
"""How often each tensor is there, of trainings in which every layer computes what it was given."""


@pytest.mark.parametrize("name", COUNTS)
def test_layers_compute_again_to_what_was_recorded(name: str, of: Of) -> None:
    assert verify_run(of(name)) == COUNTS[name]


def test_a_layer_that_writes_its_input_in_place_has_what_was_multiplied(of: Of) -> None:
    records = of("writes_its_input")
    [passed] = records.select(module="0", tensor_name="output")
    [taken] = records.select(module="1", tensor_name="input")
    assert torch.equal(2 * passed.tensor(), taken.tensor())
    assert verify_run(records)["grad_input"] == 1


def test_views_are_stored_as_what_they_show(of: Of) -> None:
    sizes = {record.module: (record.shape, record.nbytes) for record in of("views").select(tensor_name="input")}
    assert sizes == {
        "before": ((BATCH, WIDTH), 4 * BATCH * WIDTH),
        "expanded": ((5, WIDTH), 4 * 5 * WIDTH),
        "turned": ((WIDTH, BATCH), 4 * WIDTH * BATCH),
        "cut": ((1, WIDTH // 2), 4 * WIDTH // 2),
        "strided": ((BATCH, WIDTH // 2), 4 * BATCH * WIDTH // 2),
    }


def test_a_gradient_of_a_gradient_is_another_call(of: Of) -> None:
    records = of("gradient_of_a_gradient")
    for module in ("*.0", "*.2"):
        grads = records.select(module=module, tensor_name="grad_output")
        assert grads.column("call").tolist() == [0, 1]
        assert len(records.select(module=module, tensor_name="grad_weight")) == 1
    # The first pass is that of the score alone, whose gradient is 1.
    first = records.select(module="*.2", tensor_name="grad_output", call=0)[0].tensor()
    assert torch.equal(first, torch.ones(BATCH, 1))


def test_tensors_that_stay_collect_no_hooks(of: Of) -> None:
    for name in ("first_of_kept", "again_with_kept"):
        grads = of(name).select(tensor_name="grad_weight", module="*.0")
        assert grads.column("microbatch").tolist() == [0, 1]
    [kept] = KEPT
    for tensor in (kept.batch, *kept.model.parameters()):
        assert not tensor._backward_hooks
    for module in kept.model.modules():
        assert not {*module._forward_pre_hooks, *module._forward_hooks, *module._backward_hooks}


def test_passes_on_other_threads_are_seen(of: Of) -> None:
    counts = verify_run(of("other_threads"))
    assert counts["output"] == counts["grad_weight"] == 2
    assert counts["attention output"] == counts["attention grad_key"] == 2


def test_a_module_under_two_names_is_recorded_once_and_put_back(of: Of) -> None:
    counts = verify_run(of("module_with_two_names"))
    assert counts["attention output"] == counts["attention grad_query"] == 1
    assert vars(trap_models)["attend"] is ORIGINAL
    assert F.scaled_dot_product_attention is ORIGINAL
    assert "ranktape_tests_twin" not in sys.modules


def test_attention_outside_of_every_module_is_not_recorded(of: Of) -> None:
    assert len(of("outside_of_modules").select(layer_type="attention")) == 0


def test_autocast_says_what_was_seen_and_what_was_computed_in(of: Of) -> None:
    records = of("autocast").select(module="*.0")
    dtypes = {
        name: sorted(set(records.select(tensor_name=name).column("dtype")))
        for name in ("input", "weight", "output", "grad_output", "grad_weight")
    }
    assert dtypes == {
        "input": ["float32"],
        "weight": ["float32"],
        "output": ["bfloat16"],
        "grad_output": ["bfloat16"],
        "grad_weight": ["float32"],
    }
    assert set(records.column("compute_dtype")) == {"bfloat16"}


def test_what_is_recorded_lies_inside_of_other_peoples_hooks(of: Of) -> None:
    records = {
        name: {record.tensor_name: record.tensor() for record in of("hooks_of_ones_own").select(module=f"*.{name}")}
        for name in "012"
    }
    first, second, third = (records[name] for name in "012")
    assert torch.equal(second["input"], 2 * first["output"])
    assert torch.equal(third["input"], second["output"] + 1)
    # A backward hook of the module stands between it and its input, a hook of the parameter behind it.
    torch.testing.assert_close(second["grad_input"], 3 * second["grad_output"] @ second["weight"])
    torch.testing.assert_close(second["grad_weight"], second["grad_output"].T @ second["input"])
    torch.testing.assert_close(first["grad_output"], 2 * second["grad_input"])


def test_the_names_of_wrappers_are_left_out(of: Of) -> None:
    assert {name.partition(".")[2] for name in of("wrapped").column("module")} == {"0.0", "1"}


def test_a_model_that_is_made_a_graph_of_is_recorded_as_before(of: Of) -> None:
    counts = verify_run(of("traced"))
    assert counts == Counter(
        {"output": 2, "grad_weight": 2, "grad_input": 1}
        | dict.fromkeys((f"attention {name}" for name in ("output", "grad_query", "grad_key", "grad_value")), 1)
    )
