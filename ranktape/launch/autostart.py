"""Begins a capture with the first training forward of a process, and ends it when the process does.

`ranktape_autoload` has every process wait for its training that imports torch where RANKTAPE_CAPTURE is set, and the
launcher the one that runs its script. A process that never trains stays as it is: an agent of torchrun, a loader of
data or a command of ours. By the variable the training goes on whatever goes wrong, and its exit code is its own;
under the launcher a capture that cannot begin is the end of it.
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
    complain,
    one_line,
    report,
    say,
    stand_aside,
)

if TYPE_CHECKING:
    from ranktape.capture.session import Capture
    from ranktape.capture.settings.options import CaptureOptions

_CONFIG = "RANKTAPE_CAPTURE_CONFIG"


class Order(NamedTuple):
    """What to record: the URL of the run with an absolute path, as it was given, and how."""

    url: str
    given_url: str
    options: CaptureOptions

    @classmethod
    def of(cls, url: str, options: CaptureOptions, *, folder: str, tag: str | None = None) -> Order:
        """What was asked for in a folder, of a training that computes in the precision of a tag."""
        if options.spill_dir:
            options = dataclasses.replace(options, spill_dir=absolute(folder, Path(options.spill_dir).expanduser()))
        if options.quant_type is None and tag is not None:
            options = dataclasses.replace(options, quant_type=tag)
        return cls(absolute(folder, url), url, options)

    def to_json(self) -> str:
        """As `LAUNCHED_WITH` has it: files and variables are read once, by the launcher."""
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
"""What waits for the training of this process."""


def arm() -> None:
    """Have the first training forward of this process begin a capture; called at the end of `import torch`."""
    global _start  # noqa: PLW0603  (one for each process)
    if OWNER in os.environ or _start is not None:
        return
    # The program may go elsewhere before it trains, each rank into a folder of its own.
    folder = os.getcwd()  # noqa: PTH109  (a text is what is joined with)
    arm_quantizer(lambda: _is_to_be_recorded(os.environ))
    _start = AutoStart(folder)
    if multiprocessing.parent_process() is None and LAUNCHED not in os.environ:
        atexit.register(_start.tell_of_evaluation)


def arm_launched(variables: Mapping[str, str]) -> AutoStart:
    """Set the variables that say what the launcher was asked for, and arm this process by them.

    The processes that the script starts find the same variables: its ranks are recorded and quantised, too. Those of a
    rank of torchrun are not.
    """
    import torch  # noqa: F401  (first: to import it with these variables is to arm the process)

    os.environ.update(variables)
    os.environ.pop(OWNER, None)
    arm()
    assert _start is not None, "this process has no owner"
    if "RANK" in os.environ:
        stand_aside()
    return _start


class AutoStart:
    """Waits for the training of this process, and begins its capture."""

    def __init__(self, folder: str) -> None:
        """Wait from now on; paths in the environment are relative to a folder."""
        from ranktape.capture import no_capture
        from ranktape.launch.standby import Standby

        self._ask = functools.partial(_ordered, folder)
        self.capture: Capture | None = None
        """What was begun."""
        self._failure: str | None = None
        self._first_iteration = 0
        self._is_saved_by_hand = False
        self._standby = Standby(begin=self._begin, is_wanted_in_eval=self._is_wanted_in_eval)
        no_capture.begin_waiting = self._begin_by_hand

    @property
    def has_seen_models(self) -> bool:
        """Whether any model has run in this process."""
        return self._standby.has_seen_models

    def explain_nothing(self) -> str:
        """Why no capture has begun in a process that has come to its end, and the way out."""
        if self._standby.has_evaluated:
            return "models ran, but none in training mode: --select mode=eval records inference"
        if self._failure is not None:
            return self._failure
        if self._standby.is_over:
            return "the script has begun a capture of its own: run it without the launcher"
        if self._is_saved_by_hand:
            return (
                "tensors were saved by hand on one of several ranks, and no training began: with TENSOR_SAVE_ENABLED="
                "true and TENSOR_SAVE_DIR in place of the launcher each rank saves for itself"
            )
        return "the process ended before its first training forward"

    def tell_of_evaluation(self) -> None:
        """Say so where models ran, none of them in training: nothing is recorded then without being asked for."""
        if not self._standby.is_over and self._standby.has_evaluated and _is_to_be_recorded(os.environ):
            say(f"nothing was recorded: {in_variables(self.explain_nothing())}")

    def _begin_by_hand(self, first_iteration: int) -> None:
        """Begin it before the training, of which there may be none: the script saves tensors itself."""
        from ranktape.capture.rendezvous import find_place

        # On one of several ranks the others need not do the same, and no rank begins without them.
        self._is_saved_by_hand = True
        if find_place().world_size == 1:
            self._first_iteration = first_iteration
            self._standby.end()

    def _begin(self) -> None:
        """Begin the capture that is asked for, unless this process is none to be recorded."""
        if not _is_to_be_recorded(os.environ):
            return
        # Not at the top, which runs with each import of torch.
        from ranktape.capture.settings.setting import SWITCH_WORDS

        stand_aside()
        is_launched = LAUNCHED in os.environ
        wording = str if is_launched else in_variables
        is_strict = is_launched or SWITCH_WORDS.get(os.environ.get("RANKTAPE_STRICT", "").strip().lower(), False)
        order: Order | None = None
        try:
            from ranktape.capture.session import Capture

            if Capture.current is not None and not Capture.current.yields:
                return  # the script has begun one of its own
            order = self._ask()
            if order is None:
                return
            options = order.options
            is_strict = is_launched or options.strict
            if not (options.start_at or options.first_iteration):
                first = self._first_iteration
                options = dataclasses.replace(options, start_at=first, first_iteration=first)
            capture = Capture(order.url, options=options)
            if not is_launched:
                capture.yields, capture.wording = True, in_variables
            capture.__enter__()
            if os.environ.get(LAUNCHED) != str(os.getpid()):
                _close_at_exit(capture, given_url=order.given_url)
            self.capture = capture
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  (nothing of ours ends a training)
            # What came too late is no mistake, and another start may find it in time: a training is not ended for it.
            if order is not None and isinstance(error, LateError):
                is_strict = order.options.strict
            text = str(error) if isinstance(error, RanktapeError) else f"{type(error).__name__}: {error}"
            self._failure = one_line(wording(text))
            _fail(error, self._failure, is_strict=is_strict)

    def _is_wanted_in_eval(self) -> bool:
        """Whether a pass in evaluation mode is to be recorded too; asked at the first one."""
        try:
            order = self._ask()
        except Exception:  # noqa: BLE001  (said when the training begins)
            return False
        return order is not None and "eval" in order.options.wanted_modes


def _ordered(folder: str) -> Order | None:
    """What the launcher or the environment asks to record, with paths from a folder; None for nothing."""
    from ranktape.capture.settings.config import resolve, stray_variables
    from ranktape.launch.options import Quantization

    if order := os.environ.get(LAUNCHED_WITH):
        return Order.from_json(order)
    environment = dict(os.environ)
    if config := environment.get(_CONFIG):
        environment[_CONFIG] = absolute(folder, Path(config.strip()).expanduser())
    found = resolve({}, environment=environment)
    if found is None:
        return None
    quantization = Quantization.read(environment, folder=Path(folder))
    # Of a command line a typing error is refused, too; here nobody watches while an expensive training records less.
    if stray := stray_variables():
        raise UsageError(stray[0])
    return Order.of(*found, folder=folder, tag=None if quantization is None else quantization.tag)


def absolute(folder: str, path: str | os.PathLike[str]) -> str:
    """A path as it is meant from a folder; a URL, and what is absolute, as it is."""
    text = os.fspath(path)
    # One with a slash too few is refused by its own words.
    is_url = re.match(r"[A-Za-z][A-Za-z0-9+.:-]*:/", text) is not None
    return text if is_url else os.path.join(folder, text)  # noqa: PTH118  (pathlib takes a final slash away)


def _is_to_be_recorded(environment: Mapping[str, str]) -> bool:
    if environment.get(OWNER, str(os.getpid())) != str(os.getpid()):
        return False
    if environment.get(LAUNCHED, str(os.getpid())) != str(os.getpid()):
        from ranktape.capture.rendezvous import find_place

        # Of what the launcher's script starts, only the ranks of a training are recorded.
        if find_place().world_size == 1:
            return False
    if "_pytest" in sys.modules and "PYTEST_CURRENT_TEST" in environment:
        return False  # the tests of somebody whose shell has the variable
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
        if not _is_said_by_rank_0(error, text=text):
            complain(f"{text}; the training goes on without a capture")
        return
    report(text)
    if threading.current_thread() is not threading.main_thread():
        raise error
    raise SystemExit(error.exit_code if isinstance(error, RanktapeError) else 1) from error


def _is_said_by_rank_0(error: BaseException, *, text: str) -> bool:
    """Whether another rank has said already why there is no capture; rank 0 lets the others know that it says so."""
    if isinstance(error, FailedElsewhereError):
        return True
    if isinstance(error, LateError):
        return False
    # Where the ranks cannot meet, each of them speaks for itself.
    with contextlib.suppress(Exception):
        from ranktape.capture.rendezvous import Rendezvous, find_place

        place = find_place()
        if place.world_size > 1:
            meeting = Rendezvous(place, seconds=HEAD_START_SECONDS)
            if place.rank == 0:
                meeting.report_failure(text)
                return False
            try:
                meeting.wait(lambda: False, seconds=HEAD_START_SECONDS)
            except FailedElsewhereError:
                return True
            meeting.give_up(text)
    return False


def _close_at_exit(capture: Capture, *, given_url: str) -> None:
    """End the capture when the process ends, and say then what is missing."""
    owner, shown_before = os.getpid(), getattr(sys, "last_value", None)
    is_child = multiprocessing.parent_process() is not None

    def close() -> None:
        from ranktape.capture.session import Capture

        if os.getpid() != owner or Capture.current is not capture:
            return
        # An exit code that is not 0 is known nowhere: it is the process's own.
        error: Any = sys.exc_info()[1] if is_child else getattr(sys, "last_value", None)
        error = None if error is shown_before else error
        reason = failure_reason(error)
        try:
            try:
                verdict = capture.close(reason=reason, error=error)
            except KeyboardInterrupt:
                verdict = capture.close()
            # The launcher says so itself.
            if reason is None and not verdict.met and LAUNCHED not in os.environ:
                from ranktape.launch.place import shown

                command = f"'ranktape status {shown(given_url)} --require-minimum' tells a shell"
                say(f"{in_variables(verdict.message())} ({command})")
        except BaseException as failure:  # noqa: BLE001  (the training has ended well, and says so by its exit code)
            complain(one_line(f"the capture did not end well: {failure}"))

    if is_child:
        # A forked process runs no handlers of `atexit`.
        multiprocessing.util.Finalize(None, close, exitpriority=100)
    else:
        atexit.register(close)


def failure_reason(error: BaseException | None) -> str | None:
    """Why the capture ends where the training failed; None where it did not."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return None
    if isinstance(error, RanktapeError):
        return str(error)  # a strict capture has ended the training itself
    if isinstance(error, SystemExit) and error.__cause__ is None:
        return f"the training failed (exit code {error.code})"
    cause = error.__cause__ if isinstance(error, SystemExit) else error
    return f"the training failed ({type(cause).__name__})"
