"""The entry point of `torchrun -m ranktape.launch`."""

from __future__ import annotations

import sys

from ranktape.launch.runner import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
