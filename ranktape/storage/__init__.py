"""Writes runs, reads their records, and keeps them whole."""

from typing import TYPE_CHECKING

from ranktape.lazy_names import public_names

if TYPE_CHECKING:
    from ranktape.storage.format.progress import IterationState as IterationState
    from ranktape.storage.format.progress import IterationStatus as IterationStatus
    from ranktape.storage.format.progress import RunVerdict as RunVerdict
    from ranktape.storage.format.statistics import Statistics as Statistics
    from ranktape.storage.format.zarr_floats import register as register
    from ranktape.storage.records.assemble import GlobalView as GlobalView
    from ranktape.storage.records.record import Record as Record
    from ranktape.storage.records.records import Records as Records
    from ranktape.storage.records.run import Run as Run
    from ranktape.storage.records.run import open_run as open_run
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
