"""Analyzes a run: what overflows or underflows, and which format and scale each tensor tolerates."""

from typing import TYPE_CHECKING

from ranktape.lazy_names import public_names

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine as Engine
    from ranktape.analyze.engine.values import View as View
    from ranktape.analyze.findings.find import find as find
    from ranktape.analyze.numerics.formats import FORMATS as FORMATS
    from ranktape.analyze.numerics.quantization.quantized_layers import fake_quantize as fake_quantize
    from ranktape.analyze.numerics.quantization.quantizer import quantize as quantize
    from ranktape.analyze.questions.compare import compare as compare
    from ranktape.analyze.questions.distribution import distribution as distribution
    from ranktape.analyze.questions.ls import ls as ls
    from ranktape.analyze.questions.overflow import overflow as overflow
    from ranktape.analyze.questions.replay import replay as replay
    from ranktape.analyze.questions.stats import stats as stats
    from ranktape.analyze.questions.sweep import sweep as sweep
    from ranktape.analyze.questions.trace import trace as trace
    from ranktape.analyze.questions.trend import trend as trend
    from ranktape.analyze.replays.precision_plan import precision_plan as precision_plan
    from ranktape.analyze.table import Table as Table
    from ranktape.analyze.views.plots.write import write_plots as write_plots
    from ranktape.analyze.views.report.page import write_report as write_report
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
