"""Which tensors should an iteration have, which did it get, and why not the others?

A site is expected where something was attached to see it: a module's hook sees its input, weight and output, and
the gradients of what needs them; a gradient hook sees its gradient; a function that was recorded in an earlier
iteration is expected in every later one. What autograd never computes, as the gradient of a first layer's input or
of a frozen weight, has no hook and is not expected, and neither is what was not selected or recorded by hand.

What is missing is told by module and reason, so that thousands of experts without tokens do not fill a commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ranktape.storage.record import Operation

if TYPE_CHECKING:
    from ranktape.capture.passes.tracker import Call
    from ranktape.capture.source import Source, TensorRole

SILENT = "its hook did not fire"
NOT_CALLED = "its module was not called"
FUNCTION_NOT_CALLED = "its function was not called"
NOT_RECORDED_PASS = "it ran only in passes that are not recorded"  # noqa: S105  # no password
WITHOUT_GRADIENTS = "it ran without gradients, as under torch.no_grad"
NO_BACKWARD = "no backward pass reached it"
DISABLED = "disabled after an error: {error}"
"""The reasons that a tensor is missing, besides those that are told by `refuse`."""

MAX_PLACES = 100
"""Places that are named for one reason; the rest is counted."""

MAX_REASONS = 50
"""Reasons that are told of one iteration; the places of the rest are counted."""

MAX_EXPECTED = 10_000
"""Modules of which a commit lists what was expected; the rest is counted."""

_OTHER_REASONS = "other reasons"

_Calls = set[tuple[str, int, int]]
"""Calls by mode, microbatch and place in it."""


@dataclass(slots=True)
class _Watched:
    """What is known of one source in the running iteration."""

    attached: dict[TensorRole, None] = field(default_factory=dict)
    """The roles that its module's hooks will show, if it runs with gradients."""
    hooked: dict[TensorRole, _Calls] = field(default_factory=dict)
    """For each role that has gradient hooks: their calls."""
    seen: dict[TensorRole, _Calls] = field(default_factory=dict)
    """What was taken, and of which calls."""
    refused: dict[TensorRole, str] = field(default_factory=dict)
    """What was not, or not whole, and why."""
    excused: dict[TensorRole, _Calls] = field(default_factory=dict)
    """What the selection left out, and in which calls, as far as that was for the call."""
    is_called: bool = False
    """Whether it ran in a pass that is recorded."""
    is_passed: bool = False
    """Whether it ran in another one."""
    has_gradients: bool = False
    """Whether one of its calls ran with gradients."""
    is_training: bool = False
    """Whether one of its calls was in a training pass."""


