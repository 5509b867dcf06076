"""Starts a capture with the first training forward of a process, and closes it when the process exits.

If RANKTAPE_CAPTURE is set, `ranktape_autoload` arms every process that imports torch. The launcher arms the process
that runs its script. A process that never trains is not affected, such as an agent of torchrun, a data loader or a
`ranktape` command. With the variable, errors of the capture affect neither the training nor its exit code. Under the
launcher, a capture that cannot start ends the training.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import multiprocessing.util
import os
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ranktape.errors import FailedElsewhereError, LateError, RanktapeError, UsageError
from ranktape.launch.quantizing import arm_quantizer
from ranktape.launch.worker import (
    HEAD_START_SECONDS,
    LAUNCHED,
    LAUNCHED_WITH,
    OWNER,
    disable_autostart,
    print_error,
    report,
    say,
    to_one_line,
)

if TYPE_CHECKING:
    from ranktape.capture.session import Capture
    from ranktape.capture.settings.options import CaptureOptions

_CONFIG = "RANKTAPE_CAPTURE_CONFIG"


class Order(NamedTuple):
    """What to record: the URL of the run with an absolute path, the URL as it was given, and the options."""

    url: str
    given_url: str
    options: CaptureOptions

    @classmethod
    def of(cls, url: str, options: CaptureOptions, *, folder: str, tag: str | None = None) -> Order:
        """The order for paths relative to a folder; `tag` is the default `quant_type`, if given."""
        if options.spill_dir:
            options = dataclasses.replace(options, spill_dir=absolute(folder, Path(options.spill_dir).expanduser()))
        if options.quant_type is None and tag is not None:
            options = dataclasses.replace(options, quant_type=tag)
        return cls(absolute(folder, url), url, options)

    def to_json(self) -> str:
        """The value of `LAUNCHED_WITH`, so that only the launcher reads files and variables."""
        from ranktape.capture.settings.setting import is_given

        settings = {name: value for name, value in self.options.plain().items() if is_given(value)}
        return json.dumps([self.url, self.given_url, settings])

    @classmethod
    def from_json(cls, text: str) -> Order:
        """The inverse of `to_json`."""
        from ranktape.capture.settings.config import given_settings
        from ranktape.capture.settings.options import CaptureOptions

        url, given_url, settings = json.loads(text)
        return cls(url, given_url, CaptureOptions(**{**settings, **given_settings(settings)}))


_start: AutoStart | None = None
"""The `AutoStart` of this process; None if it is not armed."""


def arm() -> None:
    """Start a capture with the first training forward of this process; called at the end of `import torch`."""
    global _start  # noqa: PLW0603  (one for each process)
    if OWNER in os.environ or _start is not None:
        return
    # The program may change its working directory before it trains, on each rank to another one.
    folder = os.getcwd()  # noqa: PTH109  (paths are joined as text)
    arm_quantizer(lambda: _may_record(os.environ))
    _start = AutoStart(folder)
    if multiprocessing.parent_process() is None and LAUNCHED not in os.environ:
        atexit.register(_start.report_evaluation)


def arm_launched(variables: Mapping[str, str]) -> AutoStart:
    """Set the variables for what the launcher was told to do, and arm this process.

    The processes that the script starts inherit them, so that ranks that it starts are recorded and quantised too. The
    processes that a rank of torchrun starts are not.
    """
    import torch  # noqa: F401  (first, because importing it with these variables would arm the process)

    os.environ.update(variables)
    os.environ.pop(OWNER, None)
    arm()
    assert _start is not None, "this process has no owner"
    if "RANK" in os.environ:
        disable_autostart()
    return _start


class AutoStart:
    """Waits for the training of this process, and starts its capture."""

    def __init__(self, folder: str) -> None:
        """Start to wait; paths in the environment are relative to `folder`."""
        from ranktape.capture import no_capture
        from ranktape.launch.standby import Standby

        self._read_order = functools.partial(_read_order, folder)
        self.capture: Capture | None = None
        """The capture; None if none has started."""
        self._failure: str | None = None
        self._first_iteration = 0
        self._is_saved_by_hand = False
        self._standby = Standby(begin=self._begin, is_wanted_in_eval=self._is_wanted_in_eval)
        no_capture.begin_waiting = self._begin_by_hand

    @property
    def has_seen_models(self) -> bool:
        """Whether any model has run in this process."""
        return self._standby.has_seen_models

    def why_not_started(self) -> str:
        """Why no capture has started in a process that is ending, and what to do about it."""
        if self._standby.has_evaluated:
            return "models ran, but none in training mode: --select mode=eval records inference"
        if self._failure is not None:
            return self._failure
        if self._standby.is_over:
            return "the script has started a capture itself: run it without the launcher"
        if self._is_saved_by_hand:
            return (
                "the script saved tensors itself on several ranks, and no training started: set TENSOR_SAVE_ENABLED="
                "true and TENSOR_SAVE_DIR instead of using the launcher, so that each rank saves its own tensors"
            )
        return "the process ended before its first training forward"

    def report_evaluation(self) -> None:
        """Print that nothing was recorded, if models ran only in evaluation mode."""
        if not self._standby.is_over and self._standby.has_evaluated and _may_record(os.environ):
            say(f"nothing was recorded: {in_variables(self.why_not_started())}")

    def _begin_by_hand(self, first_iteration: int) -> None:
        """Start the capture without a training, because the script saves tensors itself."""
        from ranktape.capture.rendezvous import find_place

        # Not on one of several ranks: the others may not save any, and no rank can start without them.
        self._is_saved_by_hand = True
        if find_place().world_size == 1:
            self._first_iteration = first_iteration
            self._standby.end()

    def _begin(self) -> None:
        """Start the requested capture, unless this process is not to be recorded."""
        if not _may_record(os.environ):
            return
        # Not at the top, because this module is imported with torch.
        from ranktape.capture.settings.setting import SWITCH_WORDS

        disable_autostart()
        is_launched = LAUNCHED in os.environ
        wording = str if is_launched else in_variables
        is_strict = is_launched or SWITCH_WORDS.get(os.environ.get("RANKTAPE_STRICT", "").strip().lower(), False)
        order: Order | None = None
        try:
            from ranktape.capture.session import Capture

            if Capture.current is not None and not Capture.current.is_optional:
                return  # the script has started its own
            order = self._read_order()
            if order is None:
                return
            options = order.options
            is_strict = is_launched or options.strict
            if not (options.start_at or options.first_iteration):
                first = self._first_iteration
                options = dataclasses.replace(options, start_at=first, first_iteration=first)
            capture = Capture(order.url, options=options)
            if not is_launched:
                capture.is_optional, capture.wording = True, in_variables
            capture.__enter__()
            if os.environ.get(LAUNCHED) != str(os.getpid()):
                _close_at_exit(capture, given_url=order.given_url)
            self.capture = capture
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  (errors of the capture do not end a training)
            # A late rank is not a mistake of the user, so the launcher does not end the training for it by default.
            if order is not None and isinstance(error, LateError):
                is_strict = order.options.strict
            text = str(error) if isinstance(error, RanktapeError) else f"{type(error).__name__}: {error}"
            self._failure = to_one_line(wording(text))
            _fail(error, self._failure, is_strict=is_strict)

    def _is_wanted_in_eval(self) -> bool:
        """Whether passes in evaluation mode are recorded too; called at the first one."""
        try:
            order = self._read_order()
        except Exception:  # noqa: BLE001  (reported when the training starts)
            return False
        return order is not None and "eval" in order.options.wanted_modes


def _read_order(folder: str) -> Order | None:
    """The order of the launcher or the environment, with paths relative to a folder; None if nothing is requested."""
    from ranktape.capture.settings.config import resolve, stray_variables
    from ranktape.launch.options import Quantization

    if order := os.environ.get(LAUNCHED_WITH):
        return Order.from_json(order)
    environment = dict(os.environ)
    if config := environment.get(_CONFIG):
        environment[_CONFIG] = absolute(folder, Path(config.strip()).expanduser())
    resolved = resolve({}, environment=environment)
    if resolved is None:
        return None
    quantization = Quantization.read(environment, folder=Path(folder))
    # An unknown variable is refused like an unknown option, so that a typing error does not go unnoticed.
    if stray := stray_variables():
        raise UsageError(stray[0])
    return Order.of(*resolved, folder=folder, tag=None if quantization is None else quantization.tag)


def absolute(folder: str, path: str | os.PathLike[str]) -> str:
    """A path relative to a folder as an absolute path; URLs and absolute paths are unchanged."""
    text = os.fspath(path)
    # A URL with one slash too few is unchanged too, and refused later.
    is_url = re.match(r"[A-Za-z][A-Za-z0-9+.:-]*:/", text) is not None
    return text if is_url else os.path.join(folder, text)  # noqa: PTH118  (pathlib removes a final slash)


def _may_record(environment: Mapping[str, str]) -> bool:
    if environment.get(OWNER, str(os.getpid())) != str(os.getpid()):
        return False
    if environment.get(LAUNCHED, str(os.getpid())) != str(os.getpid()):
        from ranktape.capture.rendezvous import find_place

        # Of the processes that the launcher's script starts, only the ranks of a training are recorded.
        if find_place().world_size == 1:
            return False
    if "_pytest" in sys.modules and "PYTEST_CURRENT_TEST" in environment:
        return False  # a user's tests in a shell that has the variable
    data = sys.modules.get("torch.utils.data")
    return data is None or data.get_worker_info() is None


def in_variables(text: str) -> str:
    """A message that names options by their variables: RANKTAPE_RESUME=true for --resume."""
    from ranktape.capture.settings.options import SETTINGS

    variables = {setting.flag: setting.variable + ("=true" if setting.kind is bool else "") for setting in SETTINGS} | {
        "--capture-config": _CONFIG
    }
    return re.sub(r"--[a-z-]+", lambda flag: variables.get(flag[0], flag[0]), text)


def _fail(error: BaseException, text: str, *, is_strict: bool) -> None:
    if not is_strict:
        if not _is_reported_by_rank_0(error, text=text):
            print_error(f"{text}; the training continues without a capture")
        return
    report(text)
    if threading.current_thread() is not threading.main_thread():
        raise error
    raise SystemExit(error.exit_code if isinstance(error, RanktapeError) else 1) from error


def _is_reported_by_rank_0(error: BaseException, *, text: str) -> bool:
    """Whether rank 0 reports why there is no capture, so that this rank need not; rank 0 announces it to the others."""
    if isinstance(error, FailedElsewhereError):
        return True
    if isinstance(error, LateError):
        return False
    # If the ranks cannot meet, each of them reports it.
    with contextlib.suppress(Exception):
        from ranktape.capture.rendezvous import Rendezvous, find_place

        place = find_place()
        if place.world_size > 1:
            rendezvous = Rendezvous(place, seconds=HEAD_START_SECONDS)
            if place.rank == 0:
                rendezvous.report_failure(text)
                return False
            try:
                rendezvous.wait(lambda: False, seconds=HEAD_START_SECONDS)
            except FailedElsewhereError:
                return True
            rendezvous.give_up(text)
    return False


def _close_at_exit(capture: Capture, *, given_url: str) -> None:
    """Close the capture when the process exits, and report what is missing."""
    owner, earlier_error = os.getpid(), getattr(sys, "last_value", None)
    is_child = multiprocessing.parent_process() is not None

    def close() -> None:
        from ranktape.capture.session import Capture

        if os.getpid() != owner or Capture.current is not capture:
            return
        # The exit code of the process is not available here, only its last exception.
        error: Any = sys.exc_info()[1] if is_child else getattr(sys, "last_value", None)
        error = None if error is earlier_error else error
        reason = failure_reason(error)
        try:
            try:
                verdict = capture.close(reason=reason, error=error)
            except KeyboardInterrupt:
                verdict = capture.close()
            # The launcher reports this itself.
            if reason is None and not verdict.met and LAUNCHED not in os.environ:
                from ranktape.launch.place import shown

                command = f"'ranktape status {shown(given_url)} --require-minimum' gives the exit code of the run"
                say(f"{in_variables(verdict.message())} ({command})")
        except BaseException as failure:  # noqa: BLE001  (the exit code of the training does not change)
            print_error(to_one_line(f"the capture failed while it ended: {failure}"))

    if is_child:
        # A forked process runs no `atexit` handlers.
        multiprocessing.util.Finalize(None, close, exitpriority=100)
    else:
        atexit.register(close)


def failure_reason(error: BaseException | None) -> str | None:
    """Why the training failed, as the reason for the end of the capture; None if it did not fail."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return None
    if isinstance(error, RanktapeError):
        return str(error)  # a strict capture has ended the training
    if isinstance(error, SystemExit) and error.__cause__ is None:
        return f"the training failed (exit code {error.code})"
    cause = error.__cause__ if isinstance(error, SystemExit) else error
    return f"the training failed ({type(cause).__name__})"
