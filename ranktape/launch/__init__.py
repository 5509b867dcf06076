"""The launcher, which records a training under torchrun, and the `ranktape` command.

The commands that maintain runs are also functions: `check("s3://bucket/run")` returns the result of `ranktape check`.
"""

from typing import TYPE_CHECKING

from ranktape.lazy_names import public_names

if TYPE_CHECKING:
    from ranktape.launch.control import trigger as trigger
    from ranktape.launch.exchange import cp as cp
    from ranktape.launch.exchange import export as export
    from ranktape.launch.exchange import import_files as import_files
    from ranktape.launch.exchange import push as push
    from ranktape.launch.maintain import check as check
    from ranktape.launch.maintain import doctor as doctor
    from ranktape.launch.maintain import prune as prune
    from ranktape.launch.maintain import repair as repair
    from ranktape.launch.maintain import rm as rm
    from ranktape.launch.maintain import runs as runs
    from ranktape.launch.run_status import status as status
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
