"""Tells which tensors an iteration should have, which it got, and why the others are missing.

A site is expected where something was attached to see it: a module's hook sees its input, weight and output, and
the gradients of what needs them; a gradient hook sees its gradient; a function that was recorded in an earlier
iteration is expected in every later one. What autograd never computes, as the gradient of a first layer's input or
of a frozen weight, has no hook and is not expected, and neither is what was not selected or recorded by hand.

What is missing is told by module and reason, so that thousands of experts without tokens do not fill a commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from ranktape.capture.guard import Guard, OnFailure
from ranktape.capture.sites import MAX_ALL_FORMS, RecordForm, Site
from ranktape.capture.source import source_name
from ranktape.storage.format.record_info import Operation

if TYPE_CHECKING:
    from ranktape.capture.passes.passes import Call
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


class _Watched:
    """What is known of one source."""

    __slots__ = ("attached", "guard", "has_gradients", "is_called", "is_passed", "is_training", "sites")

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        """Contains what goes wrong with it."""
        self.sites: dict[TensorRole, Site] = {}
        """All that was met of it since it was met first."""
        self.begin()

    @property
    def is_idle(self) -> bool:
        """Whether the iteration had nothing to do with it."""
        is_used = self.attached or self.is_called or self.is_passed
        return not is_used and all(site.is_idle for site in list(self.sites.values()))

    def begin(self) -> None:
        """An iteration begins."""
        self.attached: dict[TensorRole, None] = {}
        """The roles that its module's hooks will show, if it runs with gradients."""
        self.is_called = False
        """Whether it ran in a pass that is recorded."""
        self.is_passed = False
        """Whether it ran in another one."""
        self.has_gradients = False
        """Whether one of its calls ran with gradients."""
        self.is_training = False
        """Whether one of its calls was in a training pass."""
        for site in list(self.sites.values()):
            site.begin()


def _raise(error: Exception, source: Source | None, role: TensorRole | None) -> None:  # noqa: ARG001  (as `OnFailure`)
    raise error


