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
import json
import multiprocessing
import multiprocessing.util
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from ranktape.errors import CaptureError, FailedElsewhereError, LateError, RanktapeError, UsageError
from ranktape.launch.quantization import Quantization
from ranktape.launch.quantizing import arm_quantizer
from ranktape.launch.worker import HEAD_START_SECONDS, LAUNCHED, OWNER, complain, one_line, report, say, stand_aside

if TYPE_CHECKING:
    from types import TracebackType

    from ranktape.capture.session import Capture

_CONFIG = "RANKTAPE_CAPTURE_CONFIG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to record."""

    url: str
    """Of the run, with an absolute path."""
    given_url: str
    """The same as it was given."""
    settings: dict[str, Any]
    """Every setting of the capture."""
    launcher_pid: int | None = None
    """The launcher's process; None where a variable asked."""

    @classmethod
    def from_settings(
        cls, url: str, settings: Mapping[str, Any], *, folder: str, launcher_pid: int | None = None
    ) -> Self:
        """As `resolve` gives them, with the paths of the settings from a folder."""
        spill_dir = settings["spill_dir"]
        absolute = {"spill_dir": _from(folder, Path(spill_dir).expanduser())} if spill_dir else {}
        return cls(url=_from(folder, url), given_url=url, settings={**settings, **absolute}, launcher_pid=launcher_pid)

    @property
    def is_strict(self) -> bool:
        """Whether a capture that cannot begin is the end of the training."""
        return self.launcher_pid is not None or bool(self.settings["strict"])


def arm() -> None:
    """Have the first training forward of this process begin a capture; called at the end of `import torch`."""
    if OWNER in os.environ:
        return
    # The program may go elsewhere before it trains, each rank into a folder of its own.
    folder = os.getcwd()  # noqa: PTH109  (a text is what is joined with)
    arm_quantizer(lambda: _is_to_be_recorded(os.environ))
    start = AutoStart(lambda: _ordered(folder))
    if multiprocessing.parent_process() is None and LAUNCHED not in os.environ:
        atexit.register(start.tell_of_evaluation)


class AutoStart:
    """Waits for the training of this process, and begins its capture."""

    def __init__(self, ask: Callable[[], Order | None]) -> None:
        """Wait from now on.

        Args:
            ask: Says when the training begins what to record; None for nothing.
        """
        from ranktape.capture import awaited
        from ranktape.launch.standby import Standby

        self._ask = ask
        self.capture: Capture | None = None
        """What was begun."""
        self._failure: str | None = None
        self._first_iteration = 0
        self._is_saved_by_hand = False
        self._standby = Standby(begin=self._begin, is_wanted_in_eval=self._is_wanted_in_eval)
        awaited.begin = self._begin_by_hand

    @property
    def has_seen_models(self) -> bool:
        """Whether any model has run in this process."""
        return self._standby.has_seen_models

    def explain_nothing(self) -> str:
        """Why no capture has begun in a process that has come to its end, and the way out."""
        if self._standby.has_evaluated:
            return "models ran, but none in training mode: --mode=eval records inference"
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
        """Begin the capture that is asked for, unless this process is none to be recorded.

        Raises:
            SystemExit: it cannot begin, and is strict: that is the end of the training.
            KeyboardInterrupt: the user's.
        """
        if not _is_to_be_recorded(os.environ):
            return
        # Not at the top, which runs with each import of torch.
        from ranktape.capture.settings.setting import SWITCH_WORDS

        stand_aside()
        is_strict = SWITCH_WORDS.get(os.environ.get("RANKTAPE_STRICT", "").strip().lower(), False)
        order: Order | None = None
        try:
            from ranktape.capture.session import Capture

            if Capture.current is not None and not Capture.current.yields:
                return  # the script has begun one of its own
            order = self._ask()
            if order is None:
                return
            is_strict = order.is_strict
            settings = dict(order.settings)
            if not (settings["start"] or settings["first_iteration"]):
                settings["start"] = settings["first_iteration"] = self._first_iteration
            capture = Capture(order.url, **settings)
            if order.launcher_pid is None:
                capture.yields, capture.wording = True, in_variables
            capture.__enter__()
            if order.launcher_pid != os.getpid():
                _End(capture, order)
            self.capture = capture
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  (nothing of ours ends a training)
            wording = str if order is not None and order.launcher_pid is not None else in_variables
            # What came too late is no mistake, and another start may find it in time: a training is not ended for it.
            if order is not None and isinstance(error, LateError):
                is_strict = bool(order.settings["strict"])
            text = str(error) if isinstance(error, RanktapeError) else f"{type(error).__name__}: {error}"
            self._failure = one_line(wording(text))
            _fail(error, self._failure, is_strict=is_strict)

    def _is_wanted_in_eval(self) -> bool:
        """Whether a pass in evaluation mode is to be recorded too; asked at the first one."""
        try:
            from ranktape.capture.settings.options import CaptureOptions

            order = self._ask()
        except Exception:  # noqa: BLE001  (said when the training begins)
            return False
        return order is not None and "eval" in CaptureOptions(**order.settings).wanted_modes


