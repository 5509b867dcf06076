"""The table of a capture's settings, which Python, the command line, a file and the environment share.

The setting `host_budget_nbytes` in Python is `--host-budget-nbytes` on a command line and RANKTAPE_HOST_BUDGET_NBYTES
in the environment. The rules of `select` are parsed by `ranktape.capture.settings.rules`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from ranktape.capture.settings.cadence import Cadence
from ranktape.capture.settings.setting import Setting, flag, is_given, option
from ranktape.errors import UsageError, nearest
from ranktape.storage.format.record_info import Compression, Keep, Mode, check_term
from ranktape.storage.places.urls import parse_storage_options

if TYPE_CHECKING:
    from ranktape.capture.flight.rules import SiteTrigger
    from ranktape.capture.settings.rules import CaptureRule

MAX_ITERATIONS = 100_000
"""Largest `min_iterations` and `max_iterations`. The full list of iterations is sent to every rank."""

DEFAULT_LAYER_TYPES = ("linear", "attention")
LAYER_OUTPUTS = ("embedding", "hidden")
"""The layer types that `layers` selects."""


class Policy(enum.StrEnum):
    """What happens if an iteration does not fit into the host budget, because the store is slow or does not answer.

    Until the guaranteed minimum is stored, the policy is always `block`.
    """

    BLOCK = "block"
    """The training waits for the writer, at most `block_timeout_seconds`."""
    SKIP = "skip"
    """The whole iteration is skipped on every rank, and the run records that."""


# The parsers of rules are imported when they are used: they import numpy, which a help page does not need.


def _check_select(value: Any) -> None:
    from ranktape.capture.settings.rules import read_rules

    read_rules(value, keep=Keep.VALUES.value, outputs=())


def _check_layers(value: Any) -> None:
    if is_given(value):
        from ranktape.capture.settings.rules import read_numbers

        read_numbers("layers", value)


def _read_triggers(value: Any) -> tuple[SiteTrigger, ...]:
    if not is_given(value):
        return ()
    from ranktape.capture.flight.rules import read_site_triggers

    return read_site_triggers(value)


def _check_advance_on(value: Any) -> None:
    events, most_digits = ("optimizer", "forward", "step"), 9
    name, _, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    is_numbered = name == "optimizer" and number.isdecimal() and len(number) <= most_digits
    if value not in events and not is_numbered and not callable(getattr(value, "step", None)):
        raise UsageError(
            f"--advance-on {value!r:.60} is not allowed: give {', '.join(events)}, optimizer:N, or an optimizer"
        )


def _check_storage_options(value: Any) -> None:
    if not isinstance(value, Mapping | None):
        kind = type(value).__name__
        raise UsageError(f"--storage-options is a {kind}: give an object such as {{'anon': True}}")
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--storage-options cannot be passed on as JSON ({error}): give text and numbers") from error


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """The checked settings of a capture.

    Raises:
        UsageError: a field does not allow its value; the message names the option.
    """

    # Not `start` and `master`: torchrun reads these flags, at any position, as abbreviations of its own.
    start_at: int = option(0, "First iteration to capture, counted from 0.", least=0)
    every: int = option(1, "Capture every N-th iteration from the first one on.", least=1)
    min_iterations: int = option(
        1, "Iterations guaranteed to be stored complete from all ranks.", least=1, most=MAX_ITERATIONS
    )
    max_iterations: int | None = option(
        None, "Stop after this many complete iterations; --min-iterations by default.", least=1, most=MAX_ITERATIONS
    )
    first_iteration: int = option(
        0, "Number of the first training step, after a checkpoint; none before it is captured.", least=0
    )
    quant_type: str | None = option(
        None, "Tag: what the run computes in (bf16, mxfp8, ...); the compute dtype by default.", metavar="TAG"
    )
    select: Any = option(
        (),
        "A rule: fields, and what is kept, as in 'layer_type=attention rank=0-3 keep=histogram'. The first rule that "
        "matches a tensor decides; a tensor that no rule matches is not captured.",
        takes_several=True,
        metavar="RULE",
        validate=_check_select,
    )
    layers: Any = option(
        None,
        "Record the embedding's output and those of all decoder layers ('all'), or of some: 0,30,61. "
        "Linear and attention layers are left out unless --select names them.",
        metavar="LAYERS",
        validate=_check_layers,
    )
    keep: str = option("values", "What is kept of each tensor, unless a rule says otherwise.", choices=Keep)
    with_master: bool = flag("Record the weights that the optimizer updates, and their reduced gradients, too.")
    advance_on: Any = option(
        "optimizer",
        "What ends an iteration: optimizer (the first that steps), optimizer:N (the N-th, from 0), forward "
        "(each outermost forward pass), or step (the script calls capture.step()).",
        metavar="EVENT",
        validate=_check_advance_on,
    )
    sample_dim: int | None = option(
        None, "Dimension of activations that holds samples; found from the batch by default.", least=0
    )
    compiled: str = option(
        "graph",
        "How compiled code is recorded: inside of its graphs, or run eagerly in captured iterations.",
        choices=("graph", "eager"),
    )
    policy: str = option(
        "block",
        "What to do when an iteration does not fit into the budget, once the minimum is stored.",
        choices=Policy,
    )
    host_budget_nbytes: int | None = option(
        None, "Host memory for staged tensors, in bytes per rank; from the free memory by default.", least=1 << 20
    )
    block_timeout_seconds: float = option(
        120.0,
        "Longest wait of the training for the writer, after which capture disables itself, and of the writer for a "
        "store that does not answer, after which the iteration fails.",
        least=0,
    )
    finish_timeout_seconds: float = option(300.0, "Longest wait at the end for what is not stored yet.", least=0)
    compression: str = option(
        "none",
        "How values are compressed: zstd leaves about 80 % of bf16, blosc (bits shuffled first) 70 %.",
        choices=Compression,
    )
    keep_last: int | None = option(
        None,
        "Keep the last N complete iterations and delete older ones while --max-iterations of them are recorded.",
        least=1,
    )
    stop_when_stored: bool = flag(
        "End the training, with exit code 0 and before the same iteration on all ranks, once the guaranteed "
        "iterations (or --max-iterations, if given) are stored complete."
    )
    record_last: int | None = option(
        None,
        "Flight recorder: store nothing until a trigger occurs on any rank. Then all ranks store the iteration of the "
        "trigger, the last N recorded before it and the one after it.",
        least=1,
    )
    trigger: Any = option(
        (),
        "With --record-last: a metric's limit, as in \"absmax > 448 where tensor_name == 'input'\"; NaN, infinities, "
        "errors and crashes are always triggers.",
        takes_several=True,
        metavar="RULE",
        validate=_read_triggers,
    )
    spill_dir: str | None = option(
        None, "Directory for the iterations that the store cannot take; 'ranktape push' copies them to the store."
    )
    strict: bool = flag("End the training with an error when the capture fails inside.")
    manual: bool = flag("Attach no hooks: record only what save_tensor is given.")
    resume: bool = flag("Continue the run that is at the URL, as a new attempt.")
    overwrite: bool = flag("Delete the run that is at the URL first.")
    storage_options: Mapping[str, Any] | None = option(
        None,
        'JSON object for fsspec, such as \'{"endpoint_url": "http://host:9000"}\'.',
        is_secret=True,
        metavar="JSON",
        parse=parse_storage_options,
        validate=_check_storage_options,
    )
    layer_offset: int = 0
    """Added to the index of each layer on a later pipeline stage. Only in Python, because each rank has its own."""
    adds: bool = False
    """Whether the records of a run at the URL are shown with the new ones, as in a folder of the legacy tools."""

    def __post_init__(self) -> None:
        """Check each value, and their combinations.

        Raises:
            UsageError: a value or a combination is not allowed.
        """
        for setting in SETTINGS:
            setting.check(getattr(self, setting.name))
        if self.quant_type is not None:
            check_term(self.quant_type, field="quant_type")
        if self.layer_offset < 0:
            raise UsageError(f"layer_offset {self.layer_offset} is not allowed: give a whole number from 0 on")
        for name, count in (("--max-iterations", self.max_iterations), ("--keep-last", self.keep_last)):
            if count is not None and count < self.min_iterations:
                raise UsageError(
                    f"{name} {count} is below --min-iterations {self.min_iterations}, which are guaranteed: raise it"
                )
        if self.resume + self.overwrite + self.adds > 1:
            raise UsageError("--resume and --overwrite exclude each other: give one")
        self._check_recorder()

    def _check_recorder(self) -> None:
        """Check the values that depend on whether this is a flight recorder."""
        if self.record_last is None:
            if is_given(self.trigger):
                raise UsageError("--trigger is for a flight recorder: add --record-last N")
            return
        for setting in SETTINGS:
            value = getattr(self, setting.name)
            if (reason := _NOT_WITH_RECORD_LAST.get(setting.name)) and value != setting.default:
                option_text = setting.flag if setting.kind is bool else f"{setting.flag} {value}"
                raise UsageError(
                    f"{option_text} and --record-last {self.record_last} exclude each other, because a flight recorder "
                    f"{reason}: give one"
                )

    def __getstate__(self) -> dict[str, Any]:
        """The fields without the cached properties: the writer needs no parsed rules."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}

    @functools.cached_property
    def rules(self) -> tuple[CaptureRule, ...]:
        """The rules; the first that matches a tensor decides. There is at least one."""
        from ranktape.capture.settings.rules import read_rules

        return read_rules(self.select, keep=self.keep, outputs=LAYER_OUTPUTS if self.wants_layers else ())

    @functools.cached_property
    def triggers(self) -> tuple[SiteTrigger, ...]:
        """The limits of metrics at which a flight recorder stores the iterations that it holds."""
        return _read_triggers(self.trigger)

    @property
    def cadence(self) -> Cadence:
        """The iterations that may be captured."""
        return Cadence(start=self.start_at, every=self.every, first=self.first_iteration)

    @property
    def guaranteed_iterations(self) -> int:
        """Number of iterations that are guaranteed to be stored complete; 0 for a flight recorder."""
        return self.min_iterations if self.record_last is None else 0

    @property
    def target_iterations(self) -> int:
        """Number of complete iterations after which the capture stops; 0 for a flight recorder, which never does."""
        return self.guaranteed_iterations if self.max_iterations is None else self.max_iterations

    @property
    def wants_layers(self) -> bool:
        """Whether the outputs of the embedding and of decoder layers are recorded."""
        return is_given(self.layers) and self.layers is not False

    @functools.cached_property
    def _selected(self) -> list[CaptureRule]:
        """The rules of `select`, without those that follow from other settings."""
        return [rule for rule in self.rules if rule.number]

    @functools.cached_property
    def wanted_layer_types(self) -> tuple[str, ...]:
        """The layer types to attach to, as names or globs."""
        outputs = LAYER_OUTPUTS if self.wants_layers else ()
        usual = () if outputs else DEFAULT_LAYER_TYPES
        selected = [text for rule in self._selected for text in rule.texts("layer_type") or usual]
        return tuple(dict.fromkeys((*(selected if self._selected else usual), *outputs)))

    def wants_layer_type(self, layer_type: str) -> bool:
        """Whether to attach to layers of that type."""
        return _matches(self.wanted_layer_types, layer_type)

    def names_layer_type(self, layer_type: str) -> bool:
        """Whether a rule names that layer type, so that it is not selected by `layers` alone."""
        return any(_matches(rule.texts("layer_type"), layer_type) for rule in self._selected)

    def wants_module(self, path: str) -> bool:
        """Whether to attach to the module with that path."""
        globs = self.named_modules
        return not globs or _matches(tuple(globs), path)

    @property
    def named_modules(self) -> list[str]:
        """The globs of modules of all rules; empty if a rule names no modules."""
        globs = [rule.texts("module") for rule in self._selected]
        return [text for texts in globs for text in texts] if all(globs) else []

    @property
    def names_mode(self) -> bool:
        """Whether a rule selects by mode."""
        return any("mode" in rule.names for rule in self.rules)

    @functools.cached_property
    def wanted_modes(self) -> tuple[str, ...]:
        """The modes of the passes that are recorded. A rule without one means `train`, or both if `layers` is given."""
        modes = tuple(map(str, Mode))
        usual = modes if self.wants_layers else (Mode.TRAIN.value,)
        wanted = {mode for rule in self.rules for mode in (rule.modes if "mode" in rule.names else usual)}
        return tuple(mode for mode in modes if mode in wanted)

    def for_request(self, settings: Mapping[str, Any]) -> CaptureOptions:
        """The options for an iteration that was requested during the training; its settings, if any, select in it."""
        if unknown := sorted(settings.keys() - set(REQUEST_SETTINGS)):
            name = unknown[0]
            raise UsageError(f"{name!r:.60} is not a setting of a request: {nearest(name, REQUEST_SETTINGS)}")
        selection = {"select": (), "keep": Keep.VALUES.value, "layers": None, **settings} if settings else {}
        return dataclasses.replace(self, **selection)

    def plain(self) -> dict[str, Any]:
        """The settings as values for JSON, without the script's own classes, for another process."""
        values: dict[str, Any] = json.loads(json.dumps(self.__getstate__(), default=_plain))
        return values

    def document(self) -> dict[str, Any]:
        """The settings for the run's document: values for JSON, without secrets."""
        public = self.plain() | {"min_iterations": self.guaranteed_iterations}
        del public["storage_options"]
        return public


