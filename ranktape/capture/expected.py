"""Tracks the expected tensors of an iteration, the recorded ones, and the reasons why others are missing.

A site is expected if a hook was attached for it: a module's hooks see its input, weight and output, and the gradients
of tensors that require them; a gradient hook sees its gradient. A function that was recorded in an earlier iteration is
expected in each later one. Gradients that autograd never computes, such as that of the first layer's input or of a
frozen weight, have no hook and are not expected. Tensors that are not selected, or recorded by hand, are not expected.

Missing tensors are listed by module and reason, so that thousands of experts without tokens do not fill a commit.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ranktape.capture.source import Source, TensorRole, source_name
from ranktape.storage.format.record_info import Mode, Operation

if TYPE_CHECKING:
    from ranktape.capture.passes.tracker import Call
    from ranktape.capture.sites import RecordForm

SILENT = "its hook did not fire"
NOT_CALLED = "its module was not called"
USED_WITHOUT_CALL = "its module was not called, and its weight was used without it"
FUNCTION_NOT_CALLED = "its function was not called"
NOT_RECORDED_PASS = "it ran only in passes that are not recorded"  # noqa: S105  # no password
WITHOUT_GRADIENTS = "it ran without gradients, as under torch.no_grad or in an autograd.Function"
NO_BACKWARD = "no backward pass reached it"
TRANSFORMED = "it ran inside of a transform of torch.func, whose tensors are not recorded"
OTHER_CALLS = "other calls of it are recorded"
DISABLED = "disabled after an error: {error}"
"""The reasons why a tensor is missing. Others are passed to `refuse`."""

MAX_PLACES = 100
"""Maximum number of places that are listed for one reason. The rest are counted."""

MAX_REASONS = 50
"""Maximum number of reasons that are listed for one iteration. The places of the rest are counted."""

MAX_EXPECTED = 10_000
"""Maximum number of modules whose expected tensors a commit lists. The rest are counted."""

MAX_FORMS = 256
"""Maximum number of cached forms of one site, which limits the memory if shapes keep changing."""

MAX_ALL_FORMS = 50_000
"""Maximum number of cached forms of all sites, of about 1 kB each."""

_OTHER_REASONS = "other reasons"

Calls = set[tuple[Mode, int, int]]
"""Calls, by mode, microbatch and index in the microbatch."""


class Site:
    """One tensor of a source, from its first use until the end of the run, with all state that a hook needs."""

    __slots__ = ("excused", "forms", "hooked", "is_disabled", "refused", "role", "seen", "source", "taken")

    def __init__(self, source: Source, role: TensorRole, *, is_disabled: bool) -> None:
        self.source = source
        self.role = role
        self.is_disabled = is_disabled
        self.forms: dict[Any, RecordForm] = {}
        """The cached forms of its records, by everything that a form depends on."""
        self.taken: Calls = set()
        """The distinct calls under which tensors were recorded in this iteration."""
        self.hooked: Calls = set()
        """The calls with a gradient hook in this iteration."""
        self.seen: Calls = set()
        """The calls whose tensor was recorded in this iteration."""
        self.refused: str | None = None
        """The reason why a tensor of this iteration was not recorded, or not completely; None if there is none."""
        self.excused: Calls | None = None
        """The calls that are not selected in this iteration; empty if the whole site is not, None if all of it is."""

    @property
    def is_met(self) -> bool:
        """Whether the iteration has a tensor of the site, or a reason why there is none."""
        return bool(self.seen) or self.refused is not None

    @property
    def is_whole(self) -> bool:
        """Whether a tensor was recorded, and one for each selected call with a gradient hook."""
        return bool(self.seen) and self.seen >= self.hooked - (self.excused or set())

    def begin(self) -> None:
        """Start an iteration."""
        self.taken.clear()
        self.hooked.clear()
        self.seen.clear()
        self.refused = self.excused = None

    def distinct(self, call: Call) -> Call:
        """The call with the next free index, since two backward passes over a graph compute each gradient twice."""
        if call.key in self.taken:
            index = call.index + 1
            while (call.mode, call.microbatch, index) in self.taken:
                index += 1
            call = dataclasses.replace(call, index=index)
        self.taken.add(call.key)
        return call


class _Watched:
    """The state of one source, with its sites."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.sites: dict[TensorRole, Site] = {}
        self.disabled: dict[TensorRole | None, str] = {}
        """The error that disabled each role, or, for None, the whole source."""
        self.remembered: dict[TensorRole, None] = {}
        """The roles of a function in earlier iterations, which are expected again."""
        self.begin()

    def begin(self) -> None:
        """Start an iteration."""
        self.attached: dict[TensorRole, None] = {}
        """The roles that the hooks of the module will see if it runs with gradients."""
        self.awaited: dict[TensorRole, None] = {}
        """The gradients that are expected of a call with gradients disabled."""
        self.is_called = False
        """Whether the source ran in a recorded pass."""
        self.is_passed = False
        """Whether the source ran in a pass that is not recorded."""
        self.is_used = False
        """Whether a gradient of its weight was computed although the source did not run."""
        self.has_gradients = False
        """Whether any call ran with gradients enabled."""
        self.is_training = False
        """Whether any call was in a training pass."""
        for site in list(self.sites.values()):
            site.begin()

    @property
    def is_forgettable(self) -> bool:
        """Whether the source did not occur in the iteration and has no state that must remain."""
        is_used = self.attached or self.is_called or self.is_passed or self.disabled or self.remembered
        return not is_used and not any(site.is_met or site.hooked for site in list(self.sites.values()))

    @property
    def known(self) -> Iterable[TensorRole]:
        """The roles that a call of the source is expected to have."""
        return self.attached or self.remembered

    def is_disabled(self, role: TensorRole) -> bool:
        """Whether a role, or the whole source, is disabled."""
        return None in self.disabled or role in self.disabled

    def expected(self, *, is_due: bool) -> list[TensorRole | None]:
        """The expected roles; None alone if the source is disabled and its roles are not known.

        If the source was not called, gradients are included if `is_due`. If it was called only in evaluation passes,
        gradients are not included.
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
        """The reason why an expected role is missing; None if it is not missing."""
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
        """Whether a role is recorded, except perhaps for refused calls."""
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
        # The gradient of a weight may have a hook on the weight, not on a call.
        return NO_BACKWARD if self.has_gradients or any(site.hooked for site in sites) else WITHOUT_GRADIENTS


class Expected:
    """The expected, recorded and refused sites of an iteration, and the sites that are disabled for good."""

    def __init__(self) -> None:
        self._sources: dict[Source, _Watched] = {}
        self._num_forms = 0

    def begin(self) -> None:
        """Start an iteration. Hooks are attached again, and functions that ran before are expected again.

        Sources that did not occur in the last iteration are dropped, because a training may create new ones endlessly.
        """
        # Copying the dictionary is atomic; making a list of its items may be interrupted by another thread.
        for source, watched in self._sources.copy().items():
            if watched.is_forgettable:
                del self._sources[source]
            else:
                watched.begin()

    def site(self, source: Source, role: TensorRole) -> Site:
        """The site of a tensor of a source."""
        watched = self._sources.get(source) or self._of(source)
        site = watched.sites.get(role)
        if site is None:
            new = Site(source, role, is_disabled=watched.is_disabled(role))
            site = watched.sites.setdefault(role, new)  # another thread may have added it
        return site

    def keep_form(self, site: Site, key: Any, form: RecordForm) -> RecordForm:
        """Cache a form of a site. If there are too many forms, the caches of all sites are cleared."""
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
        """Note that hooks on a module will see these roles when it runs with gradients."""
        self._of(source).attached.update(dict.fromkeys(roles))

    def expect(self, source: Source, roles: Iterable[TensorRole]) -> None:
        """Expect roles of a source in this iteration, besides those of hooks and of earlier iterations."""
        self._of(source).awaited.update(dict.fromkeys(roles))

    def called(self, source: Source, *, has_gradients: bool = True, is_training: bool = True) -> None:
        """Note that a source ran in a recorded pass. Unless that is a training pass, no gradients are expected."""
        watched = self._of(source)
        watched.is_called = True
        watched.has_gradients |= has_gradients
        watched.is_training |= is_training

    def passed(self, source: Source) -> None:
        """Note that a source ran in a pass that is not recorded."""
        self._of(source).is_passed = True

    def used(self, source: Source) -> None:
        """Note that a gradient of a module's weight was computed although the module did not run."""
        self._of(source).is_used = True

    def is_used(self, source: Source) -> bool:
        """Whether `used` was called for a source in this iteration."""
        return self._of(source).is_used

    def is_idle(self, source: Source) -> bool:
        """Whether a source ran in no pass at all."""
        watched = self._of(source)
        return not (watched.is_called or watched.is_passed or watched.disabled)

    def ran(self) -> set[Source]:
        """The sources that ran in a recorded pass, selected or not."""
        return {source for source, watched in self._sources.copy().items() if watched.is_called}

    def seen(self) -> list[Source]:
        """The sources with a recorded tensor."""
        return [one.source for one in list(self._sources.values()) if any(site.seen for site in one.sites.values())]

    def refuse(self, source: Source, role: TensorRole, reason: str) -> None:
        """Note the reason why a tensor is not recorded, or not completely."""
        self.site(source, role).refused = reason

    def main_refusal(self) -> str | None:
        """The most frequent reason for refused tensors; None if nothing was refused."""
        sites = (site for watched in list(self._sources.values()) for site in list(watched.sites.values()))
        reasons = Counter(site.refused for site in sites if site.refused is not None)
        return max(reasons, key=lambda reason: reasons[reason], default=None)

    def excuse(self, source: Source, role: TensorRole, call: Call | None = None) -> None:
        """Note that a tensor was not selected, so it is not expected unless another call is recorded or expected."""
        site = self.site(source, role)
        if site.excused is None:
            site.excused = set()
        if call is not None:
            site.excused.add(call.key)

    def known(self, source: Source) -> tuple[TensorRole, ...]:
        """The roles that a call of a source is expected to have."""
        return tuple(self._of(source).known)

    def disable(self, source: Source, role: TensorRole | None, error: str) -> bool:
        """Disable a role of a source, or, if `role` is None, the whole source, for the rest of the run.

        Returns whether it was enabled. The first error is the one that is reported.
        """
        watched = self._of(source)
        is_new = role not in watched.disabled
        watched.disabled.setdefault(role, error)
        for site in list(watched.sites.values()):
            site.is_disabled = watched.is_disabled(site.role)
        return is_new

    def remembered(self) -> list[tuple[Source, TensorRole]]:
        """The roles of functions in earlier iterations, which are expected again, with their sources."""
        return [(source, role) for source, watched in self._sources.copy().items() for role in watched.remembered]

    def end(self) -> dict[str, Any]:
        """Finish an iteration. Returns the fields of its commit about expected and missing tensors."""
        sources = list(self._sources.values())
        is_any_called = any(one.is_called for one in sources)
        # Gradients of sources that did not run are expected if another source trained, or if nothing ran at all.
        is_due = any(one.is_training for one in sources) or not is_any_called
        expected = {one: roles for one in sources if (roles := one.expected(is_due=is_due))}
        missing = {one: {role: one.reason(role) for role in roles} for one, roles in expected.items()}
        for one, roles in expected.items():
            if one.is_called and not one.attached:
                one.remembered.update(dict.fromkeys(role for role in roles if role is not None))
        names = _names([one.source for one in expected])
        # If nothing ran at all, nothing is listed as expected, and an iteration without records is complete.
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
    """The name of each source in messages, with the layer type only if a module has several sources."""
    counts = Counter(map(source_name, sources))
    return {
        source: f"{name} ({source.layer_type})" if counts[name] > 1 else name
        for source in sources
        for name in [source_name(source)]
    }


def _tensor_names(roles: Iterable[TensorRole | None]) -> str:
    return ", ".join(dict.fromkeys(role.tensor_name for role in roles if role is not None)) or "everything"


def _grouped(sources: Iterable[tuple[str, Mapping[TensorRole | None, str | None]]]) -> dict[str, str]:
    """The reason for each place: a module if all its tensors are missing, otherwise a module and some tensors."""
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
