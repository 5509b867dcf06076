"""Choose tensors inside the training process, copy them off, and agree with every rank on the iterations."""

from typing import TYPE_CHECKING

from ranktape import public_names

if TYPE_CHECKING:
    from ranktape.capture.options import CaptureOptions as CaptureOptions
    from ranktape.capture.options import add_arguments as add_arguments
    from ranktape.capture.session import Capture as Capture
    from ranktape.capture.tensor_saver import TensorSaver as TensorSaver
    from ranktape.capture.tensor_saver import get_tensor_saver as get_tensor_saver
    from ranktape.capture.tensor_saver import save_attention_tensors as save_attention_tensors
    from ranktape.capture.tensor_saver import save_linear_tensors as save_linear_tensors
    from ranktape.capture.tensor_saver import save_tensor as save_tensor
else:
    __all__, __getattr__, __dir__ = public_names(
        __name__,
        homes={
            "options": ["CaptureOptions", "add_arguments"],
            "session": ["Capture"],
            "tensor_saver": [
                "TensorSaver",
                "get_tensor_saver",
                "save_attention_tensors",
                "save_linear_tensors",
                "save_tensor",
            ],
        },
    )