class Expected:
    """The sites of an iteration: expected, seen, refused; and those that are disabled for good."""

    def __init__(self) -> None:
        self._sources: dict[Source, _Watched] = {}
        self._functions: dict[Source, tuple[TensorRole, ...]] = {}
        self._disabled: dict[Source, dict[TensorRole | None, str]] = {}
        self._has_trained = False

    def begin(self) -> None:
        """An iteration begins: everything is attached anew, and functions that ran before should run again."""
        self._sources.clear()
        self._has_trained = False

    def attach(self, source: Source, roles: Iterable[TensorRole]) -> None:
        """Hooks were put on a module; they will show these roles when it runs with gradients."""
        self._of(source).attached.update(dict.fromkeys(roles))

    def called(
        self, source: Source, *, has_gradients: bool = True, is_recorded: bool = True, is_training: bool = True
    ) -> None:
        """The module or function ran.

        Args:
            source: What ran.
            has_gradients: Whether autograd followed it.
            is_recorded: Whether it was in a pass that is recorded.
            is_training: Whether that was a training pass; of others no gradients are expected.
        """
        watched = self._of(source)
        if is_recorded:
            watched.is_called = True
            watched.has_gradients |= has_gradients
            watched.is_training |= is_training
            self._has_trained |= is_training
        else:
            watched.is_passed = True

    def expect(self, source: Source, role: TensorRole, call: Call) -> None:
        """A hook that will see this gradient of this call was attached."""
        self._of(source).hooked.setdefault(role, set()).add(_key(call))

    def saw(self, source: Source, role: TensorRole, call: Call) -> None:
        """The tensor was taken."""
        self._of(source).seen.setdefault(role, set()).add(_key(call))

    def refuse(self, source: Source, role: TensorRole, reason: str) -> None:
        """The tensor is not recorded, or not whole, and why."""
        self._of(source).refused[role] = reason

    def main_refusal(self) -> str | None:
        """The reason that is told of most that was refused; None where nothing was."""
        reasons = Counter(reason for watched in self._sources.values() for reason in watched.refused.values())
        return max(reasons, key=lambda reason: reasons[reason], default=None)

    def excuse(self, source: Source, role: TensorRole, call: Call | None = None) -> None:
        """The tensor was not selected: it is not expected, unless another call of it was taken, or should have been."""
        self._of(source).excused.setdefault(role, set()).update(() if call is None else [_key(call)])

    def known(self, source: Source) -> tuple[TensorRole, ...]:
        """What a call of a source is expected to show, before it has shown anything."""
        return tuple(self._of(source).attached) or self._functions.get(source, ())

    def disable(self, source: Source, role: TensorRole | None, error: str) -> bool:
        """Nothing more is recorded of a site, or without a role of the whole source, for the rest of the run.

        Whether that is new.
        """
        roles = self._disabled.setdefault(source, {})
        is_new = role not in roles
        roles.setdefault(role, error)
        return is_new

    def is_disabled(self, source: Source, role: TensorRole) -> bool:
        """Whether nothing more is recorded of a site."""
        roles = self._disabled.get(source)
        return roles is not None and (None in roles or role in roles)

    def remembered(self) -> list[tuple[Source, TensorRole]]:
        """What functions that ran in earlier iterations should bring again."""
        return [(source, role) for source, roles in self._functions.items() for role in roles]

    def end(self) -> dict[str, Any]:
        """The iteration ended: what its commit says of expected and missing sites, by module and reason."""
        for source in (*self._functions, *self._disabled):
            self._of(source)
        expected = {source: self._expected_of(source, watched) for source, watched in self._sources.items()}
        missing = {source: self._missing_of(source, roles) for source, roles in expected.items()}
        self._remember_functions(expected)
        names = _names(source for source, roles in expected.items() if roles)
        return {
            "expected": self._listed(expected, names=names),
            "silent_sites": _grouped(missing, expected=expected, names=names),
            "num_expected": sum(map(len, expected.values())),
            "num_missing": sum(map(len, missing.values())),
        }

    def _of(self, source: Source) -> _Watched:
        watched = self._sources.get(source)
        if watched is None:
            watched = self._sources[source] = _Watched()
        return watched

    def _expected_of(self, source: Source, watched: _Watched) -> list[TensorRole | None]:
        """The roles that were expected; None stands for those of a source of which none is known."""
        disabled = self._disabled.get(source, {})
        known: Iterable[TensorRole] = watched.attached or self._functions.get(source, ())
        if not self._may_have_gradients(watched):
            known = (role for role in known if role.operation != Operation.BACKWARD)
        named = (known, watched.hooked, watched.seen, watched.refused, filter(None, disabled))
        roles: dict[TensorRole | None, None] = dict.fromkeys(role for group in named for role in group)
        due = {role for role, calls in watched.hooked.items() if not calls <= watched.excused.get(role, set())}
        legal = watched.excused.keys() - {*watched.seen, *watched.refused, *disabled, *due}
        expected = [role for role in roles if role not in legal]
        return expected or ([None] if None in disabled else [])

    def _may_have_gradients(self, watched: _Watched) -> bool:
        """Whether gradients are expected of what is known to have them; evaluation has none."""
        if watched.is_called:
            return watched.is_training
        return self._has_trained or not any(one.is_called for one in self._sources.values())

    def _missing_of(self, source: Source, roles: Iterable[TensorRole | None]) -> dict[TensorRole | None, str]:
        watched = self._sources[source]
        reasons = {role: self._reason(source, watched, role) for role in roles}
        return {role: reason for role, reason in reasons.items() if reason is not None}

    def _reason(self, source: Source, watched: _Watched, role: TensorRole | None) -> str | None:
        """Why a role is missing; None where it is not."""
        disabled = self._disabled.get(source, {})
        error = disabled.get(role, disabled.get(None))
        if error is not None:
            return DISABLED.format(error=error)
        assert role is not None, "only of a source that is disabled no role is known"
        if role in watched.refused:
            return watched.refused[role]
        seen = watched.seen.get(role, set())
        hooked = watched.hooked.get(role, set()) - watched.excused.get(role, set())
        if seen and seen >= hooked:
            return None
        if seen:
            return f"no backward pass reached {len(hooked - seen)} of its {len(hooked)} calls"
        return NO_BACKWARD if hooked else _silence(watched, role)

    def _remember_functions(self, expected: dict[Source, list[TensorRole | None]]) -> None:
        for source, watched in self._sources.items():
            if watched.is_called and not watched.attached:
                known = dict.fromkeys((*self._functions.get(source, ()), *filter(None, expected[source])))
                self._functions[source] = tuple(known)

    def _listed(self, expected: dict[Source, list[TensorRole | None]], *, names: dict[Source, str]) -> list[str]:
        # Where nothing ran at all, nothing was due: an iteration without records is as it should be then.
        if not any(one.is_called or one.seen or one.refused for one in self._sources.values()):
            return []
        lines = [f"{names[source]}: {_tensor_names(roles)}" for source, roles in expected.items() if roles]
        rest = len(lines) - MAX_EXPECTED
        return lines if rest <= 0 else [*lines[:MAX_EXPECTED], f"and {rest} more"]


