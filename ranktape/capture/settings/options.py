"""Which settings does a capture have, and how do Python, argparse and click spell them?

One table, `CaptureOptions`; every door is generated from it, so a setting has one name everywhere:
`host_budget_nbytes` in Python is `--host-budget-nbytes` on a command line.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ranktape.capture.settings.setting import Setting, is_given, option, setting_of
from ranktape.errors import UsageError
from ranktape.storage.format.documents import Compression
from ranktape.storage.format.record_info import Keep, Mode, check_term
from ranktape.storage.places.urls import parse_storage_options
from ranktape.storage.recording.stack import STORE_CONCURRENCY


class Policy(enum.StrEnum):
    """What happens when an iteration does not fit into the host budget, because the store is slow or does not answer.

    Until the guaranteed minimum is stored it is always `block`.
    """

    BLOCK = "block"
    """The training waits for the writer, at most `block_timeout_seconds`."""
    SKIP = "skip"
    """The whole iteration is skipped on every rank, and the run says so."""
    HISTOGRAM = "histogram"
    """While the training waits, large tensors are counted instead of stored, and their records say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """The settings of a capture, checked.

    Raises:
        UsageError: a value is outside of what its field allows; the message names the option.
    """

    # torchrun takes --start, wherever it stands, for an abbreviation of two options of its own.
    start: int = option(0, kind=int, least=0, flag="--start-at", help="First iteration to capture, counted from 0.")
    every: int = option(1, kind=int, least=1, help="Capture each N-th iteration from the first one on.")
    min_iterations: int = option(
        1, kind=int, least=1, help="Iterations guaranteed to be stored complete from all ranks."
    )
    max_iterations: int | None = option(
        None, kind=int, least=1, help="Go on to this many complete iterations; the guaranteed minimum by default."
    )
    first_iteration: int = option(
        0,
        kind=int,
        least=0,
        help="Number of the first training step, after a checkpoint; none before it is captured.",
    )
    quant_type: str | None = option(
        None, metavar="TAG", help="Tag: what the run computes in (bf16, mxfp8, ...); the compute dtype by default."
    )
    modules: Any = option(
        (), filters="module", metavar="GLOB", help="Only modules of these dotted paths, such as 'layers.*.attn.*'."
    )
    layer_types: Any = option(
        (),
        filters="layer_type",
        metavar="TYPE",
        help="Only these kinds of layers: linear, attention, embedding, hidden, or one of your own; "
        "linear and attention by default.",
    )
    layer_idx: Any = option(
        (), filters="layer_idx", help="Only these layers of the stack, as in 0-3 or 0:32:8; -1 is outside of it."
    )
    layer_stack: Any = option(
        (),
        filters="layer_stack",
        help="Only layers of these stacks, where a model has several: decoder.block, '*encoder*'.",
    )
    operation: Any = option((), filters="operation", help="Only forward, or only backward.")
    phase: Any = option((), filters="phase", help="Only pre, or only post.")
    component: Any = option((), filters="component", help="Only these components: FA, linear.")
    tensor_name: Any = option((), filters="tensor_name", help="Only these tensors, such as 'grad_*'.")
    dtype: Any = option((), filters="dtype", help="Only tensors of these dtypes: bfloat16.")
    compute_dtype: Any = option((), filters="compute_dtype", help="Only what is computed in these dtypes.")
    rank: Any = option((), filters="rank", help="Only these ranks: 0-3.")
    microbatch: Any = option((), filters="microbatch", help="Only these passes of an iteration: 0.")
    call: Any = option((), filters="call", help="Only these calls of a module within a pass: 0.")
    iteration: Any = option(
        (), filters="iteration", help="Only these of the iterations that --start-at and --every name: 100-199."
    )
    modes: Any = option(
        (),
        filters="mode",
        choices=tuple(map(str, Mode)),
        help="Passes in training mode, in evaluation mode, or both; by default what --where and --select name, "
        "else train, and both with --layers.",
    )
    where: str | None = option(
        None, metavar="EXPR", help="Only tensors for which it holds, as in \"layer_idx < 4 or phase == 'post'\"."
    )
    samples: Any = option(
        None,
        is_free=True,
        metavar="SAMPLES",
        help="Samples kept of activations, counted within the batch: 0, 0-3 or 0:8:2; all by default.",
    )
    keep: str = option("values", choices=tuple(map(str, Keep)), help="What is kept of each tensor.")
    selections: Any = option(
        (),
        multiple=True,
        flag="--select",
        metavar="RULE",
        is_free=True,
        help="Fields, cadence and what is kept, as in 'layer_type=attention every=100 keep=histogram'; "
        "of several rules the first that fits a tensor decides, and what none fits is not captured.",
    )
    layers: Any = option(
        None,
        is_free=True,
        metavar="LAYERS",
        help="Record the embedding's output and those of all decoder layers ('all'), or of some: 0,30,61. "
        "Linear and attention layers are left out unless --layer-type names them.",
    )
    layer_offset: int = option(
        0, kind=int, least=0, help="Added to the index of each layer, on a later pipeline stage."
    )
    master: bool = option(
        # torchrun takes --master for an abbreviation of several options of its own.
        default=False,
        kind=bool,
        flag="--with-master",
        help="Record the weights that the optimizer updates, and their reduced gradients, too.",
    )
    advance_on: Any = option(
        "optimizer",
        is_free=True,
        metavar="EVENT",
        help="What ends an iteration: optimizer (the first that steps), optimizer:N (the N-th, from 0), forward "
        "(each outermost forward pass), or step (the script calls capture.step()).",
    )
    sample_dim: int | None = option(
        None, kind=int, least=0, help="Dimension of activations that holds samples; found from the batch by default."
    )
    policy: str = option(
        Policy.BLOCK.value,
        choices=tuple(policy.value for policy in Policy),
        help="What to do, once the minimum is there, when an iteration does not fit into the budget.",
    )
    host_budget_nbytes: int | None = option(
        None,
        kind=int,
        least=1 << 20,
        help="Host memory for staged tensors, in bytes per rank; from the free memory by default.",
    )
    begin_timeout_seconds: float | None = option(
        None,
        kind=float,
        least=0,
        help="Longest wait of a rank at its first forward for rank 0 to reach its own; then no rank is recorded and "
        "the training goes on. By default half of what a collective of the training waits.",
    )
    block_timeout_seconds: float = option(
        120.0, kind=float, least=0, help="Longest wait of the training for the writer; then capture disables itself."
    )
    finish_timeout_seconds: float = option(
        300.0, kind=float, least=0, help="Longest wait at the end for what is not stored yet."
    )
    store_timeout_seconds: float = option(
        120.0,
        kind=float,
        least=0,
        help="Longest time that a write is tried again while the store does not answer; then its iteration fails.",
    )
    store_concurrency: int = option(
        STORE_CONCURRENCY,
        kind=int,
        least=1,
        help="Tensors, or stacks of small ones, that each rank sends to the store at the same time.",
    )
    compression: str = option(
        Compression.NONE.value,
        choices=tuple(compression.value for compression in Compression),
        help="How values are packed: zstd leaves about four fifths of bf16, blosc (bits shuffled first) seven tenths.",
    )
    keep_last: int | None = option(
        None,
        kind=int,
        least=1,
        help="Delete all but the last N complete iterations, as --max-iterations of them come: never more than N are "
        "there, and one while the next is committed; all stay by default.",
    )
    ring_dir: str | None = option(
        None, help="Directory for the staged tensors, from which 'ranktape recover' stores them should all be killed."
    )
    spill_dir: str | None = option(
        None, help="Directory that takes an iteration when the store cannot, until 'ranktape push' brings it there."
    )
    strict: bool = option(
        default=False, kind=bool, help="End the training with an error when the capture fails inside."
    )
    capture_config: str | None = option(
        None, metavar="FILE", help="YAML or TOML file with settings by these names; the command line has the last word."
    )
    manual: bool = option(default=False, kind=bool, help="Attach no hooks: record only what save_tensor is given.")
    resume: bool = option(default=False, kind=bool, help="Continue the run that is at the URL, as a new attempt.")
    overwrite: bool = option(default=False, kind=bool, help="Delete the run that is at the URL first.")
    add: bool = option(
        default=False, kind=bool, help="Add to the run that is at the URL: what it holds is shown beside what comes."
    )
    storage_options: Mapping[str, Any] | None = option(
        None,
        is_secret=True,
        is_free=True,
        metavar="JSON",
        help='JSON object for fsspec, such as \'{"endpoint_url": "http://host:9000"}\'.',
    )

    def __post_init__(self) -> None:
        """Check every value against what its field allows."""
        for setting in SETTINGS:
            setting.check(getattr(self, setting.name))
        if self.max_iterations is not None and self.max_iterations < self.min_iterations:
            raise UsageError(
                f"--max-iterations {self.max_iterations} is below --min-iterations {self.min_iterations}: raise it"
            )
        if self.keep_last is not None and self.keep_last < self.min_iterations:
            raise UsageError(
                f"--keep-last {self.keep_last} is below --min-iterations {self.min_iterations}, which are guaranteed: "
                f"raise it"
            )
        if self.quant_type is not None:
            check_term(self.quant_type, field="quant_type")
        check_advance_on(self.advance_on)
        given: Any = self.storage_options  # callers without type checks pass anything
        if not isinstance(given, Mapping | None):
            kind = type(given).__name__
            raise UsageError(f"--storage-options is a {kind}: give an object such as {{'anon': True}}")
        try:
            json.dumps(self.storage_options)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"--storage-options cannot be passed on as JSON ({error}): give text and numbers"
            ) from error
        if self.resume + self.overwrite + self.add > 1:
            raise UsageError("--resume, --overwrite and --add exclude each other: give one")
        if self.selects or is_given(self.layers):
            from ranktape.capture.settings.rules import check_selection

            check_selection(self)

    @property
    def target_iterations(self) -> int:
        """How many complete iterations end the capture."""
        return self.min_iterations if self.max_iterations is None else self.max_iterations

    @property
    def selects(self) -> bool:
        """Whether anything of what the hooks see is left out, or kept in another form."""
        return self.keep != "values" or bool(self.selection_flags)

    @property
    def selection_flags(self) -> list[str]:
        """The options that were given and leave tensors out."""
        return [
            setting.flag
            for setting in SETTINGS
            if (setting.filters or setting.name in {"where", "selections", "samples"})
            and is_given(getattr(self, setting.name))
        ]

    @property
    def wants_layers(self) -> bool:
        """Whether the outputs of the embedding and of decoder layers are recorded."""
        return is_given(self.layers) and self.layers is not False

    @property
    def wanted_layer_types(self) -> tuple[str, ...]:
        """The kinds of layers to attach to: names or globs."""
        from ranktape.capture.settings.rules import wanted_layer_types

        return wanted_layer_types(self)

    def wants_layer_type(self, layer_type: str) -> bool:
        """Whether layers of that kind are attached to."""
        from ranktape.capture.settings.rules import fits

        return fits(self.wanted_layer_types, layer_type)

    def wants_module(self, path: str) -> bool:
        """Whether modules of that path are attached to."""
        from ranktape.capture.settings.rules import fits, listed

        return not is_given(self.modules) or fits(tuple(listed(self.modules)), path)

    def names_layer_type(self, layer_type: str) -> bool:
        """Whether layers of that kind are asked for by `layer_types`, and not by `layers` alone."""
        from ranktape.capture.settings.rules import fits, listed

        return is_given(self.layer_types) and fits(tuple(listed(self.layer_types)), layer_type)

    @property
    def wanted_modes(self) -> tuple[str, ...]:
        """The modes of the passes that are recorded: `train`, `eval`, or both."""
        from ranktape.capture.settings.rules import modes_of

        return modes_of(self)

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
    given = {
        setting.name: setting.from_texts(values[setting.name])
        for setting in SETTINGS
        if is_given(values.get(setting.name))
    }
    if isinstance(given.get("storage_options"), str):
        given["storage_options"] = parse_storage_options(given["storage_options"])
    return given


def check_advance_on(value: Any) -> None:
    """Let the name of an event pass, or an optimizer.

    Raises:
        UsageError: it is neither.
    """
    events = ("optimizer", "forward", "step")
    name, _, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    is_numbered = name == "optimizer" and number.isdecimal() and len(number) < _MAX_DIGITS
    if value not in events and not is_numbered and not callable(getattr(value, "step", None)):
        raise UsageError(
            f"--advance-on {value!r:.60} is not allowed: give {', '.join(events)}, optimizer:N, or an optimizer"
        )


_MAX_DIGITS = 10


def _plain(value: Any) -> Any:
    """What JSON has no word for, in one that it has."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return value.tolist() if hasattr(value, "tolist") else str(value) if _is_data(value) else type(value).__name__


def _is_data(value: Any) -> bool:
    return isinstance(value, range | slice | os.PathLike)


SETTINGS: Sequence[Setting] = tuple(setting_of(item) for item in dataclasses.fields(CaptureOptions))
"""Every setting, in the order of `CaptureOptions`."""
