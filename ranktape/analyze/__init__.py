"""Read a run back and say what overflows, what underflows, and which format and scale each tensor can bear."""

from typing import TYPE_CHECKING

from ranktape import public_names

if TYPE_CHECKING:
    from ranktape.analyze.formats import FORMATS as FORMATS
    from ranktape.analyze.formats import Format as Format
    from ranktape.analyze.formats import parse_format as parse_format
    from ranktape.analyze.plot import plot_overflow as plot_overflow
    from ranktape.analyze.questions.listing import listing as listing
    from ranktape.analyze.questions.overflow import overflow as overflow
    from ranktape.analyze.questions.sweep import sweep as sweep
    from ranktape.analyze.scale_sweep import ScaleSweep as ScaleSweep
    from ranktape.analyze.scale_sweep import SweepOptions as SweepOptions
    from ranktape.analyze.scale_sweep import sweep_array as sweep_array
    from ranktape.analyze.table import Table as Table
    from ranktape.analyze.values import View as View
else:
    __all__, __getattr__, __dir__ = public_names(
        __name__,
        homes={
            "formats": ["FORMATS", "Format", "parse_format"],
            "plot": ["plot_overflow"],
            "questions.listing": ["listing"],
            "questions.overflow": ["overflow"],
            "questions.sweep": ["sweep"],
            "scale_sweep": ["ScaleSweep", "SweepOptions", "sweep_array"],
            "table": ["Table"],
            "values": ["View"],
        },
    )
