"""Which numbers can each low-precision format hold, and to which of them does a value round?"""

from ranktape.analyze.formats.codes import codes_of as codes_of
from ranktape.analyze.formats.codes import decode as decode
from ranktape.analyze.formats.codes import encode as encode
from ranktape.analyze.formats.rounding import round_to as round_to
from ranktape.analyze.formats.rounding import uniforms as uniforms
from ranktape.analyze.formats.table import BY_DTYPE as BY_DTYPE
from ranktape.analyze.formats.table import FORMATS as FORMATS
from ranktape.analyze.formats.table import Coding as Coding
from ranktape.analyze.formats.table import Format as Format
from ranktape.analyze.formats.table import Rounding as Rounding
from ranktape.analyze.formats.table import parse_format as parse_format
