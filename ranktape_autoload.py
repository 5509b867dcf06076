"""Is run by `import torch`, so that RANKTAPE_CAPTURE=URL records a training whose command line is unchanged.

torch calls `start` by the entry point group `torch.backends`, at the end of its own import, in every process of the
environment; an error that leaves it is the end of `import torch`. So this module stands outside of the package, needs
nothing but the standard library, and lets nothing out. TORCH_DEVICE_BACKEND_AUTOLOAD=0 has torch not call it.
"""

from __future__ import annotations

import os
import sys

SWITCHES = (
    *("RANKTAPE_CAPTURE", "RANKTAPE_CAPTURE_CONFIG", "RANKTAPE_LAUNCHED"),
    *("RANKTAPE_QUANT", "RANKTAPE_QUANT_PLAN", "RANKTAPE_QUANT_ATTENTION"),
)
"""Variables that ask for a capture or a precision; without them, and that of the legacy tools, nothing is imported."""

_OFF = {"", "false", "0", "no", "off"}
"""What `TENSOR_SAVE_ENABLED` says where it does not."""


def start() -> None:
    """Have the training of this process recorded, should it train and the environment ask for it.

    Raises:
        KeyboardInterrupt: the user's, which is not ours to keep.
    """
    is_enabled = os.environ.get("TENSOR_SAVE_ENABLED", "").strip().lower() not in _OFF
    if not is_enabled and not any(map(os.environ.get, SWITCHES)):
        return
    try:
        from ranktape.launch.autostart import arm

        arm()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  (a broken installation, too, must not break `import torch`)
        _tell(error)


def _tell(error: BaseException) -> None:
    """One line on stderr, from rank 0, where there is a stderr."""
    if os.environ.get("RANK", "0") != "0":
        return
    text = " ".join(f"{type(error).__name__}: {error}".split())
    try:
        sys.stderr.write(f"ranktape: error: {text}; the training goes on without a capture\n")
        sys.stderr.flush()
    except Exception:  # noqa: BLE001, S110  (closed, or none: there is nobody to tell)
        pass
