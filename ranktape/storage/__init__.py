"""Keep a run at rest: names, layout, data types, the writer, the catalogue and the commit protocol."""

from typing import TYPE_CHECKING

from ranktape import public_names
from ranktape.storage.zarr_types import register_on_import

if TYPE_CHECKING:
    from ranktape.storage.assemble import GlobalView as GlobalView
    from ranktape.storage.records import Records as Records
    from ranktape.storage.run import Run as Run
    from ranktape.storage.run import open_run as open_run
    from ranktape.storage.statistics import Statistics as Statistics
    from ranktape.storage.status import IterationState as IterationState
    from ranktape.storage.status import IterationStatus as IterationStatus
    from ranktape.storage.status import Verdict as Verdict
    from ranktape.storage.stored_record import Record as Record
    from ranktape.storage.zarr_types import register as register
else:
    __all__, __getattr__, __dir__ = public_names(
        __name__,
        homes={
            "assemble": ["GlobalView"],
            "records": ["Records"],
            "run": ["Run", "open_run"],
            "statistics": ["Statistics"],
            "status": ["IterationState", "IterationStatus", "Verdict"],
            "stored_record": ["Record"],
            "zarr_types": ["register"],
        },
    )

# The one thing done at import: plain zarr opens what is stored here, without importing zarr before somebody does.
register_on_import()
