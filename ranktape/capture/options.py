"""Which settings does a capture have, and how do Python, argparse and click spell them?

One table, `CaptureOptions`; every door is generated from it, so a setting has one name everywhere:
`host_budget_nbytes` in Python is `--host-budget-nbytes` on a command line.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ranktape.errors import UsageError
from ranktape.storage.backends.urls import parse_storage_options
from ranktape.storage.documents import Compression
from ranktape.storage.record import check_term


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
class Setting:
    """How one field of `CaptureOptions` is written on a command line."""

    name: str
    """The field's name."""
    flag: str
    """The long option."""
    kind: type[int | float | str | bool]
    """What the text is parsed into; `bool` is a flag without a value."""
    multiple: bool
    """May be given several times."""
    choices: tuple[str, ...]
    """The allowed values; empty where any is."""
    default: Any
    """What holds when the option is not given."""
    least: float | None
    """The smallest number allowed; None where any is, and for text."""
    help: str
    """One sentence for the help page."""

    def check(self, value: Any) -> None:
        """Let a value pass that the setting allows.

        Raises:
            UsageError: it does not; the message names the option.
        """
        if self.least is not None and value is not None:
            is_number: Any = isinstance(value, int | float)
            if not (is_number and value >= self.least):
                raise UsageError(f"{self.flag} {value} is not allowed: give {self.least} or more")
        for item in value if self.multiple else (value,):
            if self.choices and item not in self.choices:
                raise UsageError(f"{self.flag} {item} is not allowed: give one of {', '.join(self.choices)}")


def _option(
    default: Any,
    *,
    help: str,  # noqa: A002  (argparse's and click's word)
    kind: type = str,
    multiple: bool = False,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    flag: str | None = None,
    is_secret: bool = False,
) -> Any:
    metadata = {
        "help": help,
        "kind": kind,
        "multiple": multiple,
        "choices": choices,
        "least": least,
        "flag": flag,
    }
    return field(default=default, metadata=metadata, repr=not is_secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """The settings of a capture, checked.

    Raises:
        UsageError: a value is outside of what its field allows; the message names the option.
    """

    # torchrun takes --start, wherever it stands, for an abbreviation of two options of its own.
    start: int = _option(0, kind=int, least=0, flag="--start-at", help="First iteration to capture, counted from 0.")
    every: int = _option(1, kind=int, least=1, help="Capture each N-th iteration from the first one on.")
    min_iterations: int = _option(
        1, kind=int, least=1, help="Iterations guaranteed to be stored complete from all ranks."
    )
    max_iterations: int | None = _option(
        None, kind=int, least=1, help="Go on to this many complete iterations; the guaranteed minimum by default."
    )
    first_iteration: int = _option(0, kind=int, least=0, help="Number of the first training step, after a checkpoint.")
    quant_type: str | None = _option(
        None, help="Tag: what the run computes in (bf16, mxfp8, ...); the compute dtype by default."
    )
    modules: tuple[str, ...] = _option(
        (), multiple=True, help="Glob over module paths, such as 'layers.*.attn.*'; all by default."
    )
    layer_types: tuple[str, ...] = _option(
        (), multiple=True, choices=("linear", "attention"), help="Kinds of layers; all by default."
    )
    sample_dim: int | None = _option(
        None, kind=int, least=0, help="Dimension of activations that holds samples; found from the batch by default."
    )
    policy: str = _option(
        Policy.BLOCK.value,
        choices=tuple(policy.value for policy in Policy),
        help="What to do, once the minimum is there, when an iteration does not fit into the budget.",
    )
    host_budget_nbytes: int | None = _option(
        None,
        kind=int,
        least=1 << 20,
        help="Host memory for staged tensors, in bytes per rank; from the free memory by default.",
    )
    block_timeout_seconds: float = _option(
        120.0, kind=float, least=0, help="Longest wait of the training for the writer; then capture disables itself."
    )
    finish_timeout_seconds: float = _option(
        300.0, kind=float, least=0, help="Longest wait at the end for what is not stored yet."
    )
    store_timeout_seconds: float = _option(
        120.0,
        kind=float,
        least=0,
        help="Longest time that a write is tried again while the store does not answer; then its iteration fails.",
    )
    compression: str = _option(
        Compression.NONE.value,
        choices=tuple(compression.value for compression in Compression),
        help="How values are packed.",
    )
    keep_last: int | None = _option(
        None,
        kind=int,
        least=1,
        help="Delete all but the last N complete iterations, as --max-iterations of them come; all stay by default.",
    )
    ring_dir: str | None = _option(
        None, help="Directory for the staged tensors, from which 'ranktape recover' stores them should all be killed."
    )
    spill_dir: str | None = _option(
        None, help="Directory that takes an iteration when the store cannot, until 'ranktape push' brings it there."
    )
    manual: bool = _option(default=False, kind=bool, help="Attach no hooks: record only what save_tensor is given.")
    resume: bool = _option(default=False, kind=bool, help="Continue the run that is at the URL, as a new attempt.")
    overwrite: bool = _option(default=False, kind=bool, help="Delete the run that is at the URL first.")
    storage_options: Mapping[str, Any] | None = _option(
        None, is_secret=True, help='JSON object for fsspec, such as \'{"endpoint_url": "http://host:9000"}\'.'
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
        try:
            json.dumps(self.storage_options)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"--storage-options cannot be passed on as JSON ({error}): give text and numbers"
            ) from error
        if self.resume and self.overwrite:
            raise UsageError("--resume and --overwrite exclude each other: give one")

    @property
    def target_iterations(self) -> int:
        """How many complete iterations end the capture."""
        return self.min_iterations if self.max_iterations is None else self.max_iterations

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> CaptureOptions:
        """Options from parsed command line values; None stands for 'not given'.

        Raises:
            UsageError: a value is not allowed, or `storage_options` is not a JSON object.
        """
        given: dict[str, Any] = {
            setting.name: tuple(values[setting.name]) if setting.multiple else values[setting.name]
            for setting in SETTINGS
            if values.get(setting.name) is not None
        }
        if isinstance(given.get("storage_options"), str):
            given["storage_options"] = parse_storage_options(given["storage_options"])
        return cls(**given)


def _flag_of(name: str, *, multiple: bool) -> str:
    return "--" + name.replace("_", "-").removesuffix("s" if multiple else "")


def _settings() -> tuple[Setting, ...]:
    return tuple(
        Setting(
            name=item.name,
            flag=item.metadata["flag"] or _flag_of(item.name, multiple=item.metadata["multiple"]),
            kind=item.metadata["kind"],
            multiple=item.metadata["multiple"],
            choices=item.metadata["choices"],
            least=item.metadata["least"],
            default=item.default,
            help=item.metadata["help"],
        )
        for item in dataclasses.fields(CaptureOptions)
    )


SETTINGS = _settings()
"""Every setting, in the order of `CaptureOptions`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--capture URL` and the options of a capture to a script's own parser.

    An option that was not given stays None in the namespace, so that defaults live in one place.
    """
    group = parser.add_argument_group("capture (ranktape)")
    group.add_argument("--capture", metavar="URL", default=None, help="Record tensors into the run at this URL.")
    for setting in SETTINGS:
        if setting.kind is bool:
            group.add_argument(setting.flag, dest=setting.name, action="store_true", default=None, help=setting.help)
            continue
        group.add_argument(
            setting.flag,
            dest=setting.name,
            type=setting.kind,
            action="append" if setting.multiple else "store",
            choices=setting.choices or None,
            default=None,
            help=setting.help,
        )
