"""Is each private name of torch what it is taken for? A failure says what breaks with it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ranktape.capture import torch_private as private


def test_a_backward_pass_is_known_by_its_number() -> None:
    """Else recomputation is recorded as another call, and gradients go to the wrong call."""
    seen: list[int] = []
    tensor = torch.ones(2, requires_grad=True)

    def run(given: torch.Tensor) -> torch.Tensor:
        seen.append(private.current_graph_task_id())
        return given.sin()

    checkpoint(run, tensor, use_reentrant=False).sum().backward()
    assert seen[0] == -1 == private.current_graph_task_id()
    assert seen[1] >= 0


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_fake_tensors_and_traced_modules_are_known() -> None:
    """Else a graph that is exported or traced has our hooks in it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert private.get_dispatch_mode(private.FAKE) is None
    with FakeTensorMode() as mode:
        assert private.get_dispatch_mode(private.FAKE) is mode
    found: list[object] = []

    def look(given: torch.Tensor) -> torch.Tensor:
        found.append(private.get_tracing_state())
        return given + 1

    torch.jit.trace(look, torch.ones(1))
    assert found[0] is not None
    assert private.get_tracing_state() is None


def test_transforms_of_torch_func_are_known() -> None:
    """Else tensors that stand for many, or for none, are recorded as values."""
    levels: list[tuple[int | None, bool, bool]] = []

    def look(given: torch.Tensor) -> torch.Tensor:
        kinds = private.is_transformed_tensor(given), private.is_batched_tensor(given)
        levels.append((private.transform_level(), *kinds))
        assert private.untransformed(given).shape == (3,)
        return given * 2

    torch.func.vmap(look)(torch.ones(3))
    torch.func.grad(lambda given: look(given).sum())(torch.ones(3))
    assert [(level is not None, *kinds) for level, *kinds in levels] == [(True, True, True), (True, True, False)]
    assert private.transform_level() is None


def test_the_stack_of_modes_is_read_and_written() -> None:
    """Else no function is seen, or a mode of the training is lost."""

    class Mode(TorchFunctionMode):
        pass

    mode = Mode()
    with torch.device("cpu"), mode:
        assert private.num_modes() == 2
        assert not private.is_default_device(private.mode_at(0))
        assert private.mode_at(1) is private.pop_mode()
        private.push_mode(mode)
    assert private.num_modes() == 0
    torch.set_default_device("cpu")
    assert private.is_default_device(private.mode_at(0))
    torch.set_default_device(None)
    assert private.num_modes() == 0


def test_functions_of_torch_are_found_though_others_stand_in_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the product that a function of the program's own computes is not seen."""
    own = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", print)
    assert private.functional("linear") is own
    assert private.functional("embedding") is None


def test_a_tensor_says_what_it_is_a_view_of_and_how_often_it_was_written_to() -> None:
    """Else a weight is recorded again and again, or not after it has changed."""
    tensor = torch.zeros(4)
    view = tensor.view(2, 2)
    before = private.version_of(tensor)
    view.add_(1)
    assert private.version_of(tensor) == before + 1
    assert private.base_of(view) is tensor
    assert private.base_of(tensor) is None
    assert private.storage_id(view) == private.storage_id(tensor) != private.storage_id(tensor.clone())
    with torch.inference_mode():
        assert private.version_of(torch.zeros(1)) == 0


def test_parameters_are_read_without_a_parametrization() -> None:
    """Else a parametrized weight is computed when it is looked at."""
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert list(private.parameters_of(layer)) == ["bias"]
    handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    assert handle.id in private.global_forward_pre_hooks()
    handle.remove()


def test_hooks_that_pack_what_autograd_saves_are_known() -> None:
    """Else the gradients of an output are recorded as if they were computed with what was recorded."""
    assert private.saved_tensors_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(copy.copy, copy.copy):
        assert private.saved_tensors_hooks() == (copy.copy, copy.copy)


def test_subclasses_without_a_dispatch_are_known() -> None:
    """Else a subclass's storage is recorded, though its values are elsewhere."""
    from torch.distributed.tensor import DTensor

    assert torch.Tensor.__torch_dispatch__ is private.NO_DISPATCH
    assert DTensor.__torch_dispatch__ is not private.NO_DISPATCH
    assert not private.is_functional_tensor(torch.ones(1))
    with private.without_torch_function():
        assert torch.ones(1).sum() == 1


def test_calls_of_modules_and_of_backward_functions_have_a_known_code() -> None:
    """Else the keyword arguments of a call, and nested backward passes, are not found on Python's stack."""
    import sys

    found = []

    class Looking(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            frame: Any = sys._getframe()
            while frame is not None:
                found.append(frame.f_code)
                frame = frame.f_back
            return given

    Looking()(torch.ones(1))
    assert private.MODULE_CALL in found


def test_an_error_of_a_device_is_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch 2.6 and 2.7, which have no class for it, fail where a device fails."""
    if hasattr(torch, "AcceleratorError"):
        assert private.is_accelerator_error(torch.AcceleratorError("CUDA error: out of luck"))
        assert not private.is_accelerator_error(RuntimeError("CUDA error: of another kind"))
        monkeypatch.delattr(torch, "AcceleratorError")
    assert private.is_accelerator_error(RuntimeError("CUDA error: device-side assert triggered"))
    assert not private.is_accelerator_error(RuntimeError("Triton found no C compiler"))
    assert not private.is_accelerator_error(ValueError("CUDA error: no"))


def test_hooks_parts_and_compiled_calls_of_a_module_are_its_own() -> None:
    """Else hooks stay on that a changed module needs anew, or a compiled model trains before its capture begins."""
    inner, outer = nn.Linear(2, 2), nn.Sequential(nn.ReLU())
    outer.append(inner)
    pre, post = inner.register_forward_pre_hook(lambda *_: None), inner.register_forward_hook(lambda *_: None)
    assert list(private.forward_pre_hooks_of(inner)) == [pre.id]
    assert list(private.forward_hooks_of(inner)) == [post.id]
    assert private.modules_of(outer)["1"] is inner
    assert private.compiled_call_of(inner) is None
    private.set_compiled_call(inner, lambda given: given + 1)
    assert inner(torch.zeros(1)).item() == 1
    private.set_compiled_call(inner, None)
    assert inner(torch.zeros(1, 2)).shape == (1, 2)


def test_a_function_is_called_when_the_backward_pass_ends() -> None:
    """Else an optimizer that steps in the backward pass ends no iteration, or ends it before the last gradients."""
    tensor, calls = torch.ones(2, requires_grad=True), []
    doubled = tensor * 2
    doubled.register_hook(lambda _: private.call_at_backward_end(lambda: calls.append(tensor.grad)))
    doubled.sum().backward()
    assert [call.tolist() for call in calls if call is not None] == [[2.0, 2.0]]


def test_an_operator_with_an_effect_stays_in_graphs() -> None:
    """Else the outputs of layers are lost in compiled code, whose graph nothing else reads them from."""
    from torch._higher_order_ops.effects import _get_effect

    with torch.library._scoped_library("ranktape_test", "DEF") as library:
        library.define("look(Tensor given) -> ()")
        operator = torch.ops.ranktape_test.look.default
        assert _get_effect(operator) is None
        private.keep_in_graphs(operator)
        assert _get_effect(operator) is not None
