"""Read a run back and say what overflows, what underflows, and which format and scale each tensor can bear."""

from typing import TYPE_CHECKING

from ranktape import public_names

if TYPE_CHECKING:
    from ranktape.analyze.advice.recommendation import Recommendation as Recommendation
    from ranktape.analyze.advice.recommendation import recommend as recommend
    from ranktape.analyze.formats import FORMATS as FORMATS
    from ranktape.analyze.formats import Format as Format
    from ranktape.analyze.formats import parse_format as parse_format
    from ranktape.analyze.histograms.block_histogram import count_blocks as count_blocks
    from ranktape.analyze.histograms.histogram import count_values as count_values
    from ranktape.analyze.histograms.torch_histogram import count_tensor as count_tensor
    from ranktape.analyze.histograms.torch_histogram import count_tensor_blocks as count_tensor_blocks
    from ranktape.analyze.plot import plot_overflow as plot_overflow
    from ranktape.analyze.quantization.encoded import Quantized as Quantized
    from ranktape.analyze.quantization.fake_quant import FakeQuantization as FakeQuantization
    from ranktape.analyze.quantization.fake_quant import fake_quantize as fake_quantize
    from ranktape.analyze.quantization.fake_quant import quantized_linear as quantized_linear
    from ranktape.analyze.quantization.losses import QuantizationWarning as QuantizationWarning
    from ranktape.analyze.quantization.quantizer import quantize as quantize
    from ranktape.analyze.quantization.schemes import SCHEMES as SCHEMES
    from ranktape.analyze.questions.listing import listing as listing
    from ranktape.analyze.questions.overflow import overflow as overflow
    from ranktape.analyze.questions.sweep import sweep as sweep
    from ranktape.analyze.sweeps.options import SweepMode as SweepMode
    from ranktape.analyze.sweeps.options import SweepOptions as SweepOptions
    from ranktape.analyze.sweeps.sweep import ScaleSweep as ScaleSweep
    from ranktape.analyze.sweeps.sweep import sweep_array as sweep_array
    from ranktape.analyze.sweeps.sweep import sweep_formats as sweep_formats
    from ranktape.analyze.table import Table as Table
    from ranktape.analyze.values import View as View
else:
    __all__, __getattr__, __dir__ = public_names(
        __name__,
        homes={
            "advice.recommendation": ["Recommendation", "recommend"],
            "histograms.block_histogram": ["count_blocks"],
            "histograms.histogram": ["count_values"],
            "histograms.torch_histogram": ["count_tensor", "count_tensor_blocks"],
            "formats": ["FORMATS", "Format", "parse_format"],
            "plot": ["plot_overflow"],
            "quantization.encoded": ["Quantized"],
            "quantization.fake_quant": ["FakeQuantization", "fake_quantize", "quantized_linear"],
            "quantization.losses": ["QuantizationWarning"],
            "quantization.quantizer": ["quantize"],
            "quantization.schemes": ["SCHEMES"],
            "questions.listing": ["listing"],
            "questions.overflow": ["overflow"],
            "questions.sweep": ["sweep"],
            "sweeps.options": ["SweepMode", "SweepOptions"],
            "sweeps.sweep": ["ScaleSweep", "sweep_array", "sweep_formats"],
            "table": ["Table"],
            "values": ["View"],
        },
    )
