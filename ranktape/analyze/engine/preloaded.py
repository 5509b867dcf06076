"""Loads what each worker needs into the process that forks the workers, which imports this module.

Loading the compiled code takes as long as counting a gigabyte.
"""

import ranktape.storage.records.run  # noqa: F401  # for the workers
from ranktape.analyze.engine.digests import load_kernels

load_kernels()