_NOT_WITH_RECORD_LAST = {
    **dict.fromkeys(("min_iterations", "max_iterations", "keep_last", "stop_when_stored"), "guarantees no iterations"),
    "manual": "holds what hooks record",
}
"""The settings that have no meaning for a flight recorder, each with the reason."""


class CaptureSettings(TypedDict, total=False):
    """The keyword arguments of `Capture`. They are the fields of `CaptureOptions`, whose help explains each."""

    start_at: int
    every: int
    min_iterations: int
    max_iterations: int | None
    first_iteration: int
    quant_type: str | None
    select: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
    layers: str | int | bool | Sequence[int] | None
    keep: str
    with_master: bool
    advance_on: Any
    sample_dim: int | None
    compiled: str
    policy: str
    host_budget_nbytes: int | None
    block_timeout_seconds: float
    finish_timeout_seconds: float
    compression: str
    keep_last: int | None
    stop_when_stored: bool
    record_last: int | None
    trigger: str | Sequence[str]
    spill_dir: str | os.PathLike[str] | None
    strict: bool
    manual: bool
    resume: bool
    overwrite: bool
    storage_options: Mapping[str, Any] | None
    layer_offset: int
    adds: bool


SETTINGS: Sequence[Setting] = tuple(
    Setting(name=item.name, type_name=str(item.type), default=item.default, **item.metadata)
    for item in dataclasses.fields(CaptureOptions)
    if item.metadata
)
"""All settings, in the order of `CaptureOptions`."""

REQUEST_SETTINGS = ("select", "keep")
"""The settings that a request for iterations of a running training may give."""


def check_layer_types(options: CaptureOptions, *, known: Sequence[str]) -> None:
    """Check that the wanted layer types are known.

    An unknown one is allowed if it resembles no known one and not all are unknown: it may be recorded by hand.

    Raises:
        UsageError: an unknown layer type is not allowed.
    """
    wanted = () if options.manual else options.wanted_layer_types
    unknown = [pattern for pattern in wanted if not any(_matches((pattern,), name) for name in known)]
    for pattern in unknown:
        hint = nearest(pattern, known, otherwise="give one of", cutoff=0.6)
        if hint.startswith("did you") or len(unknown) == len(wanted):
            raise UsageError(f"there is no layer type {pattern!r:.60} (--select layer_type=...): {hint}")


def _matches(patterns: tuple[str, ...], text: str) -> bool:
    from ranktape.capture.settings.rules import fits

    return fits(patterns, text)


def _plain(value: Any) -> Any:
    """A value for JSON instead of one that JSON cannot represent."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value) if isinstance(value, range | slice | os.PathLike) else type(value).__name__
