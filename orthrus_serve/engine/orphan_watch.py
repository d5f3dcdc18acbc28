"""Ends an engine's core when the process that owns it is gone, however that ended.

vLLM ends its core when the owner stops in order; an owner that is killed (by the kernel for want of memory, say) leaves a core
that waits for orders for ever and holds the GPU, so that the replica that Serve starts instead finds no memory. The core's own
workers see their core go (vLLM's death pipe). Leaves out everything about a core that lives (`channel.py`).
"""

import multiprocessing
import os
import threading
import time

from orthrus_serve.telemetry.log import event_log

log = event_log(__name__)

LOOK_EVERY_S = 1.0


def end_with_owner() -> None:
    """Watches the process that started this one, and ends this one soon after it. Nothing where vLLM runs its core in the
    owner's own process, which multiprocessing did not start."""
    owner = multiprocessing.parent_process()
    if owner is not None:
        # Not `os.getppid()`: an owner that was killed while this process loaded its model has been replaced by init there.
        threading.Thread(target=_watch, args=(owner.pid,), daemon=True, name="orphan-watch").start()


def _watch(owner: int | None) -> None:
    # A pipe that closes with the owner would be kept open by whatever else the owner forked meanwhile.
    while os.getppid() == owner:
        time.sleep(LOOK_EVERY_S)
    log.error("engine_core_orphaned", owner=owner)
    os._exit(1)
