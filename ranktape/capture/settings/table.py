"""The settings of a capture: one table from which Python, the command line, a file and the environment take them.

A setting has one name everywhere: `host_budget_nbytes` in Python is `--host-budget-nbytes` on a command line.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ranktape.capture.settings.setting import Setting, filters, is_given, option, switch
from ranktape.errors import UsageError
from ranktape.storage.format.record_info import Compression, Keep, Mode, check_term
from ranktape.storage.recording.stack import STORE_CONCURRENCY

MAX_ITERATIONS = 100_000
"""Iterations that a capture may guarantee or go on to: the list of them is told to every rank as a whole."""


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
class Settings:
    """The settings of a capture, each checked by itself; `CaptureOptions` has checked the rules among them, too.

    Raises:
        UsageError: a value is outside of what its field allows; the message names the option.
    """

    # torchrun takes --start, wherever it stands, for an abbreviation of two options of its own.
    start: int = option(0, "First iteration to capture, counted from 0.", least=0, long_name="start_at")
    every: int = option(1, "Capture each N-th iteration from the first one on.", least=1)
    min_iterations: int = option(
        1, "Iterations guaranteed to be stored complete from all ranks.", least=1, most=MAX_ITERATIONS
    )
    max_iterations: int | None = option(
        None,
        "Go on to this many complete iterations; the guaranteed minimum by default.",
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
    module: Any = filters("Only modules of these dotted paths, such as 'layers.*.attn.*'.", metavar="GLOB")
    layer_type: Any = filters(
        "Only these kinds of layers: linear, attention, embedding, hidden, or one of your own; "
        "linear and attention by default.",
        metavar="TYPE",
    )
    layer_idx: Any = filters("Only these layers of the stack, as in 0-3 or 0:32:8; -1 is outside of it.")
    layer_stack: Any = filters("Only layers of these stacks, where a model has several: decoder.block, '*encoder*'.")
    operation: Any = filters("Only forward, or only backward.")
    phase: Any = filters("Only pre, or only post.")
    component: Any = filters("Only these components: FA, linear.")
    tensor_name: Any = filters("Only these tensors, such as 'grad_*'.")
    dtype: Any = filters("Only tensors of these dtypes: bfloat16.")
    compute_dtype: Any = filters("Only what is computed in these dtypes.")
    rank: Any = filters("Only these ranks: 0-3.")
    microbatch: Any = filters("Only these passes of an iteration: 0.")
    call: Any = filters("Only these calls of a module within a pass: 0.")
    iteration: Any = filters("Only these of the iterations that --start-at and --every name: 100-199.")
    mode: Any = filters(
        "Passes in training mode, in evaluation mode, or both; by default what --where and --select name, "
        "else train, and both with --layers.",
        choices=tuple(map(str, Mode)),
    )
    where: str | None = option(
        None, "Only tensors for which it holds, as in \"layer_idx < 4 or phase == 'post'\".", metavar="EXPR"
    )
    samples: Any = option(
        None,
        "Samples kept of activations, counted within the batch: 0, 0-3 or 0:8:2; all by default.",
        is_free=True,
        metavar="SAMPLES",
    )
    keep: str = option("values", "What is kept of each tensor.", choices=tuple(map(str, Keep)))
    select: Any = option(
        (),
        "Fields, cadence and what is kept, as in 'layer_type=attention every=100 keep=histogram'; "
        "of several rules the first that fits a tensor decides, and what none fits is not captured.",
        is_multiple=True,
        metavar="RULE",
        is_free=True,
    )
    layers: Any = option(
        None,
        "Record the embedding's output and those of all decoder layers ('all'), or of some: 0,30,61. "
        "Linear and attention layers are left out unless --layer-type names them.",
        is_free=True,
        metavar="LAYERS",
    )
    layer_offset: int = option(0, "Added to the index of each layer, on a later pipeline stage.", least=0)
    # torchrun takes --master for an abbreviation of several options of its own.
    master: bool = switch(
        "Record the weights that the optimizer updates, and their reduced gradients, too.", long_name="with_master"
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
        "What to do, once the minimum is there, when an iteration does not fit into the budget.",
        choices=tuple(policy.value for policy in Policy),
    )
    host_budget_nbytes: int | None = option(
        None,
        "Host memory for staged tensors, in bytes per rank; from the free memory by default.",
        kind=int,
        least=1 << 20,
    )
    begin_timeout_seconds: float | None = option(
        None,
        "Longest wait of a rank at its first forward for rank 0 to reach its own; then no rank is recorded and "
        "the training goes on. By default half of what a collective of the training waits.",
        kind=float,
        least=0,
    )
    block_timeout_seconds: float = option(
        120.0, "Longest wait of the training for the writer; then capture disables itself.", least=0
    )
    finish_timeout_seconds: float = option(300.0, "Longest wait at the end for what is not stored yet.", least=0)
    store_timeout_seconds: float = option(
        120.0,
        "Longest time that a write is tried again while the store does not answer; then its iteration fails.",
        least=0,
    )
    store_concurrency: int = option(
        STORE_CONCURRENCY,
        "Tensors, or stacks of small ones, that each rank sends to the store at the same time.",
        least=1,
    )
    compression: str = option(
        Compression.NONE.value,
        "How values are packed: zstd leaves about four fifths of bf16, blosc (bits shuffled first) seven tenths.",
        choices=tuple(compression.value for compression in Compression),
    )
    keep_last: int | None = option(
        None,
        "Delete all but the last N complete iterations, as --max-iterations of them come: never more than N are "
        "there, and one while the next is committed; all stay by default.",
        kind=int,
        least=1,
    )
    stop_when_stored: bool = switch(
        "End the training, with exit code 0 and before the same iteration on all ranks, once the guaranteed "
        "iterations (with --max-iterations so many) are stored complete."
    )
    record_last: int | None = option(
        None,
        "Flight recorder: store nothing until something happens on any rank, then on all ranks the iteration in which "
        "it did and the last N recorded before it.",
        kind=int,
        least=1,
    )
    record_after: int = option(1, "With --record-last: iterations stored after the one in which it happened.", least=0)
    trigger: Any = option(
        (),
        "With --record-last: a metric's limit, as in \"absmax > 448 where tensor_name == 'input'\"; besides it NaN, "
        "infinities, errors and crashes always count.",
        is_multiple=True,
        metavar="RULE",
    )
    spill_dir: str | None = option(
        None, "Directory that takes an iteration when the store cannot, until 'ranktape push' brings it there."
    )
    strict: bool = switch("End the training with an error when the capture fails inside.")
    capture_config: str | None = option(
        None, "YAML or TOML file with settings by these names; the command line has the last word.", metavar="FILE"
    )
    manual: bool = switch("Attach no hooks: record only what save_tensor is given.")
    resume: bool = switch("Continue the run that is at the URL, as a new attempt.")
    overwrite: bool = switch("Delete the run that is at the URL first.")
    add: bool = switch("Add to the run that is at the URL: what it holds is shown beside what comes.")
    storage_options: Mapping[str, Any] | None = option(
        None,
        'JSON object for fsspec, such as \'{"endpoint_url": "http://host:9000"}\'.',
        is_secret=True,
        is_free=True,
        metavar="JSON",
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
        self._check_recorder()
        if self.quant_type is not None:
            check_term(self.quant_type, field="quant_type")
        _check_advance_on(self.advance_on)
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
        if self.resume + self.overwrite + self.add > 1:
            raise UsageError("--resume, --overwrite and --add exclude each other: give one")

    @property
    def guaranteed_iterations(self) -> int:
        """How many iterations are guaranteed to be stored complete; a flight recorder guarantees none."""
        return self.min_iterations if self.record_last is None else 0

    @property
    def target_iterations(self) -> int:
        """How many complete iterations end the capture; a flight recorder plans none, and does not end for any."""
        if self.record_last is not None:
            return 0
        return self.min_iterations if self.max_iterations is None else self.max_iterations

    def _check_recorder(self) -> None:
        """Let pass what fits a flight recorder, or a capture that is none."""
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

    @property
    def selection_flags(self) -> list[str]:
        """The options that were given and leave tensors out."""
        return [
            setting.flag
            for setting in SETTINGS
            if (setting.is_filter or setting.name in {"where", "select", "samples"})
            and is_given(getattr(self, setting.name))
        ]

    @property
    def wants_layers(self) -> bool:
        """Whether the outputs of the embedding and of decoder layers are recorded."""
        return is_given(self.layers) and self.layers is not False


def _check_advance_on(value: Any) -> None:
    events, most_digits = ("optimizer", "forward", "step"), 9
    name, _, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    is_numbered = name == "optimizer" and number.isdecimal() and len(number) <= most_digits
    if value not in events and not is_numbered and not callable(getattr(value, "step", None)):
        raise UsageError(
            f"--advance-on {value!r:.60} is not allowed: give {', '.join(events)}, optimizer:N, or an optimizer"
        )


SETTINGS: Sequence[Setting] = tuple(
    dataclasses.replace(item.metadata["setting"], name=item.name) for item in dataclasses.fields(Settings)
)
"""Every setting, in the order of `Settings`."""

ASKED_SETTINGS = tuple(
    setting.name
    for setting in SETTINGS
    if (setting.is_filter and setting.name not in {"iteration", "mode"})
    or setting.name in {"where", "samples", "keep", "select"}
)
"""The settings that may be given for iterations that somebody asks for while the training runs."""
