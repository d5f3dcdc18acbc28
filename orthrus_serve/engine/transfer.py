"""Copies between host and device that no step waits for.

Guards: on CUDA the host only ever enqueues. A copy from or to pageable memory may wait for the device, and one on the main
stream stands between two steps. On CPU nothing is copied. Leaves out what is copied and when it is needed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def to_device(
    arrays: Sequence[np.ndarray], device: torch.device, dtype: torch.dtype = torch.int64
) -> list[torch.Tensor]:
    """Sends one-dimensional arrays as one pinned block of `dtype`; returns the part of each on the device."""
    lengths = [len(values) for values in arrays]
    block = torch.empty(sum(lengths), dtype=dtype, pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=block.numpy(), casting="same_kind")
    # The block may be freed at once: PyTorch gives pinned memory out again only when copies from it are done.
    return list(block.to(device, non_blocking=True).split(lengths))


class HostCopy:
    """A tensor on its way to the host. A tensor that is there already is taken as it is.

    Args:
        source: what the current stream has computed or will have; not to be written afterwards.
        stream: the CUDA stream that copies, so that the copy does not stand in the way of the next step; None for the
            current one. Unused on CPU.
    """

    def __init__(self, source: torch.Tensor, stream: Any) -> None:
        self._copied: Any = None
        self._values = source
        if not source.is_cuda:
            return
        current = torch.cuda.current_stream(source.device)
        stream = current if stream is None else stream
        self._values = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._copied = torch.cuda.Event(blocking=True)  # a wait sleeps, it does not poll
        with torch.cuda.stream(stream):
            stream.wait_stream(current)
            self._values.copy_(source, non_blocking=True)
            self._copied.record(stream)
        source.record_stream(stream)  # nobody else keeps it: its memory must not be given out before the copy is done

    def wait(self) -> torch.Tensor:
        """Waits for the copy, and for nothing after it. Returns the values, in pinned memory if they come from CUDA."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values
