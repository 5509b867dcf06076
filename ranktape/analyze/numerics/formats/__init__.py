"""The low-precision formats: their values, the codes of the values, and rounding to them."""

from ranktape.analyze.numerics.formats.table import BY_DTYPE as BY_DTYPE
from ranktape.analyze.numerics.formats.table import FORMATS as FORMATS
from ranktape.analyze.numerics.formats.table import Coding as Coding
from ranktape.analyze.numerics.formats.table import Format as Format
from ranktape.analyze.numerics.formats.table import Rounding as Rounding
from ranktape.analyze.numerics.formats.table import parse_format as parse_format
from ranktape.analyze.numerics.formats.values import codes_of as codes_of
from ranktape.analyze.numerics.formats.values import decode as decode
from ranktape.analyze.numerics.formats.values import encode as encode
from ranktape.analyze.numerics.formats.values import round_to as round_to
from ranktape.analyze.numerics.formats.values import uniforms as uniforms
