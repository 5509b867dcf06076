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
from ranktape.capture.settings.setting import Setting, is_given, option
from ranktape.errors import UsageError, nearest
from ranktape.storage.format.record_info import Compression, Keep, Mode, check_term

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
        None,
        "Stop after this many complete iterations; --min-iterations by default.",
        kind=int,
        least=1,
        most=MAX_ITERATIONS,
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
        is_free=True,
    )
    layers: Any = option(
        None,
        "Record the embedding's output and those of all decoder layers ('all'), or of some: 0,30,61. "
        "Linear and attention layers are left out unless --select names them.",
        is_free=True,
        metavar="LAYERS",
    )
    keep: str = option(
        "values", "What is kept of each tensor, unless a rule says otherwise.", choices=tuple(map(str, Keep))
    )
    with_master: bool = option(
        False,  # noqa: FBT003  (the default)
        "Record the weights that the optimizer updates, and their reduced gradients, too.",
    )
    advance_on: Any = option(
        "optimizer",
        "What ends an iteration: optimizer (the first that steps), optimizer:N (the N-th, from 0), forward "
        "(each outermost forward pass), or step (the script calls capture.step()).",
        is_free=True,
        metavar="EVENT",
    )
    sample_dim: int | None = option(
        None, "Dimension of activations that holds samples; found from the batch by default.", kind=int, least=0
    )
    compiled: str = option(
        "graph",
        "How compiled code is recorded: inside of its graphs, or run eagerly in captured iterations.",
        choices=("graph", "eager"),
    )
    policy: str = option(
        Policy.BLOCK.value,
        "What to do when an iteration does not fit into the budget, once the minimum is stored.",
        choices=tuple(policy.value for policy in Policy),
    )
    host_budget_nbytes: int | None = option(
        None,
        "Host memory for staged tensors, in bytes per rank; from the free memory by default.",
        kind=int,
        least=1 << 20,
    )
    block_timeout_seconds: float = option(
        120.0,
        "Longest wait of the training for the writer, after which capture disables itself, and of the writer for a "
        "store that does not answer, after which the iteration fails.",
        least=0,
    )
    finish_timeout_seconds: float = option(300.0, "Longest wait at the end for what is not stored yet.", least=0)
    compression: str = option(
        Compression.NONE.value,
        "How values are compressed: zstd leaves about 80 % of bf16, blosc (bits shuffled first) 70 %.",
        choices=tuple(compression.value for compression in Compression),
    )
    keep_last: int | None = option(
        None,
        "Keep the last N complete iterations and delete older ones while --max-iterations of them are recorded.",
        kind=int,
        least=1,
    )
    stop_when_stored: bool = option(
        False,  # noqa: FBT003  (the default)
        "End the training, with exit code 0 and before the same iteration on all ranks, once the guaranteed "
        "iterations (with --max-iterations so many) are stored complete.",
    )
    record_last: int | None = option(
        None,
        "Flight recorder: store nothing until something happens on any rank, then on all ranks the iteration in which "
        "it did, the last N recorded before it and the one after it.",
        kind=int,
        least=1,
    )
    trigger: Any = option(
        (),
        "With --record-last: a metric's limit, as in \"absmax > 448 where tensor_name == 'input'\"; besides it NaN, "
        "infinities, errors and crashes always count.",
        takes_several=True,
        metavar="RULE",
    )
    spill_dir: str | None = option(
        None, "Directory that takes an iteration when the store cannot, until 'ranktape push' brings it there."
    )
    strict: bool = option(False, "End the training with an error when the capture fails inside.")  # noqa: FBT003
    manual: bool = option(False, "Attach no hooks: record only what save_tensor is given.")  # noqa: FBT003
    resume: bool = option(False, "Continue the run that is at the URL, as a new attempt.")  # noqa: FBT003
    overwrite: bool = option(False, "Delete the run that is at the URL first.")  # noqa: FBT003
    storage_options: Mapping[str, Any] | None = option(
        None,
        'JSON object for fsspec, such as \'{"endpoint_url": "http://host:9000"}\'.',
        is_secret=True,
        is_free=True,
        metavar="JSON",
    )
    layer_offset: int = 0
    """Added to the index of each layer on a later pipeline stage. Only in Python, because each rank has its own."""
    adds: bool = False
    """Whether the records of a run at the URL are shown with the new ones, as in a folder of the legacy tools."""

    def __post_init__(self) -> None:
        """Check every value, including the rules.

        Raises:
            UsageError: a value is not allowed.
        """
        for setting in SETTINGS:
            setting.check(getattr(self, setting.name))
        if self.layer_offset < 0:
            raise UsageError(f"layer_offset {self.layer_offset} is not allowed: give a whole number from 0 on")
        if self.max_iterations is not None and self.max_iterations < self.min_iterations:
            raise UsageError(
                f"--max-iterations {self.max_iterations} is below --min-iterations {self.min_iterations}: raise it"
            )
        if self.keep_last is not None and self.keep_last < self.min_iterations:
            raise UsageError(
                f"--keep-last {self.keep_last} is below --min-iterations {self.min_iterations}, which are guaranteed: "
                f"raise it"
            )
        self._check_recorder()
        if self.quant_type is not None:
            check_term(self.quant_type, field="quant_type")
        self._check_advance_on()
        given: Any = self.storage_options  # callers without type checks pass anything
        if not isinstance(given, Mapping | None):
            kind = type(given).__name__
            raise UsageError(f"--storage-options is a {kind}: give an object such as {{'anon': True}}")
        try:
            json.dumps(given)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"--storage-options cannot be passed on as JSON ({error}): give text and numbers"
            ) from error
        if self.resume + self.overwrite + self.adds > 1:
            raise UsageError("--resume and --overwrite exclude each other: give one")
        _ = self.triggers
        if is_given(self.select) or is_given(self.layers):
            from ranktape.capture.settings.rules import read_numbers

            read_numbers("layers", self.layers)
            _ = self.wanted_modes

    def _check_recorder(self) -> None:
        """Check the values that depend on whether this is a flight recorder."""
        if self.record_last is None:
            if is_given(self.trigger):
                raise UsageError("--trigger is for a flight recorder: add --record-last, the iterations that it holds")
            return
        counts = {"--max-iterations": self.max_iterations, "--keep-last": self.keep_last}
        if self.min_iterations != 1:
            counts["--min-iterations"] = self.min_iterations
        for flag, count in counts.items():
            if count is not None:
                raise UsageError(
                    f"{flag} {count} counts iterations that are stored in any case, and --record-last stores none "
                    f"until something happens: leave one of them out"
                )
        if self.stop_when_stored:
            raise UsageError(
                "--stop-when-stored waits for guaranteed iterations, and --record-last has none: leave one of them out"
            )
        if self.manual:
            raise UsageError("--record-last holds what hooks see, and --manual has none: leave one of them out")

    def _check_advance_on(self) -> None:
        value, events, most_digits = self.advance_on, ("optimizer", "forward", "step"), 9
        name, _, number = value.partition(":") if isinstance(value, str) else ("", "", "")
        is_numbered = name == "optimizer" and number.isdecimal() and len(number) <= most_digits
        if value not in events and not is_numbered and not callable(getattr(value, "step", None)):
            raise UsageError(
                f"--advance-on {value!r:.60} is not allowed: give {', '.join(events)}, optimizer:N, or an optimizer"
            )

    def __getstate__(self) -> dict[str, Any]:
        """The fields without the cached properties: the writer needs no parsed rules."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}

    @functools.cached_property
    def rules(self) -> tuple[CaptureRule, ...]:
        """The rules; the first that matches a tensor decides. There is at least one."""
        from ranktape.capture.settings.rules import read_rules

        return read_rules(self.select, keep=self.keep, outputs=LAYER_OUTPUTS if self.wants_layers else ())

    @functools.cached_property
    def triggers(self) -> tuple[SiteTrigger, ...]:
        """The limits of metrics at which a flight recorder stores the iterations that it holds."""
        if not is_given(self.trigger):
            return ()
        from ranktape.capture.flight.rules import read_site_triggers

        return read_site_triggers(self.trigger)

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
        if self.record_last is not None:
            return 0
        return self.min_iterations if self.max_iterations is None else self.max_iterations

    @property
    def wants_layers(self) -> bool:
        """Whether the outputs of the embedding and of decoder layers are recorded."""
        return is_given(self.layers) and self.layers is not False

    @functools.cached_property
    def _written(self) -> list[CaptureRule]:
        """The rules of `select`, without those that follow from other settings."""
        return [rule for rule in self.rules if rule.number]

    @functools.cached_property
    def wanted_layer_types(self) -> tuple[str, ...]:
        """The layer types to attach to, as names or globs."""
        outputs = LAYER_OUTPUTS if self.wants_layers else ()
        usual = () if outputs else DEFAULT_LAYER_TYPES
        found = [one for rule in self._written for one in rule.texts("layer_type") or usual] if self._written else usual
        return tuple(dict.fromkeys((*found, *outputs)))

    def wants_layer_type(self, layer_type: str) -> bool:
        """Whether to attach to layers of that type."""
        return _fits(self.wanted_layer_types, layer_type)

    def names_layer_type(self, layer_type: str) -> bool:
        """Whether a rule names that layer type, so that it is not selected by `layers` alone."""
        return any(_fits(rule.texts("layer_type"), layer_type) for rule in self._written)

    def wants_module(self, path: str) -> bool:
        """Whether to attach to the module with that path."""
        modules = [rule.texts("module") for rule in self._written]
        return not modules or any(not texts or _fits(texts, path) for texts in modules)

    @property
    def named_modules(self) -> list[str]:
        """The globs of modules of all rules; empty if a rule names no modules."""
        modules = [rule.texts("module") for rule in self._written]
        return [one for texts in modules for one in texts] if all(modules) else []

    @property
    def names_mode(self) -> bool:
        """Whether a rule selects by mode."""
        return any("mode" in rule.names for rule in self.rules)

    @functools.cached_property
    def wanted_modes(self) -> tuple[str, ...]:
        """The modes of the passes that are recorded. A rule without one means `train`, or both if `layers` is given.

        Raises:
            UsageError: a rule matches no mode.
        """
        modes = tuple(map(str, Mode))
        usual = modes if self.wants_layers else (Mode.TRAIN.value,)
        if not self.names_mode:
            return usual
        from ranktape.storage.query.columns import StringColumn

        column = StringColumn.of(modes)
        found: set[str] = set()
        for rule in self.rules:
            fitting = rule.can_hold(lambda _: column, known={"mode"}, num_rows=len(modes))
            own = [mode for mode, fits_it in zip(modes, fitting, strict=True) if fits_it]
            if not own:
                raise UsageError(
                    f"--select, rule {rule.number}, is for passes in neither train nor eval mode: change it"
                )
            found.update(own if "mode" in rule.names else usual)
        return tuple(mode for mode in modes if mode in found)

    def asked(self, settings: Mapping[str, Any]) -> CaptureOptions:
        """The options for an iteration that was requested during the training; its settings, if any, select in it."""
        if unknown := sorted(settings.keys() - set(ASKED_SETTINGS)):
            raise UsageError(f"{unknown[0]!r:.60} selects nothing: {nearest(unknown[0], ASKED_SETTINGS)}")
        own = {"select": (), "keep": Keep.VALUES.value, "layers": None, **settings} if settings else {}
        return dataclasses.replace(self, **own)

    def plain(self) -> dict[str, Any]:
        """The settings as values for JSON, without the script's own classes, for another process."""
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        written: dict[str, Any] = json.loads(json.dumps(values, default=_plain))
        return written

    def document(self) -> dict[str, Any]:
        """The settings for the run's document: values for JSON, without secrets."""
        public = self.plain() | {"min_iterations": self.guaranteed_iterations}
        del public["storage_options"]
        return public


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
    dataclasses.replace(item.metadata["setting"], name=item.name)
    for item in dataclasses.fields(CaptureOptions)
    if "setting" in item.metadata
)
"""All settings, in the order of `CaptureOptions`."""

ASKED_SETTINGS = ("select", "keep")
"""The settings that a request for iterations of a running training may give."""


def check_layer_types(options: CaptureOptions, *, known: Sequence[str]) -> None:
    """Check that the wanted layer types are known.

    An unknown one is allowed if it resembles no known one and not all are unknown: it may be recorded by hand.

    Raises:
        UsageError: an unknown layer type is not allowed.
    """
    unknown = (
        []
        if options.manual
        else [one for one in options.wanted_layer_types if not any(_fits((one,), each) for each in known)]
    )
    for pattern in unknown:
        hint = nearest(pattern, known, otherwise="give one of", cutoff=0.6)
        if hint.startswith("did you") or len(unknown) == len(options.wanted_layer_types):
            raise UsageError(f"no kind of layer is called {pattern!r:.60} (--select layer_type=...): {hint}")


def _fits(patterns: tuple[str, ...], text: str) -> bool:
    from ranktape.capture.settings.rules import fits  # imports numpy, which help does not need

    return fits(patterns, text)


def _plain(value: Any) -> Any:
    """A value for JSON instead of one that JSON cannot represent."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value) if isinstance(value, range | slice | os.PathLike) else type(value).__name__
