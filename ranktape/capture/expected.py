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

HOOK_NOT_RUN = "its hook did not fire"
NOT_CALLED = "its module was not called"
USED_WITHOUT_CALL = "its module was not called, and its weight was used without it"
FUNCTION_NOT_CALLED = "its function was not called"
OTHER_PASSES = "it ran only in passes that are not recorded"  # no password
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
    def has_outcome(self) -> bool:
        """Whether the iteration has a tensor of the site, or a reason why there is none."""
        return bool(self.seen) or self.refused is not None

    @property
    def is_complete(self) -> bool:
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


class _SourceState:
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
    def is_unused(self) -> bool:
        """Whether the source did not occur in the iteration and has no state that must remain."""
        is_used = self.attached or self.is_called or self.is_passed or self.disabled or self.remembered
        return not is_used and not any(site.has_outcome or site.hooked for site in list(self.sites.values()))

    @property
    def known(self) -> Iterable[TensorRole]:
        """The roles that a call of the source is expected to have."""
        return self.attached or self.remembered

    def is_disabled(self, role: TensorRole) -> bool:
        """Whether a role, or the whole source, is disabled."""
        return None in self.disabled or role in self.disabled

    def expected(self, *, wants_gradients: bool) -> list[TensorRole | None]:
        """The expected roles; None alone if the source is disabled and its roles are not known.

        If the source was not called, gradients are included if `wants_gradients`. If it was called only in evaluation
        passes, gradients are not included.
        """
        has_gradients = self.is_training if self.is_called else wants_gradients
        known = [*self.known, *self.awaited]  # another thread may put hooks on it meanwhile
        roles = dict.fromkeys(role for role in known if has_gradients or role.operation != Operation.BACKWARD)
        excused = set()
        for role, site in list(self.sites.items()):
            if site.has_outcome or site.hooked:
                roles[role] = None
            is_reported = site.has_outcome or role in self.disabled
            if site.excused is not None and not is_reported and site.hooked <= site.excused:
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
            return self._reason_without_record(role)
        if site.refused is not None:
            return f"{site.refused} ({OTHER_CALLS})" if site.is_complete else site.refused
        hooked = site.hooked - site.excused if site.excused else site.hooked
        if site.is_complete:
            return None
        if site.seen:
            return f"no backward pass reached {len(hooked - site.seen)} of its {len(hooked)} calls"
        return NO_BACKWARD if hooked else self._reason_without_record(role)

    def is_complete(self, role: TensorRole | None) -> bool:
        """Whether a role is recorded, except perhaps for refused calls."""
        site = None if role is None else self.sites.get(role)
        return site is not None and site.is_complete and not self.is_disabled(site.role)

    def _reason_without_record(self, role: TensorRole) -> str:
        sites = list(self.sites.values())
        if not self.is_called and not any(site.seen for site in sites):
            if self.is_passed:
                return OTHER_PASSES
            not_called = NOT_CALLED if self.attached else FUNCTION_NOT_CALLED
            return USED_WITHOUT_CALL if self.is_used else not_called
        if role.operation != Operation.BACKWARD:
            return HOOK_NOT_RUN
        # The gradient of a weight may have a hook on the weight, not on a call.
        return NO_BACKWARD if self.has_gradients or any(site.hooked for site in sites) else WITHOUT_GRADIENTS


