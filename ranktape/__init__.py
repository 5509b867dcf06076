"""A flight recorder for the numbers inside distributed PyTorch training.

`capture` records tensors from inside the training, `storage` keeps them, `analyze` reads them back, `launch` has
the commands. Importing does no work: a public name is fetched from its file when it is first used.
"""

from typing import TYPE_CHECKING

from ranktape._version import __version__ as __version__
from ranktape.lazy_names import public_names

if TYPE_CHECKING:
    from ranktape.analyze.legacy.open import open_source as open_source
    from ranktape.capture import Capture as Capture
    from ranktape.errors import RanktapeError as RanktapeError
    from ranktape.storage import open_run as open_run
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
    __all__ += ["__version__"]
