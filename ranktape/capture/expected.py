"""Knows which tensors an iteration should have, which it got, and why the others are missing.

A site is expected where something was attached to see it: a module's hook sees its input, weight and output, and
the gradients of what needs them; a gradient hook sees its gradient; a function that was recorded in an earlier
iteration is expected in every later one. What autograd never computes, as the gradient of a first layer's input or
of a frozen weight, has no hook and is not expected, and neither is what was not selected or recorded by hand.

What is missing is listed by module and reason, so that thousands of experts without tokens do not fill a commit.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ranktape.capture.source import Source, TensorRole, source_name
from ranktape.storage.format.record_info import Mode, Operation

if TYPE_CHECKING:
    from ranktape.capture.passes.passes import Call
    from ranktape.capture.sites import RecordForm

SILENT = "its hook did not fire"
NOT_CALLED = "its module was not called"
USED_WITHOUT_CALL = "its module was not called, and its weight was used without it"
FUNCTION_NOT_CALLED = "its function was not called"
NOT_RECORDED_PASS = "it ran only in passes that are not recorded"  # noqa: S105  # no password
WITHOUT_GRADIENTS = "it ran without gradients, as under torch.no_grad or in an autograd.Function"
NO_BACKWARD = "no backward pass reached it"
OTHER_CALLS = "other calls of it are recorded"
DISABLED = "disabled after an error: {error}"
"""The reasons that a tensor is missing, besides those that `refuse` gives."""

MAX_PLACES = 100
"""Places that are named for one reason; the rest is counted."""

MAX_REASONS = 50
"""Reasons that are listed of one iteration; the places of the rest are counted."""

MAX_EXPECTED = 10_000
"""Modules of which a commit lists what was expected; the rest is counted."""

MAX_FORMS = 256
"""Forms of one site that are kept: shapes without end must not fill the memory."""

MAX_ALL_FORMS = 50_000
"""Forms of all sites that are kept, of about 1 kB each."""

_OTHER_REASONS = "other reasons"

Calls = set[tuple[Mode, int, int]]
"""Calls by mode, microbatch and place in it."""


class Site:
    """One tensor of one source, from when it is first met to the end of the run: all that a hook needs, found once."""

    __slots__ = ("excused", "forms", "hooked", "is_disabled", "refused", "role", "seen", "source", "taken")

    def __init__(self, source: Source, role: TensorRole, *, is_disabled: bool) -> None:
        self.source = source
        self.role = role
        self.is_disabled = is_disabled
        self.forms: dict[Any, RecordForm] = {}
        """Forms in which it was recorded, by all that tells one from another."""
        self.taken: Calls = set()
        """In this iteration: the calls under which tensors of it were recorded, each its own."""
        self.hooked: Calls = set()
        """In this iteration: the calls that have a gradient hook."""
        self.seen: Calls = set()
        """In this iteration: the calls of which it was taken."""
        self.refused: str | None = None
        """In this iteration: why one was not taken, or not whole."""
        self.excused: Calls | None = None
        """In this iteration: what the selection left out, as far as that was for the call; None for nothing."""

    @property
    def is_met(self) -> bool:
        """Whether the iteration has brought it, or a reason why it is not there."""
        return bool(self.seen) or self.refused is not None

    @property
    def is_whole(self) -> bool:
        """Whether it was taken of a call, and of all that have a gradient hook, but for what was not selected."""
        return bool(self.seen) and self.seen >= self.hooked - (self.excused or set())

    def begin(self) -> None:
        """An iteration begins."""
        self.taken.clear()
        self.hooked.clear()
        self.seen.clear()
        self.refused = self.excused = None

    def distinct(self, call: Call) -> Call:
        """A call of its own for a tensor: two backward passes over one graph bring each gradient twice."""
        if call.key in self.taken:
            index = call.index + 1
            while (call.mode, call.microbatch, index) in self.taken:
                index += 1
            call = dataclasses.replace(call, index=index)
        self.taken.add(call.key)
        return call


class _Watched:
    """One source: its sites, and what the iteration has shown of it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.sites: dict[TensorRole, Site] = {}
        self.disabled: dict[TensorRole | None, str] = {}
        """The error for which nothing more is recorded of a role; of None for all of it."""
        self.remembered: dict[TensorRole, None] = {}
        """What a function brought in earlier iterations, and should bring again."""
        self.begin()

    def begin(self) -> None:
        """An iteration begins."""
        self.attached: dict[TensorRole, None] = {}
        """The roles that its module's hooks will show, if it runs with gradients."""
        self.awaited: dict[TensorRole, None] = {}
        """The gradients that a call without gradients should have."""
        self.is_called = False
        """Whether it ran in a pass that is recorded."""
        self.is_passed = False
        """Whether it ran in another one."""
        self.is_used = False
        """Whether a gradient of its weight came, though it did not run."""
        self.has_gradients = False
        """Whether one of its calls ran with gradients."""
        self.is_training = False
        """Whether one of its calls was in a training pass."""
        for site in list(self.sites.values()):
            site.begin()

    @property
    def is_forgettable(self) -> bool:
        """Whether the iteration had nothing to do with it, and nothing else is to be kept of it."""
        is_used = self.attached or self.is_called or self.is_passed or self.disabled or self.remembered
        return not is_used and not any(site.is_met or site.hooked for site in list(self.sites.values()))

    @property
    def known(self) -> Iterable[TensorRole]:
        """What a call of it is expected to show, before it has shown anything."""
        return self.attached or self.remembered

    def is_disabled(self, role: TensorRole) -> bool:
        """Whether nothing is recorded of that role."""
        return None in self.disabled or role in self.disabled

    def expected(self, *, is_due: bool) -> list[TensorRole | None]:
        """The roles that were expected; None stands for those of a source of which none is known.

        With `is_due`, the gradients of what was not called are among them; evaluation has none.
        """
        has_gradients = self.is_training if self.is_called else is_due
        known = [*self.known, *self.awaited]  # another thread may put hooks on it meanwhile
        roles = dict.fromkeys(role for role in known if has_gradients or role.operation != Operation.BACKWARD)
        excused = set()
        for role, site in list(self.sites.items()):
            if site.is_met or site.hooked:
                roles[role] = None
            is_kept = site.is_met or role in self.disabled
            if site.excused is not None and not is_kept and site.hooked <= site.excused:
                excused.add(role)
        roles.update(dict.fromkeys(role for role in self.disabled if role is not None))
        return [role for role in roles if role not in excused] or ([None] if None in self.disabled else [])

    def reason(self, role: TensorRole | None) -> str | None:
        """Why a role that was expected is missing; None where it is not."""
        error = self.disabled.get(role, self.disabled.get(None))
        if error is not None:
            return DISABLED.format(error=error)
        assert role is not None, "only of a source that is disabled no role is known"
        site = self.sites.get(role)
        if site is None:
            return self._silence(role)
        if site.refused is not None:
            return f"{site.refused} ({OTHER_CALLS})" if site.is_whole else site.refused
        hooked = site.hooked - site.excused if site.excused else site.hooked
        if site.is_whole:
            return None
        if site.seen:
            return f"no backward pass reached {len(hooked - site.seen)} of its {len(hooked)} calls"
        return NO_BACKWARD if hooked else self._silence(role)

    def is_whole(self, role: TensorRole | None) -> bool:
        """Whether a role is recorded, though perhaps not of a call that was refused."""
        site = None if role is None else self.sites.get(role)
        return site is not None and site.is_whole and not self.is_disabled(site.role)

    def _silence(self, role: TensorRole) -> str:
        sites = list(self.sites.values())
        if not self.is_called and not any(site.seen for site in sites):
            if self.is_passed:
                return NOT_RECORDED_PASS
            not_called = NOT_CALLED if self.attached else FUNCTION_NOT_CALLED
            return USED_WITHOUT_CALL if self.is_used else not_called
        if role.operation != Operation.BACKWARD:
            return SILENT
        # Of the gradient of a weight the hook is on the weight, not on a call.
        return NO_BACKWARD if self.has_gradients or any(site.hooked for site in sites) else WITHOUT_GRADIENTS