def hand_down(order: Order) -> None:
    """Have the processes that this one starts record the same, those that are ranks of a training."""
    os.environ[LAUNCHED] = json.dumps(dataclasses.asdict(order))
    os.environ.pop(OWNER, None)


def _ordered(folder: str) -> Order | None:
    """What the environment asks to record, with paths from a folder; None for nothing.

    Raises:
        UsageError: a variable or the file has a value that it cannot have.
    """
    from ranktape.capture.settings.config import resolve, stray_variables

    environment = dict(os.environ)
    if launched := environment.get(LAUNCHED):
        return Order(**json.loads(launched))
    if config := environment.get(_CONFIG):
        environment[_CONFIG] = _from(folder, Path(config.strip()).expanduser())
    url, settings = resolve({}, environment=environment)
    if url is None:
        return None
    if settings["quant_type"] is None and (
        quantization := Quantization.of_environment(environment, folder=Path(folder))
    ):
        settings["quant_type"] = quantization.tag
    # Of a command line a typing error is refused, too; here nobody watches while an expensive training records less.
    if stray := stray_variables():
        raise UsageError(stray[0])
    return Order.from_settings(url, settings, folder=folder)


def _from(folder: str, path: str | os.PathLike[str]) -> str:
    """A path as it is meant from a folder; a URL, and what is absolute, as it is."""
    text = os.fspath(path)
    # One with a slash too few is refused by its own words.
    is_url = re.match(r"[A-Za-z][A-Za-z0-9+.:-]*:/", text) is not None
    return text if is_url else os.path.join(folder, text)  # noqa: PTH118  (pathlib takes a final slash away)


def _is_to_be_recorded(environment: Mapping[str, str]) -> bool:
    if environment.get(OWNER, str(os.getpid())) != str(os.getpid()):
        return False
    if LAUNCHED in environment and json.loads(environment[LAUNCHED])["launcher_pid"] != os.getpid():
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
    from ranktape.capture.settings.config import PREFIX
    from ranktape.capture.settings.table import SETTINGS

    variables = {
        setting.flag: PREFIX + setting.aliases[-1].upper() + ("=true" if setting.kind is bool else "")
        for setting in SETTINGS
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


class _End:
    """Ends the capture when the process does, and says then what is missing."""

    def __init__(self, capture: Capture, order: Order) -> None:
        self._capture = capture
        self._order = order
        self._owner = os.getpid()
        self._exit: tuple[Any, int] | None = None
        self._shown_before = getattr(sys, "last_value", None)
        self._is_child = multiprocessing.parent_process() is not None
        if self._is_child:
            # Such a process runs no handlers of `atexit` if it was forked.
            multiprocessing.util.Finalize(None, self._close, exitpriority=100)
        else:
            atexit.register(self._close)
            self._leave = sys.exit
            sys.exit = self._note_exit
            self._show = sys.excepthook
            sys.excepthook = self._show_in_a_line

    def _note_exit(self, status: Any = None, /) -> NoReturn:
        """`sys.exit`: with which code the script ends is known nowhere else."""
        if threading.current_thread() is threading.main_thread():
            self._exit = (status, self._capture.iteration)
        self._leave(status)

    def _show_in_a_line(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """`sys.excepthook`: of what a strict capture ends the training with, the frames tell nobody anything."""
        from ranktape.capture.guard import StrictCaptureError

        if isinstance(error, StrictCaptureError):
            report(str(error))
        else:
            self._show(kind, error, trace)

    def _close(self) -> None:
        """End the capture; the wait for what is not stored yet is bounded."""
        from ranktape.capture.session import Capture

        if os.getpid() != self._owner or Capture.current is not self._capture:
            return
        error = self._error()
        reason = self._failure(error)
        try:
            try:
                verdict = self._capture.close(reason=reason, error=error)
            except KeyboardInterrupt:
                verdict = self._capture.close()
            # The launcher says so itself.
            if reason is None and not verdict.met and self._order.launcher_pid is None:
                from ranktape.launch.place import shown

                command = f"'ranktape status {shown(self._order.given_url)} --require-minimum' tells a shell"
                say(f"{in_variables(verdict.message())} ({command})")
        except BaseException as error:  # noqa: BLE001  (the training has ended well, and says so by its exit code)
            complain(one_line(f"the capture did not end well: {error}"))

    def _error(self) -> BaseException | None:
        """What ended the process, as far as can be known; None for nothing."""
        error: Any = sys.exc_info()[1] if self._is_child else getattr(sys, "last_value", None)
        if error is self._shown_before:
            error = None
        if self._exit is not None and self._exit[1] == self._capture.iteration:
            error = SystemExit(self._exit[0])
        return error  # type: ignore[no-any-return]  # as Python keeps it

    @staticmethod
    def _failure(error: BaseException | None) -> str | None:
        """Why the capture ends where the training failed; None where it did not."""
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            return None
        if isinstance(error, CaptureError):
            return str(error)  # a strict capture has ended the training itself
        how = f"exit code {error.code}" if isinstance(error, SystemExit) else type(error).__name__
        return f"the training failed ({how})"