class Expected:
    """The expected, recorded and refused sites of an iteration, and the sites that are disabled for good."""

    def __init__(self) -> None:
        self._sources: dict[Source, _SourceState] = {}
        self._num_forms = 0

    def begin(self) -> None:
        """Start an iteration. Hooks are attached again, and functions that ran before are expected again.

        Sources that did not occur in the last iteration are dropped, because a training may create new ones endlessly.
        """
        # Copying the dictionary is atomic; making a list of its items may be interrupted by another thread.
        for source, state in self._sources.copy().items():
            if state.is_unused:
                del self._sources[source]
            else:
                state.begin()

    def site(self, source: Source, role: TensorRole) -> Site:
        """The site of a tensor of a source."""
        state = self._sources.get(source) or self._of(source)
        site = state.sites.get(role)
        if site is None:
            new = Site(source, role, is_disabled=state.is_disabled(role))
            site = state.sites.setdefault(role, new)  # another thread may have added it
        return site

    def keep_form(self, site: Site, key: Any, form: RecordForm) -> RecordForm:
        """Cache a form of a site. If there are too many forms, the caches of all sites are cleared."""
        if self._num_forms >= MAX_ALL_FORMS:
            self._num_forms = 0
            for state in list(self._sources.values()):
                for other in list(state.sites.values()):
                    other.forms.clear()
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
        state = self._of(source)
        state.is_called = True
        state.has_gradients |= has_gradients
        state.is_training |= is_training

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
        state = self._of(source)
        return not (state.is_called or state.is_passed or state.disabled)

    def ran(self) -> set[Source]:
        """The sources that ran in a recorded pass, selected or not."""
        return {source for source, state in self._sources.copy().items() if state.is_called}

    def seen(self) -> list[Source]:
        """The sources with a recorded tensor."""
        return [
            state.source for state in list(self._sources.values()) if any(site.seen for site in state.sites.values())
        ]

    def refuse(self, source: Source, role: TensorRole, reason: str) -> None:
        """Note the reason why a tensor is not recorded, or not completely."""
        self.site(source, role).refused = reason

    def main_refusal(self) -> str | None:
        """The most frequent reason for refused tensors; None if nothing was refused."""
        sites = (site for state in list(self._sources.values()) for site in list(state.sites.values()))
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
        state = self._of(source)
        is_new = role not in state.disabled
        state.disabled.setdefault(role, error)
        for site in list(state.sites.values()):
            site.is_disabled = state.is_disabled(site.role)
        return is_new

    def remembered(self) -> list[tuple[Source, TensorRole]]:
        """The roles of functions in earlier iterations, which are expected again, with their sources."""
        return [(source, role) for source, state in self._sources.copy().items() for role in state.remembered]

    def end(self) -> dict[str, Any]:
        """Finish an iteration. Returns the fields of its commit about expected and missing tensors."""
        sources = list(self._sources.values())
        is_any_called = any(state.is_called for state in sources)
        # Gradients of sources that did not run are expected if another source trained, or if nothing ran at all.
        wants_gradients = any(state.is_training for state in sources) or not is_any_called
        expected = {state: roles for state in sources if (roles := state.expected(wants_gradients=wants_gradients))}
        missing = {state: {role: state.reason(role) for role in roles} for state, roles in expected.items()}
        for state, roles in expected.items():
            if state.is_called and not state.attached:
                state.remembered.update(dict.fromkeys(role for role in roles if role is not None))
        names = _names([state.source for state in expected])
        # If nothing ran at all, nothing is listed as expected, and an iteration without records is complete.
        has_run = is_any_called or any(site.has_outcome for state in sources for site in list(state.sites.values()))
        listed = expected if has_run else {}
        lines = [f"{names[state.source]}: {_tensor_names(roles)}" for state, roles in listed.items()]
        rest = len(lines) - MAX_EXPECTED
        return {
            "expected": lines if rest <= 0 else [*lines[:MAX_EXPECTED], f"and {rest} more"],
            "silent_sites": _grouped([(names[state.source], reasons) for state, reasons in missing.items()]),
            "num_expected": sum(map(len, expected.values())),
            "num_missing": sum(
                reason is not None and not state.is_complete(role)
                for state, reasons in missing.items()
                for role, reason in reasons.items()
            ),
        }

    def _of(self, source: Source) -> _SourceState:
        state = self._sources.get(source)
        if state is None:
            state = self._sources.setdefault(source, _SourceState(source))
        return state


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
    labels: dict[str, list[str]] = {}
    for name, roles in sources:
        for reason in dict.fromkeys(reason for reason in roles.values() if reason is not None):
            missing = [role for role, other in roles.items() if other == reason]
            labels.setdefault(reason, []).append(_site_label(name, missing, is_all=len(missing) == len(roles)))
    grouped: dict[str, str] = {}
    for reason, names in list(labels.items())[:MAX_REASONS]:
        grouped |= dict.fromkeys(names[:MAX_PLACES], reason)
        if len(names) > MAX_PLACES:
            rest = f"and {len(names) - MAX_PLACES} more"
            grouped[rest if rest not in grouped else f"{rest}: {reason}"] = reason
    if num_others := sum(map(len, list(labels.values())[MAX_REASONS:])):
        grouped[f"and {num_others} more: {_OTHER_REASONS}"] = _OTHER_REASONS
    return grouped


def _site_label(name: str, roles: Sequence[TensorRole | None], *, is_all: bool) -> str:
    if len(roles) == 1 and (role := roles[0]) is not None:
        return f"{name} {role.operation} {role.phase} {role.tensor_name}"
    return name if is_all else f"{name} {_tensor_names(roles)}"