class Expected:
    """The sites of an iteration: expected, seen, refused; and those that are disabled for good."""

    def __init__(self) -> None:
        self._sources: dict[Source, _Watched] = {}
        self._num_forms = 0

    def begin(self) -> None:
        """An iteration begins: everything is attached anew, and functions that ran before should run again.

        What the last one had nothing to do with is forgotten: a training may bring new sources without end.
        """
        # A copy of the dictionary is made in one go; a list of its items may be interrupted by another thread.
        for source, watched in self._sources.copy().items():
            if watched.is_forgettable:
                del self._sources[source]
            else:
                watched.begin()

    def site(self, source: Source, role: TensorRole) -> Site:
        """What is known of one tensor of a source."""
        watched = self._sources.get(source) or self._of(source)
        site = watched.sites.get(role)
        if site is None:
            new = Site(source, role, is_disabled=watched.is_disabled(role))
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
        if len(site.forms) >= MAX_FORMS:
            site.forms.clear()
        site.forms[key] = form
        return form

    def attach(self, source: Source, roles: Iterable[TensorRole]) -> None:
        """Hooks were put on a module; they will show these roles when it runs with gradients."""
        self._of(source).attached.update(dict.fromkeys(roles))

    def expect(self, source: Source, roles: Iterable[TensorRole]) -> None:
        """Expect roles of a source in this iteration, beside those that are attached or remembered."""
        self._of(source).awaited.update(dict.fromkeys(roles))

    def called(self, source: Source, *, has_gradients: bool = True, is_training: bool = True) -> None:
        """The module or function ran in a pass that is recorded; of others than training no gradients are expected."""
        watched = self._of(source)
        watched.is_called = True
        watched.has_gradients |= has_gradients
        watched.is_training |= is_training

    def passed(self, source: Source) -> None:
        """The module or function ran in a pass that is not recorded."""
        self._of(source).is_passed = True

    def used(self, source: Source) -> None:
        """A gradient of the module's weight came, though the module did not run."""
        self._of(source).is_used = True

    def is_used(self, source: Source) -> bool:
        """Whether that was so."""
        return self._of(source).is_used

    def is_idle(self, source: Source) -> bool:
        """Whether the module or function ran in no pass at all."""
        watched = self._of(source)
        return not (watched.is_called or watched.is_passed or watched.disabled)

    def ran(self) -> set[Source]:
        """The sources that ran in a pass that is recorded, whatever was selected of them."""
        return {source for source, watched in self._sources.copy().items() if watched.is_called}

    def seen(self) -> list[Source]:
        """The sources of which a tensor was taken."""
        return [one.source for one in list(self._sources.values()) if any(site.seen for site in one.sites.values())]

    def refuse(self, source: Source, role: TensorRole, reason: str) -> None:
        """The tensor is not recorded, or not whole, and why."""
        self.site(source, role).refused = reason

    def main_refusal(self) -> str | None:
        """The reason for which most was refused; None where nothing was."""
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
        return tuple(self._of(source).known)

    def disable(self, source: Source, role: TensorRole | None, error: str) -> bool:
        """Record nothing more of a site, or without a role of the whole source, for the rest of the run.

        Whether that is new: the first error of each is the one that is kept.
        """
        watched = self._of(source)
        is_new = role not in watched.disabled
        watched.disabled.setdefault(role, error)
        for site in list(watched.sites.values()):
            site.is_disabled = watched.is_disabled(site.role)
        return is_new

    def remembered(self) -> list[tuple[Source, TensorRole]]:
        """What functions that ran in earlier iterations should bring again."""
        return [(source, role) for source, watched in self._sources.copy().items() for role in watched.remembered]

    def end(self) -> dict[str, Any]:
        """The iteration ended: what its commit says of expected and missing sites, by module and reason."""
        sources = list(self._sources.values())
        is_any_called = any(one.is_called for one in sources)
        # Of what did not run gradients are expected where something trained, or where nothing ran at all.
        is_due = any(one.is_training for one in sources) or not is_any_called
        expected = {one: roles for one in sources if (roles := one.expected(is_due=is_due))}
        missing = {one: {role: one.reason(role) for role in roles} for one, roles in expected.items()}
        for one, roles in expected.items():
            if one.is_called and not one.attached:
                one.remembered.update(dict.fromkeys(role for role in roles if role is not None))
        names = _names([one.source for one in expected])
        # Where nothing ran at all, nothing was due: an iteration without records is as it should be then.
        is_due = is_any_called or any(site.is_met for one in sources for site in list(one.sites.values()))
        lines = [f"{names[one.source]}: {_tensor_names(roles)}" for one, roles in expected.items()] if is_due else []
        rest = len(lines) - MAX_EXPECTED
        return {
            "expected": lines if rest <= 0 else [*lines[:MAX_EXPECTED], f"and {rest} more"],
            "silent_sites": _grouped([(names[one.source], reasons) for one, reasons in missing.items()]),
            "num_expected": sum(map(len, expected.values())),
            "num_missing": sum(
                reason is not None and not one.is_whole(role)
                for one, reasons in missing.items()
                for role, reason in reasons.items()
            ),
        }

    def _of(self, source: Source) -> _Watched:
        watched = self._sources.get(source)
        if watched is None:
            watched = self._sources.setdefault(source, _Watched(source))
        return watched


