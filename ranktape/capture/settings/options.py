"""The options of a capture, with the rules among them checked, and what follows from them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ranktape.capture.settings.rules import (
    CLOSED,
    DEFAULT_LAYER_TYPES,
    LAYER_OUTPUTS,
    CaptureRule,
    cadence_of,
    fits,
    listed,
    read_numbers,
    read_selection,
    rule_words,
)
from ranktape.capture.settings.setting import is_given
from ranktape.capture.settings.table import ASKED_SETTINGS, SETTINGS, Settings
from ranktape.capture.settings.triggers import read_site_triggers
from ranktape.errors import UsageError, nearest
from ranktape.storage.format.record_info import Keep, Mode
from ranktape.storage.query.columns import StringColumn, glob


class CaptureOptions(Settings):
    """The settings of a capture, checked; its fields are those of `Settings`.

    Raises:
        UsageError: a value is outside of what its field allows; the message names the option.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        """Check every value, and the rules together."""
        super().__post_init__()
        read_site_triggers(self.trigger)
        if not (self.selects or is_given(self.layers)):
            return
        # What lies before the first step may be complete already in a run that is continued.
        first = 0 if self.resume else self.first_iteration
        cadence = dataclasses.replace(cadence_of(self), first=first)
        read_numbers("layers", self.layers)
        _ = self.wanted_modes
        least = self.guaranteed_iterations
        count = len(cadence.following(count=least)) if cadence.is_limited else least
        if count < least:
            raise UsageError(
                f"--start-at, --every, --iteration, --where and --select leave {count} iteration{'s' * (count != 1)}, "
                f"fewer than --min-iterations {self.min_iterations}: choose more, or guarantee fewer"
            )

    def asked(self, settings: Mapping[str, Any]) -> CaptureOptions:
        """The options for an iteration that somebody asked for, in which these settings select, where any is given.

        Raises:
            UsageError: one is unknown, or has a value that it cannot have.
        """
        if unknown := sorted(settings.keys() - set(ASKED_SETTINGS)):
            raise UsageError(f"{unknown[0]!r:.60} selects nothing: {nearest(unknown[0], ASKED_SETTINGS)}")
        plain = {setting.name: setting.default for setting in SETTINGS if setting.name in ASKED_SETTINGS}
        own = {**plain, **settings} if settings else {}
        # A rule's own distance says nothing of a single iteration, and need not fit to that of the capture.
        return dataclasses.replace(self, iteration=(), every=1, **own)

    @property
    def selects(self) -> bool:
        """Whether anything of what the hooks see is left out, or kept in another form."""
        return self.keep != Keep.VALUES or bool(self.selection_flags)

    @property
    def wanted_layer_types(self) -> tuple[str, ...]:
        """The kinds of layers to attach to: names or globs."""
        outputs = LAYER_OUTPUTS if self.wants_layers else ()
        if is_given(self.layer_type):
            found = listed(self.layer_type)
        elif is_given(self.select):
            asked = [words.get("layer_type") for words in rule_words(self.select)]
            found = [one for types in asked for one in (listed(types) if is_given(types) else DEFAULT_LAYER_TYPES)]
        else:
            found = [] if outputs else list(DEFAULT_LAYER_TYPES)
        return tuple(dict.fromkeys((*found, *outputs)))

    def wants_layer_type(self, layer_type: str) -> bool:
        """Whether layers of that kind are attached to."""
        return fits(self.wanted_layer_types, layer_type)

    def wants_module(self, path: str) -> bool:
        """Whether modules of that path are attached to."""
        return not is_given(self.module) or fits(tuple(listed(self.module)), path)

    def names_layer_type(self, layer_type: str) -> bool:
        """Whether layers of that kind are asked for by `layer_type`, and not by `layers` alone."""
        return is_given(self.layer_type) and fits(tuple(listed(self.layer_type)), layer_type)

    @property
    def wanted_modes(self) -> tuple[str, ...]:
        """The modes of the passes that are recorded: those that the options and rules ask for, by default `train`.

        Raises:
            UsageError: a rule, or `where`, is for a mode that the options leave out, or for none.
        """
        general, rules = read_selection(self)
        usual = CLOSED["mode"] if self.wants_layers else (Mode.TRAIN.value,)
        allowed = _modes_that_fit(general) if "mode" in general.names else CLOSED["mode"]
        asked = f"--mode {','.join(listed(self.mode))}" if is_given(self.mode) else "--where"
        if not allowed:
            with_modes = f", with {asked}," if is_given(self.mode) else ""
            raise UsageError(f"--where {self.where!r:.60}{with_modes} takes neither training nor evaluation: change it")
        if "mode" not in general.names and not any("mode" in rule.names for rule in rules):
            return tuple(usual)
        found: set[str] = set()
        for number, rule in enumerate(rules, start=1):
            own = _modes_that_fit(rule)
            if not set(own) & set(allowed):
                raise UsageError(
                    f"--select, rule {number}, is for passes in mode {' or '.join(own) or 'neither train nor eval'}, "
                    f"and {asked} takes only {' and '.join(allowed)}: change one of them"
                )
            found |= set(own if "mode" in rule.names else allowed if "mode" in general.names else usual)
        return tuple(mode for mode in allowed if mode in found)

    def document(self) -> dict[str, Any]:
        """What the run's document says of the capture: JSON, without secrets."""
        public = {setting.name: getattr(self, setting.name) for setting in SETTINGS}
        del public["storage_options"]
        public["min_iterations"] = self.guaranteed_iterations
        written: dict[str, Any] = json.loads(json.dumps(public, default=_plain))
        return written


def check_layer_types(options: CaptureOptions, *, known: Sequence[str]) -> None:
    """Let kinds of layers pass that there are; besides these, one that is recorded by hand.

    Raises:
        UsageError: none is known, or one has nearly the name of one that is; says which.
    """
    unknown = [] if options.manual else [one for one in options.wanted_layer_types if not any(map(glob(one), known))]
    for pattern in unknown:
        hint = nearest(pattern, known, otherwise="give one of", cutoff=0.6)
        if hint.startswith("did you") or len(unknown) == len(options.wanted_layer_types):
            raise UsageError(f"no kind of layer is called {pattern!r:.60} (--layer-type): {hint}")


def _modes_that_fit(rule: CaptureRule) -> tuple[str, ...]:
    modes = CLOSED["mode"]
    column = StringColumn.of(modes)
    fitting = rule.can_hold(lambda _: column, known={"mode"}, num_rows=len(modes))
    return tuple(mode for mode, fits_it in zip(modes, fitting, strict=True) if fits_it)


def _plain(value: Any) -> Any:
    """What JSON has no word for, in one that it has."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value) if isinstance(value, range | slice | os.PathLike) else type(value).__name__
