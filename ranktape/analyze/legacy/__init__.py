"""Reads and writes the `.pt` files of legacy tools: as records, into a run, and from a run."""

from typing import TYPE_CHECKING

from ranktape.lazy_names import public_names

if TYPE_CHECKING:
    from ranktape.analyze.legacy.export import ExportForm as ExportForm
    from ranktape.analyze.legacy.export import export_records as export_records
    from ranktape.analyze.legacy.files import Folder as Folder
    from ranktape.analyze.legacy.into_run import import_folder as import_folder
    from ranktape.analyze.legacy.open import open_folder as open_folder
    from ranktape.analyze.legacy.open import open_source as open_source
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
