"""Loads once what each worker needs, in the process that they are forked from.

To be imported there: compiled code takes as long to load as a gigabyte to count.
"""

import ranktape.storage.records.run  # noqa: F401  # for the workers
from ranktape.analyze.engine.digests import load_kernels

load_kernels()
