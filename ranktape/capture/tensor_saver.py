"""Functions that save tensors by hand, with the names and arguments of the legacy tools.

Tensors are recorded into the running capture of the process. If there is none, and saving is enabled, a capture is
started at the save directory, which adds to the tensors that other processes and programs have saved there. Saved
tensors are committed when the next iteration starts, at `close`, and when the process exits in any way.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ranktape.capture import no_capture
from ranktape.capture.console import Console
from ranktape.capture.roles.table import UNSAMPLED
from ranktape.capture.session import Capture
from ranktape.capture.settings.cadence import ManualSchedule, Schedule
from ranktape.capture.settings.config import DEFAULT_SAVE_DIR, legacy_environment, resolve
from ranktape.capture.source import Source, TensorRole
from ranktape.errors import RanktapeError, UsageError
from ranktape.storage.format.record_info import Operation, check_term, recorded_name

if TYPE_CHECKING:
    import torch

    from ranktape.storage.format.progress import RunVerdict


class _OwnCapture(Capture):
    """The capture of a process that saves by hand, independent of other ranks. Records iterations with any tensor."""

    is_optional = True

    @property
    def is_running(self) -> bool:
        """Whether this is the running capture of this process."""
        return Capture.current is self and os.getpid() == self._owner

    def _find_place(self) -> None:
        super()._find_place()
        self._place = dataclasses.replace(self._place, world_size=1, first_rank=self._place.rank)

    def _new_schedule(self, words: Mapping[str, Any]) -> Schedule:
        return ManualSchedule(words, cadence=self.options.cadence)

    def _begin_iteration(self) -> None:
        """Do nothing, because an iteration starts with its first saved tensor."""

    def record(self, tensor: torch.Tensor, **about: Any) -> str | None:
        """See `Capture.record`."""
        if not self.is_watching:
            super()._begin_iteration()
        return super().record(tensor, **about)

    def close(self, *, reason: str | None = None, error: BaseException | None = None) -> RunVerdict:
        """See `Capture.close`. Also warns if something is missing."""
        is_first = self._verdict is None
        verdict = super().close(reason=reason, error=error)
        if is_first and not verdict.met:
            self._console.warn(verdict.message(), is_for_all_ranks=True)
        return verdict


class TensorSaver:
    """Saves tensors by hand into the running capture, or into a capture of its own at `save_dir`."""

    def __init__(self, save_dir: str = DEFAULT_SAVE_DIR, enabled: bool = True) -> None:  # noqa: FBT001, FBT002  (legacy signature)
        self.save_dir = save_dir
        self.enabled = enabled
        self.current_iteration = 0
        self._own: _OwnCapture | None = None
        self._numbered: Capture | None = None

    def set_iteration(self, iteration: int) -> None:
        """Set the number of the iteration, before anything is saved, or later to finish the earlier ones.

        Raises:
            UsageError: the number is less than the running iteration's.
        """
        if self._own is not None and iteration < self.current_iteration:
            raise UsageError(f"iteration {iteration} is past: the running one is {self.current_iteration}")
        self.current_iteration = iteration

    def save_tensor(  # noqa: PLR0917  (the legacy tools' arguments, in their order)
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
        """Record a tensor. Returns its future path, or None if the running iteration is not recorded.

        Raises:
            UsageError: a tag is not allowed, or the metadata cannot be stored as JSON.
            CaptureError: recording failed, and the capture is strict.
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
        # The legacy tools use the name `input` in the backward pass for the gradient of the output.
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

    def save_attention_tensors(  # noqa: PLR0917  (the legacy tools' arguments, in their order)
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
        """Record the given tensors of an attention. Returns their paths, by name."""
        tensors = {"query": query, "key": key, "value": value, "attention_weights": attention_weights}
        about = (layer_idx, phase, component, rank, metadata, sample_idx)
        return self._save_all(tensors, "attention", operation, quant_type, about)

    def save_linear_tensors(  # noqa: PLR0917  (the legacy tools' arguments, in their order)
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
        """Record the given tensors of a linear layer. Returns their paths, by name."""
        about = (layer_idx, phase, component, rank, metadata, sample_idx)
        return self._save_all({"input": input_tensor, "weight": weight}, "linear", operation, quant_type, about)

    def _save_all(
        self,
        tensors: Mapping[str, torch.Tensor | None],
        layer_type: str,
        operation: str,
        quant_type: str,
        about: tuple[Any, ...],
    ) -> dict[str, str | None]:
        return {
            name: self.save_tensor(tensor, layer_type, operation, quant_type, name, *about)
            for name, tensor in tensors.items()
            if tensor is not None
        }

    def close(self) -> None:
        """Close the saver's own capture after everything is stored. A capture of the program continues."""
        if self._own is not None and self._own.is_running:
            self._own.close()
        self._own = None

    def _capture(self) -> Capture | None:
        if Capture.current is None and self.enabled:
            self._begin()
            self._numbered = self._own
        elif Capture.current is None and no_capture.begin_waiting is not None:
            no_capture.begin_waiting(self.current_iteration)
            self._numbered = Capture.current
        numbered = self._numbered
        # An optimizer of the program may have finished iterations already.
        is_running = numbered is not None and Capture.current is numbered and not numbered.is_forked
        if numbered is not None and is_running and self.current_iteration > numbered.iteration:
            numbered.step(self.current_iteration)
        return Capture.current

    def _begin(self) -> None:
        settings = {"capture": self.save_dir, "manual": True, "first_iteration": self.current_iteration}
        resolved = resolve(settings, iteration=self.current_iteration)
        assert resolved is not None, "the directory is given"
        capture = _OwnCapture(self.save_dir, options=resolved[1])
        try:
            capture.__enter__()
        except UsageError:
            raise
        except RanktapeError as error:
            if capture.options.strict:
                raise
            # This often runs inside a forward pass, which must not fail because the store cannot be reached.
            self.enabled = False
            Console(rank=0).warn(f"{error}; nothing is saved")
            return
        self._own = capture
        atexit.register(self.close)


_saver: TensorSaver | None = None


def get_tensor_saver() -> TensorSaver:
    """The saver of the process. The first call creates it from environment variables.

    Raises:
        UsageError: the value of an environment variable is not allowed.
    """
    global _saver  # noqa: PLW0603  (one for each process, as programs expect)
    if _saver is None:
        is_enabled, save_dir, iteration = legacy_environment()
        _saver = TensorSaver(save_dir=save_dir, enabled=is_enabled)
        _saver.set_iteration(iteration)
    return _saver


def save_tensor(*args: Any, **kwargs: Any) -> str | None:
    """Call `TensorSaver.save_tensor` of the process's saver."""
    return get_tensor_saver().save_tensor(*args, **kwargs)


def save_attention_tensors(*args: Any, **kwargs: Any) -> dict[str, str | None]:
    """Call `TensorSaver.save_attention_tensors` of the process's saver."""
    return get_tensor_saver().save_attention_tensors(*args, **kwargs)


def save_linear_tensors(*args: Any, **kwargs: Any) -> dict[str, str | None]:
    """Call `TensorSaver.save_linear_tensors` of the process's saver."""
    return get_tensor_saver().save_linear_tensors(*args, **kwargs)


def _metadata_json(metadata: dict[str, Any] | None) -> str:
    try:
        return json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"metadata cannot be stored as JSON ({error}): give text, numbers, lists and dictionaries"
        ) from error