def _names(sources: Sequence[Source]) -> dict[Source, str]:
    """What messages call each source; the kind of layer only where a module has several."""
    counts = Counter(map(source_name, sources))
    return {
        source: f"{name} ({source.layer_type})" if counts[name] > 1 else name
        for source in sources
        for name in [source_name(source)]
    }


def _tensor_names(roles: Iterable[TensorRole | None]) -> str:
    return ", ".join(dict.fromkeys(role.tensor_name for role in roles if role is not None)) or "everything"


def _grouped(sources: Iterable[tuple[str, Mapping[TensorRole | None, str | None]]]) -> dict[str, str]:
    """For each place the reason: a module where all of it is missing, else a module and what is missing of it."""
    places: dict[str, list[str]] = {}
    for name, roles in sources:
        for reason in dict.fromkeys(reason for reason in roles.values() if reason is not None):
            missing = [role for role, one in roles.items() if one == reason]
            places.setdefault(reason, []).append(_place(name, missing, is_all=len(missing) == len(roles)))
    grouped: dict[str, str] = {}
    for reason, named in list(places.items())[:MAX_REASONS]:
        grouped |= dict.fromkeys(named[:MAX_PLACES], reason)
        if len(named) > MAX_PLACES:
            rest = f"and {len(named) - MAX_PLACES} more"
            grouped[rest if rest not in grouped else f"{rest}: {reason}"] = reason
    if num_others := sum(map(len, list(places.values())[MAX_REASONS:])):
        grouped[f"and {num_others} more: {_OTHER_REASONS}"] = _OTHER_REASONS
    return grouped


def _place(name: str, roles: Sequence[TensorRole | None], *, is_all: bool) -> str:
    if len(roles) == 1 and (role := roles[0]) is not None:
        return f"{name} {role.operation} {role.phase} {role.tensor_name}"
    return name if is_all else f"{name} {_tensor_names(roles)}"
