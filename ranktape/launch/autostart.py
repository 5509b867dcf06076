"""The capture that the environment asks for: whose training it records, how it begins and how it ends.

`ranktape_autoload` arms every process that imports torch. One that never trains stays as it is: the capture begins
inside of the first training forward, which an agent of torchrun, a loader of data or a command of ours never makes.
It ends when the process does. Whatever goes wrong, the training goes on, and its exit code is its own.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import multiprocessing
import multiprocessing.util
import os
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ranktape.capture.settings.setting import SWITCH_WORDS
from ranktape.errors import CaptureError, FailedElsewhereError, RanktapeError, UsageError
from ranktape.launch.owner import OWNER, stand_aside
from ranktape.launch.worker import HEAD_START_SECONDS, Worker, one_line

if TYPE_CHECKING:
    from types import TracebackType

    from ranktape.capture.session import Capture

_CONFIG = "RANKTAPE_CAPTURE_CONFIG"


def arm() -> None:
    """Have the first training forward of this process begin a capture; called at the end of `import torch`."""
    if OWNER not in os.environ:
        from ranktape.launch.standby import Standby

        # The program may go elsewhere before it trains, each rank into a folder of its own.
        folder = os.getcwd()  # noqa: PTH109  (a text is what is joined with)
        Standby(begin=lambda: begin(folder), is_wanted_in_eval=lambda: _is_wanted_in_eval(folder))


def begin(folder: str) -> None:
    """Begin the capture that the environment asks for, unless this process is none to be recorded.

    Args:
        folder: From which the paths of the settings are meant.

    Raises:
        SystemExit: it cannot begin, and is strict (RANKTAPE_STRICT=true): that is the end of the training.
        KeyboardInterrupt: the user's.
    """
    if not _is_to_be_recorded(os.environ):
        return
    stand_aside()
    is_strict = SWITCH_WORDS.get(os.environ.get("RANKTAPE_STRICT", "").strip().lower(), False)
    try:
        from ranktape.capture.session import Capture

        if Capture.current is not None and not Capture.current.yields:
            return  # the script has begun one of its own
        asked = _asked_for(folder)
        if asked is None:
            return
        url, options = asked
        is_strict = options["strict"]
        capture = Capture(_from(folder, url), **options)
        capture.yields = True
        capture.__enter__()
        _End(capture, url=url)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  (nothing of ours ends a training)
        _fail(error, is_strict=is_strict)


def _asked_for(folder: str) -> tuple[str, dict[str, Any]] | None:
    """Where the environment asks to record, and the settings, with paths from a folder; None for nowhere.

    Raises:
        UsageError: a variable or the file has a value that it cannot have.
    """
    from ranktape.capture.settings.config import resolve, stray_variables

    environment = dict(os.environ)
    if config := environment.get(_CONFIG):
        environment[_CONFIG] = _from(folder, Path(config.strip()).expanduser())
    url, options = resolve({}, environment=environment)
    if url is None:
        return None
    for name in ("ring_dir", "spill_dir"):
        if options[name] is not None:
            options[name] = _from(folder, Path(options[name]).expanduser())
    # Of a command line a typing error is refused, too; here nobody watches while an expensive training records less.
    if stray := stray_variables():
        raise UsageError(stray[0])
    return url, options


def _from(folder: str, path: str | os.PathLike[str]) -> str:
    """A path as it is meant from a folder; a URL, and what is absolute, as it is."""
    text = os.fspath(path)
    # One with a slash too few is refused by its own words.
    is_url = re.match(r"[A-Za-z][A-Za-z0-9+.:-]*:/", text) is not None
    return text if is_url else os.path.join(folder, text)  # noqa: PTH118  (pathlib takes a final slash away)


def _is_to_be_recorded(environment: Mapping[str, str]) -> bool:
    if OWNER in environment:
        return False
    if "_pytest" in sys.modules and "PYTEST_CURRENT_TEST" in environment:
        return False  # the tests of somebody whose shell has the variable
    data = sys.modules.get("torch.utils.data")
    return data is None or data.get_worker_info() is None


def _is_wanted_in_eval(folder: str) -> bool:
    """Whether a pass in evaluation mode is to be recorded too; asked at the first one."""
    try:
        from ranktape.capture.settings.options import CaptureOptions

        asked = _asked_for(folder)
    except Exception:  # noqa: BLE001  (said when the training begins)
        return False
    return asked is not None and "eval" in CaptureOptions(**asked[1]).wanted_modes


def _fail(error: BaseException, *, is_strict: bool) -> None:
    worker = _worker()
    text = str(error) if isinstance(error, RanktapeError) else f"{type(error).__name__}: {error}"
    if not is_strict:
        if not _is_said_by_rank_0(error, text=text):
            worker.complain(f"{one_line(text)}; the training goes on without a capture")
        return
    worker.report(text)
    if threading.current_thread() is not threading.main_thread():
        raise error
    raise SystemExit(error.exit_code if isinstance(error, RanktapeError) else 1) from error


def _is_said_by_rank_0(error: BaseException, *, text: str) -> bool:
    """Whether another rank has said already why there is no capture; rank 0 lets the others know that it says so."""
    if isinstance(error, FailedElsewhereError):
        return True
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

    def __init__(self, capture: Capture, *, url: str) -> None:
        self._capture = capture
        self._url = url
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
            _worker().report(str(error))
        else:
            self._show(kind, error, trace)

    def _close(self) -> None:
        """End the capture; the wait for what is not stored yet is bounded."""
        from ranktape.capture.session import Capture

        if os.getpid() != self._owner or Capture.current is not self._capture:
            return
        reason = self._failure()
        try:
            try:
                verdict = self._capture.close(reason=reason)
            except KeyboardInterrupt:
                verdict = self._capture.close()
            if reason is None and not verdict.met:
                from ranktape.launch.place import shown

                _worker().warn(
                    f"{verdict.message()} ('ranktape status {shown(self._url)} --require-minimum' tells a shell)"
                )
        except BaseException as error:  # noqa: BLE001  (the training has ended well, and says so by its exit code)
            _worker().complain(one_line(f"the capture did not end well: {error}"))

    def _failure(self) -> str | None:
        """Why the capture ends where the training failed; None where it did not, as far as can be known."""
        error: Any = sys.exc_info()[1] if self._is_child else getattr(sys, "last_value", None)
        if error is self._shown_before:
            error = None
        if self._exit is not None and self._exit[1] == self._capture.iteration:
            error = SystemExit(self._exit[0])
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            return None
        if isinstance(error, CaptureError):
            return str(error)  # a strict capture has ended the training itself
        how = f"exit code {error.code}" if isinstance(error, SystemExit) else type(error).__name__
        return f"the training failed ({how})"


def _worker() -> Worker:
    """This process among the ranks; where torch.distributed knows it and the environment does not, by that."""
    distributed = sys.modules.get("torch.distributed")
    worker = Worker.from_environment(os.environ)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return worker
    return dataclasses.replace(worker, rank=distributed.get_rank())
