"""Read a run back and say what overflows, what underflows, and which format and scale each tensor can bear."""

from typing import TYPE_CHECKING

from ranktape.lazy_names import public_names

if TYPE_CHECKING:
    from ranktape.analyze.advice.recommendation import Recommendation as Recommendation
    from ranktape.analyze.advice.recommendation import recommend as recommend
    from ranktape.analyze.comparison.map import DifferenceMap as DifferenceMap
    from ranktape.analyze.comparison.map import difference_map as difference_map
    from ranktape.analyze.comparison.map import sample_pairs as sample_pairs
    from ranktape.analyze.engine.digests import digests as digests
    from ranktape.analyze.engine.digests import merge_digests as merge_digests
    from ranktape.analyze.engine.engine import Engine as Engine
    from ranktape.analyze.engine.values import View as View
    from ranktape.analyze.findings.find import find as find
    from ranktape.analyze.findings.finding import Finding as Finding
    from ranktape.analyze.findings.finding import Severity as Severity
    from ranktape.analyze.metrics.metric import METRICS as METRICS
    from ranktape.analyze.numerics.digests.digest import Digest as Digest
    from ranktape.analyze.numerics.formats import FORMATS as FORMATS
    from ranktape.analyze.numerics.formats import Format as Format
    from ranktape.analyze.numerics.formats import parse_format as parse_format
    from ranktape.analyze.numerics.histograms.block_histogram import count_blocks as count_blocks
    from ranktape.analyze.numerics.histograms.histogram import count_values as count_values
    from ranktape.analyze.numerics.histograms.torch_histogram import count_tensor as count_tensor
    from ranktape.analyze.numerics.histograms.torch_histogram import count_tensor_blocks as count_tensor_blocks
    from ranktape.analyze.numerics.quantization.encoded import QuantizationWarning as QuantizationWarning
    from ranktape.analyze.numerics.quantization.encoded import Quantized as Quantized
    from ranktape.analyze.numerics.quantization.fake_quant import FakeQuantization as FakeQuantization
    from ranktape.analyze.numerics.quantization.fake_quant import fake_quantize as fake_quantize
    from ranktape.analyze.numerics.quantization.fake_quant import quantized_linear as quantized_linear
    from ranktape.analyze.numerics.quantization.quantizer import quantize as quantize
    from ranktape.analyze.numerics.quantization.schemes import SCHEMES as SCHEMES
    from ranktape.analyze.numerics.sweeps.options import SweepMode as SweepMode
    from ranktape.analyze.numerics.sweeps.options import SweepOptions as SweepOptions
    from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep as ScaleSweep
    from ranktape.analyze.numerics.sweeps.sweep import sweep_array as sweep_array
    from ranktape.analyze.numerics.sweeps.sweep import sweep_formats as sweep_formats
    from ranktape.analyze.questions.compare import compare as compare
    from ranktape.analyze.questions.compare import compare_map as compare_map
    from ranktape.analyze.questions.distribution import distribution as distribution
    from ranktape.analyze.questions.gradients import gradients as gradients
    from ranktape.analyze.questions.ls import ls as ls
    from ranktape.analyze.questions.outliers import outliers as outliers
    from ranktape.analyze.questions.overflow import overflow as overflow
    from ranktape.analyze.questions.stats import stats as stats
    from ranktape.analyze.questions.sweep import sweep as sweep
    from ranktape.analyze.questions.trace import trace as trace
    from ranktape.analyze.questions.trend import trend as trend
    from ranktape.analyze.rules.gate import gate as gate
    from ranktape.analyze.rules.result import GateResult as GateResult
    from ranktape.analyze.rules.rule import GateRule as GateRule
    from ranktape.analyze.table import Table as Table
    from ranktape.analyze.views.plots.write import plot_overflow as plot_overflow
    from ranktape.analyze.views.report.page import write_report as write_report
else:
    __all__, __getattr__, __dir__ = public_names(
        __name__,
        homes={
            "advice.recommendation": ["Recommendation", "recommend"],
            "comparison.map": ["DifferenceMap", "difference_map"],
            "comparison.sample_pairs": ["sample_pairs"],
            "engine.digests": ["digests", "merge_digests"],
            "engine.engine": ["Engine"],
            "engine.values": ["View"],
            "findings.find": ["find"],
            "findings.finding": ["Finding", "Severity"],
            "metrics.metric": ["METRICS"],
            "numerics.digests.digest": ["Digest"],
            "numerics.formats": ["FORMATS", "Format", "parse_format"],
            "numerics.histograms.block_histogram": ["count_blocks"],
            "numerics.histograms.histogram": ["count_values"],
            "numerics.histograms.torch_histogram": ["count_tensor", "count_tensor_blocks"],
            "numerics.quantization.encoded": ["QuantizationWarning", "Quantized"],
            "numerics.quantization.fake_quant": ["FakeQuantization", "fake_quantize", "quantized_linear"],
            "numerics.quantization.quantizer": ["quantize"],
            "numerics.quantization.schemes": ["SCHEMES"],
            "numerics.sweeps.options": ["SweepMode", "SweepOptions"],
            "numerics.sweeps.sweep": ["ScaleSweep", "sweep_array", "sweep_formats"],
            "questions.compare": ["compare", "compare_map"],
            "questions.distribution": ["distribution"],
            "questions.gradients": ["gradients"],
            "questions.ls": ["ls"],
            "questions.outliers": ["outliers"],
            "questions.overflow": ["overflow"],
            "questions.stats": ["stats"],
            "questions.sweep": ["sweep"],
            "questions.trace": ["trace"],
            "questions.trend": ["trend"],
            "rules.gate": ["gate"],
            "rules.result": ["GateResult"],
            "rules.rule": ["GateRule"],
            "table": ["Table"],
            "views.plots.write": ["plot_overflow"],
            "views.report.page": ["write_report"],
        },
    )