def _key(call: Call) -> tuple[str, int, int]:
    return call.mode, call.microbatch, call.index


def _silence(watched: _Watched, role: TensorRole) -> str:
    if not watched.is_called and not watched.seen:
        if watched.is_passed:
            return NOT_RECORDED_PASS
        return NOT_CALLED if watched.attached else FUNCTION_NOT_CALLED
    if role.operation == Operation.BACKWARD:
        # Of the gradient of a weight the hook is on the weight, not on a call.
        return NO_BACKWARD if watched.has_gradients or watched.hooked else WITHOUT_GRADIENTS
    return SILENT


def _names(sources: Iterable[Source]) -> dict[Source, str]:
    """What a person is told of each source; the kind of layer only where a module has several."""
    places = {source: source.module or f"{source.layer_type} {source.layer_idx}" for source in sources}
    counts = Counter(places.values())
    return {
        source: f"{place} ({source.layer_type})" if counts[place] > 1 else place for source, place in places.items()
    }


def _tensor_names(roles: Iterable[TensorRole | None]) -> str:
    return ", ".join(dict.fromkeys(role.tensor_name for role in roles if role is not None)) or "everything"


def _grouped(
    missing: dict[Source, dict[TensorRole | None, str]],
    *,
    expected: dict[Source, list[TensorRole | None]],
    names: dict[Source, str],
) -> dict[str, str]:
    """For each place the reason: a module where all of it is missing, else a module and what is missing of it."""
    places: dict[str, list[str]] = {}
    for source, reasons in missing.items():
        by_reason: dict[str, list[TensorRole | None]] = {}
        for role, reason in reasons.items():
            by_reason.setdefault(reason, []).append(role)
        for reason, roles in by_reason.items():
            place = _place(roles, is_all=len(roles) == len(expected[source]), name=names[source])
            places.setdefault(reason, []).append(place)
    grouped: dict[str, str] = {}
    num_others = 0
    for number, (reason, named) in enumerate(places.items()):
        if number >= MAX_REASONS:
            num_others += len(named)
            continue
        grouped |= dict.fromkeys(named[:MAX_PLACES], reason)
        if len(named) > MAX_PLACES:
            rest = f"and {len(named) - MAX_PLACES} more"
            grouped[rest if rest not in grouped else f"{rest}: {reason}"] = reason
    if num_others:
        grouped[f"and {num_others} more: {_OTHER_REASONS}"] = _OTHER_REASONS
    return grouped


def _place(roles: Collection[TensorRole | None], *, is_all: bool, name: str) -> str:
    only = next(iter(roles))
    if is_all and (len(roles) > 1 or only is None):
        return name
    if len(roles) == 1 and only is not None:
        return f"{name} {only.operation} {only.phase} {only.tensor_name}"
    return f"{name} {_tensor_names(roles)}"
