"""A flight recorder for the numbers inside distributed PyTorch training.

`capture` records tensors from inside the training, `storage` keeps them, `analyze` reads them back, `launch` has
the commands. Importing does no work: a public name is fetched from its file when it is first used.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"


def public_names(
    package: str, *, homes: Mapping[str, Sequence[str]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package whose public names live in its submodules `homes`.

    A name is imported when it is first used, and stays in the package from then on. Type checkers cannot follow:
    the package repeats the names as imports under `TYPE_CHECKING`, and tests/test_packaging.py compares the two.
    """
    home_of = {name: f"{package}.{home}" for home, names in homes.items() for name in names}

    def fetch(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return list(home_of), fetch, lambda: list(home_of)


if TYPE_CHECKING:
    from ranktape.analyze.legacy.open import open_source as open_source
    from ranktape.capture import Capture as Capture
    from ranktape.errors import RanktapeError as RanktapeError
    from ranktape.storage import open_run as open_run
else:
    __all__, __getattr__, __dir__ = public_names(
        __name__,
        homes={
            "analyze.legacy.open": ["open_source"],
            "capture": ["Capture"],
            "errors": ["RanktapeError"],
            "storage": ["open_run"],
        },
    )
    __all__ += ["__version__"]
