"""Gloo's process groups outlive the training that is captured: their end could stop it for ever."""

from __future__ import annotations

import ctypes
import weakref

import torch.distributed as dist

_kept: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def keep_process_groups() -> None:
    """Keep what gloo has of every process group of this process until the process ends; its threads stay, and wait.

    Where DDP is the last to hold a group, torch 2.13 destroys it with the interpreter's lock held, and waits there for
    gloo's threads, one of which may wait for that lock: for ever (docs/limits.md).
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        return
    c10d = dist.distributed_c10d
    # NCCL's work holds no state of a thread, for which gloo's threads need the lock, and `destroy_process_group` itself
    # ends NCCL's threads, without the lock. TORCH_DISTRIBUTED_DEBUG=DETAIL wraps any backend, with one of gloo.
    kinds = (c10d.ProcessGroupGloo, c10d._ProcessGroupWrapper)  # type: ignore[attr-defined]  # noqa: SLF001  (private)
    for group in list(c10d._world.pg_map):  # noqa: SLF001  (nor a public way to all groups)
        if group in _kept:
            continue
        _kept.add(group)
        for device in group._device_types:  # noqa: SLF001  (nor to their backends)
            backend = group._get_backend(device)  # noqa: SLF001  (as above)
            if isinstance(backend, kinds):
                # Never given back: what a module holds is destroyed in the interpreter's end, which is too early.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
