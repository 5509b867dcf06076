"""How do programs that save tensors by hand, as the older tools had it, record with us?

The names and arguments are theirs. Tensors go into the capture that is running in the process; where none
is, and saving was enabled, one is begun at the save directory and closed when the process ends. Nothing is
overwritten, nothing blocks on a disk, and the iteration is committed as a whole.
"""

from __future__ import annotations

import atexit
import json
import warnings
from typing import TYPE_CHECKING, Any

from ranktape.capture.roles.table import UNSAMPLED
from ranktape.capture.session import Capture
from ranktape.capture.settings.seed_environment import DEFAULT_SAVE_DIR, read_seed_environment
from ranktape.capture.source import Source, TensorRole
from ranktape.errors import RunExistsError, UsageError
from ranktape.storage.record import Operation, check_term
from ranktape.storage.seed_names import recorded_name

if TYPE_CHECKING:
    import torch


class TensorSaver:
    """Saves tensors by hand into the capture that is running, or into one of its own at `save_dir`."""

    def __init__(self, save_dir: str = DEFAULT_SAVE_DIR, enabled: bool = True) -> None:  # noqa: FBT001, FBT002  (theirs)
        self.save_dir = save_dir
        self.enabled = enabled
        self.current_iteration = 0
        self._own: Capture | None = None

    def set_iteration(self, iteration: int) -> None:
        """Number the iteration: the first one before anything is saved, a later one to end those before it.

        Raises:
            UsageError: the number is below that of the running iteration.
        """
        if self._own is not None and iteration < self.current_iteration:
            raise UsageError(f"iteration {iteration} is past: the running one is {self.current_iteration}")
        # An optimizer of the program may have ended iterations before.
        if self._own is not None and iteration > self._own.iteration:
            self._own.step(iteration)
        self.current_iteration = iteration

    def save_tensor(  # noqa: PLR0917  (the seeds' arguments, in their order)
        self,
        tensor: torch.Tensor,
        layer_type: str,
        operation: str,
        quant_type: str,
        tensor_name: str,
        layer_idx: int | None = None,
        phase: str = "unknown",
        component: str = "unknown",
        rank: int | None = None,
        metadata: dict[str, Any] | None = None,
        sample_idx: int | None = None,
    ) -> str | None:
        """Record one tensor; the path it will have, or None where the running iteration is not recorded.

        Raises:
            UsageError: a tag is not allowed, or the metadata is not JSON.
            RanktapeError: a capture of its own cannot be begun.
        """
        capture = self._capture()
        if capture is None:
            return None
        if operation not in set(Operation):
            raise UsageError(f"operation={operation!r} is not allowed: give 'forward' or 'backward'")
        if rank is not None and rank != capture.rank:
            warnings.warn(
                f"rank={rank} was given, and this process is rank {capture.rank}: recorded under that", stacklevel=2
            )
        source = Source(
            module="",
            layer_type=check_term(layer_type, field="layer_type"),
            layer_idx=-1 if layer_idx is None else layer_idx,
            component=check_term(component, field="component"),
        )
        # What they call the backward pass's input is the gradient of the output.
        name = recorded_name(
            check_term(tensor_name, field="tensor_name"),
            operation=Operation(operation),
            layer_type=layer_type,
            component=component,
            phase=phase,
        )
        role = TensorRole(
            operation=Operation(operation),
            phase=check_term(phase, field="phase"),
            tensor_name=name,
            has_samples=name not in UNSAMPLED,
        )
        return capture.record(
            tensor,
            source=source,
            role=role,
            quant_type=check_term(quant_type, field="quant_type"),
            sample_idx=sample_idx,
            metadata=_metadata_json(metadata),
        )

    def save_attention_tensors(  # noqa: PLR0917  (the seeds' arguments, in their order)
        self,
        query: torch.Tensor | None,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        quant_type: str,
        operation: str = "forward",
        layer_idx: int | None = None,
        phase: str = "pre",
        component: str = "FA",
        rank: int | None = None,
        attention_weights: torch.Tensor | None = None,
        metadata: dict[str, Any] | None = None,
        sample_idx: int | None = None,
    ) -> dict[str, str | None]:
        """Record the tensors of an attention that are given; their paths by name."""
        tensors = {"query": query, "key": key, "value": value, "attention_weights": attention_weights}
        return {
            name: self.save_tensor(
                tensor,
                "attention",
                operation,
                quant_type,
                name,
                layer_idx,
                phase,
                component,
                rank,
                metadata,
                sample_idx,
            )
            for name, tensor in tensors.items()
            if tensor is not None
        }

    def save_linear_tensors(  # noqa: PLR0917  (the seeds' arguments, in their order)
        self,
        input_tensor: torch.Tensor | None,
        weight: torch.Tensor | None,
        quant_type: str,
        operation: str = "forward",
        layer_idx: int | None = None,
        phase: str = "pre",
        component: str = "linear",
        rank: int | None = None,
        metadata: dict[str, Any] | None = None,
        sample_idx: int | None = None,
    ) -> dict[str, str | None]:
        """Record the tensors of a linear layer that are given; their paths by name."""
        tensors = {"input": input_tensor, "weight": weight}
        return {
            name: self.save_tensor(
                tensor, "linear", operation, quant_type, name, layer_idx, phase, component, rank, metadata, sample_idx
            )
            for name, tensor in tensors.items()
            if tensor is not None
        }

    def close(self) -> None:
        """End a capture of its own, once everything is stored; the running one of somebody else goes on."""
        if self._own is not None and Capture.current is self._own:
            self._own.close()
        self._own = None

    def _capture(self) -> Capture | None:
        if Capture.current is None and self.enabled and self._own is None:
            number = self.current_iteration
            self._own = Capture(self.save_dir, start=number, first_iteration=number, manual=True)
            try:
                self._own.__enter__()
            except RunExistsError as error:
                self._own = None
                raise RunExistsError(
                    f"there is a run at {self.save_dir} already: set TENSOR_SAVE_DIR to another place, or remove it"
                ) from error
            atexit.register(self.close)
        return Capture.current


_saver: TensorSaver | None = None


def get_tensor_saver() -> TensorSaver:
    """The saver of the process, made from the environment when it is first asked for.

    Raises:
        UsageError: a variable of the environment has a value that it cannot have.
    """
    global _saver  # noqa: PLW0603  (one for each process, as programs expect)
    if _saver is None:
        environment = read_seed_environment()
        _saver = TensorSaver(save_dir=environment.save_dir, enabled=environment.enabled)
        _saver.set_iteration(environment.iteration)
    return _saver


def save_tensor(*args: Any, **kwargs: Any) -> str | None:
    """`TensorSaver.save_tensor` of the process's saver."""
    return get_tensor_saver().save_tensor(*args, **kwargs)


def save_attention_tensors(*args: Any, **kwargs: Any) -> dict[str, str | None]:
    """`TensorSaver.save_attention_tensors` of the process's saver."""
    return get_tensor_saver().save_attention_tensors(*args, **kwargs)


def save_linear_tensors(*args: Any, **kwargs: Any) -> dict[str, str | None]:
    """`TensorSaver.save_linear_tensors` of the process's saver."""
    return get_tensor_saver().save_linear_tensors(*args, **kwargs)


def _metadata_json(metadata: dict[str, Any] | None) -> str:
    try:
        return json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"metadata cannot be stored as JSON ({error}): give text, numbers, lists and dictionaries"
        ) from error
