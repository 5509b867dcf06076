"""The options of a capture, with the rules among them checked, and what follows from them."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranktape.capture.settings.rules import (
    CLOSED,
    DEFAULT_LAYER_TYPES,
    FIELDS,
    LAYER_OUTPUTS,
    CaptureRule,
    cadence_of,
    fits,
    leaves_out,
    listed,
    read_layers,
    read_selection,
    rule_words,
    wants_layers,
)
from ranktape.capture.settings.table import SETTINGS, Settings, is_given, split_texts
from ranktape.errors import UsageError
from ranktape.storage.format.record_info import Keep, Mode
from ranktape.storage.places.urls import parse_storage_options
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
        if not (self.selects or is_given(self.layers)):
            return
        # What lies before the first step may be complete already in a run that is continued.
        first = 0 if self.resume else self.first_iteration
        cadence = dataclasses.replace(cadence_of(self), first=first)
        read_layers(self.layers)
        self._find_modes()
        count = len(cadence.following(count=self.min_iterations)) if cadence.is_limited else self.min_iterations
        if count < self.min_iterations:
            raise UsageError(
                f"--start-at, --every, --iteration, --where and --select leave {count} iteration{'s' * (count != 1)}, "
                f"fewer than --min-iterations {self.min_iterations}: choose more, or guarantee fewer"
            )

    @property
    def target_iterations(self) -> int:
        """How many complete iterations end the capture."""
        return self.min_iterations if self.max_iterations is None else self.max_iterations

    @property
    def selects(self) -> bool:
        """Whether anything of what the hooks see is left out, or kept in another form."""
        return self.keep != Keep.VALUES or bool(self.selection_flags)

    @property
    def selection_flags(self) -> list[str]:
        """The options that were given and leave tensors out."""
        return leaves_out(self)

    @property
    def wants_layers(self) -> bool:
        """Whether the outputs of the embedding and of decoder layers are recorded."""
        return wants_layers(self)

    @property
    def wanted_layer_types(self) -> tuple[str, ...]:
        """The kinds of layers to attach to: names or globs."""
        outputs = LAYER_OUTPUTS if self.wants_layers else ()
        if is_given(self.layer_type):
            found = listed(self.layer_type)
        elif is_given(self.select):
            found = [one for words in rule_words(self.select) for one in _types_of(words)]
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
        """The modes of the passes that are recorded: those that the options and rules ask for, by default `train`."""
        return self._find_modes()

    def _find_modes(self) -> tuple[str, ...]:
        """As `wanted_modes`.

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
        written: dict[str, Any] = json.loads(json.dumps(public, default=_plain))
        return written

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> CaptureOptions:
        """Options from parsed command line values; None stands for 'not given'.

        Raises:
            UsageError: a value is not allowed, or `storage_options` is not a JSON object.
        """
        return cls(**given_settings(values))


def given_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of parsed command line values that were given, in Python's form; None stands for 'not given'.

    Raises:
        UsageError: `storage_options` is not a JSON object.
    """
    return {name: in_python(name, values[name]) for name in _NAMES if is_given(values.get(name))}


def in_python(name: str, value: Any) -> Any:
    """A setting's value in Python's form, as a command line, a file or the environment says it.

    Raises:
        UsageError: `storage_options` is not a JSON object.
    """
    several = value if isinstance(value, list | tuple) else [value]
    if name == "storage_options" and isinstance(value, str):
        return parse_storage_options(value)
    if name == "select":
        return tuple(_rule_in_python(rule) for rule in several)
    return split_texts(several) if _NAMES[name].is_filter else value


_NAMES = {setting.name: setting for setting in SETTINGS}


def _rule_in_python(rule: Any) -> Any:
    if not isinstance(rule, Mapping):
        return rule
    return {
        name: split_texts(value if isinstance(value, list) else [value])
        if name.replace("-", "_") in FIELDS and value is not None
        else value
        for name, value in rule.items()
    }


def check_layer_types(options: CaptureOptions, *, known: Sequence[str]) -> None:
    """Let kinds of layers pass that there are; besides these, one that is recorded by hand.

    Raises:
        UsageError: none is known, or one has nearly the name of one that is; says which.
    """
    unknown = [] if options.manual else [one for one in options.wanted_layer_types if not any(map(glob(one), known))]
    for pattern in unknown:
        near = difflib.get_close_matches(pattern, known, n=1)
        if near or len(unknown) == len(options.wanted_layer_types):
            hint = f"did you mean {near[0]}?" if near else f"give one of {', '.join(known)}"
            raise UsageError(f"no kind of layer is called {pattern!r:.60} (--layer-type): {hint}")


def _modes_that_fit(rule: CaptureRule) -> tuple[str, ...]:
    modes = CLOSED["mode"]
    column = StringColumn(codes=np.arange(len(modes)), table=modes)
    fitting = rule.can_hold(lambda _: column, known={"mode"}, num_rows=len(modes))
    return tuple(mode for mode, fits_it in zip(modes, fitting, strict=True) if fits_it)


def _types_of(words: Mapping[str, Any]) -> Sequence[str]:
    return listed(words["layer_type"]) if is_given(words.get("layer_type")) else DEFAULT_LAYER_TYPES


def _plain(value: Any) -> Any:
    """What JSON has no word for, in one that it has."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return value.tolist() if hasattr(value, "tolist") else str(value) if _is_data(value) else type(value).__name__


def _is_data(value: Any) -> bool:
    return isinstance(value, range | slice | os.PathLike)
