"""The hook of `import torch`, through which RANKTAPE_CAPTURE=URL records a training with an unchanged command line.

torch calls `start` through the entry point group `torch.backends`, at the end of its own import, in every process of
the environment. An error in it would make `import torch` fail. This module is therefore outside the package, imports
only the standard library, and catches all errors. With TORCH_DEVICE_BACKEND_AUTOLOAD=0, torch does not call it.
"""

from __future__ import annotations

import os
import sys

SWITCHES = (
    *("RANKTAPE_CAPTURE", "RANKTAPE_CAPTURE_CONFIG", "RANKTAPE_LAUNCHED"),
    *("RANKTAPE_QUANT", "RANKTAPE_QUANT_PLAN", "RANKTAPE_QUANT_ATTENTION"),
)
"""Variables that request a capture or a precision. Without one, and TENSOR_SAVE_ENABLED, nothing is imported."""

_OFF = {"", "false", "0", "no", "off"}
"""The values of `TENSOR_SAVE_ENABLED` that disable it."""


def start() -> None:
    """Record the training of this process, if there is one and the environment requests it.

    Raises:
        KeyboardInterrupt: the user interrupted the import.
    """
    is_enabled = os.environ.get("TENSOR_SAVE_ENABLED", "").strip().lower() not in _OFF
    if not is_enabled and not any(map(os.environ.get, SWITCHES)):
        return
    try:
        from ranktape.launch.autostart import arm

        arm()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  (not even a broken installation may break `import torch`)
        _tell(error)


def _tell(error: BaseException) -> None:
    """Print one line on stderr, if there is one, on rank 0."""
    if os.environ.get("RANK", "0") != "0":
        return
    text = " ".join(f"{type(error).__name__}: {error}".split())
    try:
        sys.stderr.write(f"ranktape: error: {text}; the training continues without a capture\n")
        sys.stderr.flush()
    except Exception:  # noqa: BLE001, S110  (stderr is closed, or there is none)
        pass
