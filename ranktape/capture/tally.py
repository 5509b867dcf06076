"""What has one iteration come to?"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ranktape.capture.sites import Form
    from ranktape.capture.source import Source


@dataclass(slots=True)
class Tally:
    """What one iteration has come to."""

    iteration: int
    """Training step."""
    is_staged: bool
    """Whether tensors are recorded, or only counted."""
    num_tensors: int = 0
    """Tensors seen."""
    nbytes: int = 0
    """Bytes of their values."""
    stored_nbytes: int = 0
    """Bytes of what is kept of them, before it is packed."""
    kept: Counter[str] = field(default_factory=Counter)
    """How many of them are kept as `values`, `histogram` and `statistics`."""
    is_by_hand: bool = False
    """Whether the program has saved some of them by itself."""
    sources: set[Source] = field(default_factory=set)
    """What they came from."""

    def count(self, form: Form) -> None:
        """One more tensor, of that form."""
        self.num_tensors += 1
        self.nbytes += form.nbytes
        self.stored_nbytes += form.kept_nbytes
        self.kept[form.keep] += 1