class Expected:
    """The sites of an iteration: expected, seen, refused; and those that are disabled for good."""

    def __init__(self, on_failure: OnFailure = _raise) -> None:
        """Know of none; `on_failure` is what the guards of sites and sources do."""
        self._on_failure = on_failure
        self._sources: dict[Source, _Watched] = {}
        self._functions: dict[Source, tuple[TensorRole, ...]] = {}
        self._disabled: dict[Source, dict[TensorRole | None, str]] = {}
        self._has_trained = False
        self._num_forms = 0

    def begin(self) -> None:
        """An iteration begins: everything is attached anew, and functions that ran before should run again.

        What the last one had nothing to do with is forgotten: a training may bring new sources without end.
        """
        for source, watched in list(self._sources.items()):
            if watched.is_idle:
                del self._sources[source]
            else:
                watched.begin()
        self._has_trained = False

    def site(self, source: Source, role: TensorRole) -> Site:
        """What is known of one tensor of a source."""
        watched = self._sources.get(source) or self._of(source)
        site = watched.sites.get(role)
        if site is None:
            guard = Guard(self._on_failure, source, role)
            new = Site(source, role, guard=guard, is_disabled=self._is_disabled(source, role))
            site = watched.sites.setdefault(role, new)  # another thread may have met it, too
        return site

    def keep_form(self, site: Site, key: Any, form: RecordForm) -> RecordForm:
        """Have a form of a site at hand from now on; those of all sites are given up where they become too many."""
        if self._num_forms >= MAX_ALL_FORMS:
            self._num_forms = 0
            for watched in list(self._sources.values()):
                for one in list(watched.sites.values()):
                    one.forms.clear()
        self._num_forms += 1
        return site.keep_form(key, form)

    def guard(self, source: Source) -> Guard:
        """Contains what goes wrong with a source as a whole."""
        watched = self._sources.get(source)
        return Guard(self._on_failure, source) if watched is None else watched.guard

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

    def ran(self) -> set[Source]:
        """The sources that ran in a pass that is recorded, whatever was selected of them."""
        return {source for source, watched in list(self._sources.items()) if watched.is_called}

    def refuse(self, source: Source, role: TensorRole, reason: str) -> None:
        """The tensor is not recorded, or not whole, and why."""
        self.site(source, role).refused = reason

    def main_refusal(self) -> str | None:
        """The reason that is told of most that was refused; None where nothing was."""
        sites = (site for watched in list(self._sources.values()) for site in list(watched.sites.values()))
        reasons = Counter(site.refused for site in sites if site.refused is not None)
        return max(reasons, key=lambda reason: reasons[reason], default=None)

    def excuse(self, source: Source, role: TensorRole, call: Call | None = None) -> None:
        """The tensor was not selected: it is not expected, unless another call of it was taken, or should have been."""
        site = self.site(source, role)
        if site.excused is None:
            site.excused = set()
        if call is not None:
            site.excused.add(call.key)

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
        for site in list(self._of(source).sites.values()):
            site.is_disabled = self._is_disabled(source, site.role)
        return is_new

    def remembered(self) -> list[tuple[Source, TensorRole]]:
        """What functions that ran in earlier iterations should bring again."""
        return [(source, role) for source, roles in self._functions.items() for role in roles]

    def end(self) -> dict[str, Any]:
        """The iteration ended: what its commit says of expected and missing sites, by module and reason."""
        for source in (*self._functions, *self._disabled):
            self._of(source)
        sources = list(self._sources.items())
        # Of what did not run gradients are expected where something trained, or where nothing ran at all.
        is_due = self._has_trained or not any(watched.is_called for _, watched in sources)
        expected = {source: self._expected_of(source, watched, is_due=is_due) for source, watched in sources}
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
            watched = self._sources.setdefault(source, _Watched(Guard(self._on_failure, source)))
        return watched

    def _is_disabled(self, source: Source, role: TensorRole) -> bool:
        roles = self._disabled.get(source)
        return roles is not None and (None in roles or role in roles)

    def _expected_of(self, source: Source, watched: _Watched, *, is_due: bool) -> list[TensorRole | None]:
        """The roles that were expected; None stands for those of a source of which none is known.

        With `is_due`, the gradients of what was not called are among them; evaluation has none.
        """
        disabled = self._disabled.get(source, {})
        known: Iterable[TensorRole] = watched.attached or self._functions.get(source, ())
        if not (watched.is_training if watched.is_called else is_due):
            known = (role for role in known if role.operation != Operation.BACKWARD)
        roles: dict[TensorRole | None, None] = dict.fromkeys(known)
        legal = set()
        for role, site in list(watched.sites.items()):
            if not site.is_idle:
                roles[role] = None
            is_kept = _is_met(site) or role in disabled
            if site.excused is not None and not is_kept and site.hooked <= site.excused:
                legal.add(role)
        roles.update(dict.fromkeys(filter(None, disabled)))
        expected = [role for role in roles if role not in legal]
        return expected or ([None] if None in disabled else [])

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
        site = watched.sites.get(role)
        if site is None:
            return _silence(watched, role)
        if site.refused is not None:
            return site.refused
        hooked = site.hooked - site.excused if site.excused else site.hooked
        if site.seen and site.seen >= hooked:
            return None
        if site.seen:
            return f"no backward pass reached {len(hooked - site.seen)} of its {len(hooked)} calls"
        return NO_BACKWARD if hooked else _silence(watched, role)

    def _remember_functions(self, expected: dict[Source, list[TensorRole | None]]) -> None:
        for source, roles in expected.items():
            watched = self._sources[source]
            if watched.is_called and not watched.attached:
                known = dict.fromkeys((*self._functions.get(source, ()), *filter(None, roles)))
                self._functions[source] = tuple(known)

    def _listed(self, expected: dict[Source, list[TensorRole | None]], *, names: dict[Source, str]) -> list[str]:
        # Where nothing ran at all, nothing was due: an iteration without records is as it should be then.
        sources = list(self._sources.values())
        if not any(one.is_called or any(map(_is_met, list(one.sites.values()))) for one in sources):
            return []
        lines = [f"{names[source]}: {_tensor_names(roles)}" for source, roles in expected.items() if roles]
        rest = len(lines) - MAX_EXPECTED
        return lines if rest <= 0 else [*lines[:MAX_EXPECTED], f"and {rest} more"]


def _is_met(site: Site) -> bool:
    return bool(site.seen) or site.refused is not None


def _silence(watched: _Watched, role: TensorRole) -> str:
    if not watched.is_called and not any(one.seen for one in list(watched.sites.values())):
        if watched.is_passed:
            return NOT_RECORDED_PASS
        return NOT_CALLED if watched.attached else FUNCTION_NOT_CALLED
    if role.operation == Operation.BACKWARD:
        # Of the gradient of a weight the hook is on the weight, not on a call.
        is_followed = watched.has_gradients or any(one.hooked for one in list(watched.sites.values()))
        return NO_BACKWARD if is_followed else WITHOUT_GRADIENTS
    return SILENT


def _names(sources: Iterable[Source]) -> dict[Source, str]:
    """What a person is told of each source; the kind of layer only where a module has several."""
    places = {source: source_name(source) for source in sources}
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
