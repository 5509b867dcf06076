"""Selects tensors in the training process, copies them to a writer process, and coordinates the ranks."""

from typing import TYPE_CHECKING

from ranktape.lazy_names import public_names

if TYPE_CHECKING:
    from ranktape.capture.hooks.states import get_layer_hidden_states as get_layer_hidden_states
    from ranktape.capture.hooks.states import tap_layers as tap_layers
    from ranktape.capture.roles.known import register_role as register_role
    from ranktape.capture.roles.known import unregister_role as unregister_role
    from ranktape.capture.roles.table import CallOption as CallOption
    from ranktape.capture.roles.table import FunctionRole as FunctionRole
    from ranktape.capture.roles.table import ModuleRole as ModuleRole
    from ranktape.capture.session import Capture as Capture
    from ranktape.capture.settings.config import add_arguments as add_arguments
    from ranktape.capture.settings.options import CaptureOptions as CaptureOptions
    from ranktape.capture.tensor_saver import TensorSaver as TensorSaver
    from ranktape.capture.tensor_saver import get_tensor_saver as get_tensor_saver
    from ranktape.capture.tensor_saver import save_attention_tensors as save_attention_tensors
    from ranktape.capture.tensor_saver import save_linear_tensors as save_linear_tensors
    from ranktape.capture.tensor_saver import save_tensor as save_tensor
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
