"""The page of shared memory by which two engines on one card know what the other has left: one slot each, each with one writer.

Guards: a read that meets a write half done is recognised by its check sum and answered with what was read before; a slot that
was not renewed for a while counts as idle, so an engine that hangs holds nothing; a page without a name cannot be left behind,
so the file is unlinked as soon as both have it mapped, and what a killed start left is swept by the next. Leaves out what is
made of the numbers (`policy/card_share.py`).
"""

import contextlib
import mmap
import os
import struct
import time
import uuid
from pathlib import Path
from typing import Self

FOLDER, PREFIX = "/dev/shm", "orthrus-card-"
NUM_SLOTS = 2
# A slot is a cache line of its own: number of the write, tokens left, when it was written (monotonic ns), check sum.
SLOT_BYTES = 64
_SLOT = struct.Struct("<QQQQ")
_CHECK = 0x6F72746872757331
_MASK = 2**64 - 1
# Longer than a step takes, on a slow CPU too. An engine says at once when it has nothing left, so this is for one that hangs.
STALE_S = 5.0


class CardPage:
    """One engine's view of the page.

    Args:
        path: the file, made by `make_page`.
        slot: which of the two is this engine's.
    """

    def __init__(self, path: str, slot: int, stale_s: float = STALE_S) -> None:
        if slot not in range(NUM_SLOTS):
            raise ValueError(f"slot {slot} is not one of 0 to {NUM_SLOTS - 1}")
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), NUM_SLOTS * SLOT_BYTES)
        self._own, self._other = slot * SLOT_BYTES, (1 - slot) * SLOT_BYTES
        self._stale_ns = int(stale_s * 1e9)
        self._number = 0
        self._last = (0, 0)  # tokens and time of the last good read

    def publish(self, tokens: int) -> None:
        """Says what this engine has left."""
        self._number += 1
        tokens, now_ns = max(0, tokens), time.monotonic_ns()
        check = _check_sum(self._number, tokens, now_ns)
        _SLOT.pack_into(self._memory, self._own, self._number, tokens, now_ns, check)

    def other_tokens(self) -> int:
        """What the other engine has left by its own account; 0 when it is idle, was never there, or has hung."""
        number, tokens, at_ns, check = _SLOT.unpack_from(self._memory, self._other)
        if check == _check_sum(number, tokens, at_ns):
            self._last = (tokens, at_ns)
        tokens, at_ns = self._last
        return tokens if time.monotonic_ns() - at_ns <= self._stale_ns else 0

    def close(self) -> None:
        """Gives the memory back."""
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_page(folder: str = FOLDER) -> str:
    """Makes an empty page, readable and writable by this user only, and returns its path. The caller unlinks it."""
    path = Path(folder) / f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "wb") as file:
        file.write(bytes(NUM_SLOTS * SLOT_BYTES))
    return str(path)


def sweep_pages(folder: str = FOLDER) -> int:
    """Removes pages whose maker is gone (it was killed while its engines started); returns how many those were."""
    num_removed = 0
    for path in Path(folder).glob(f"{PREFIX}*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not _runs(int(pid)):
            with contextlib.suppress(OSError):  # another one sweeps too, or it belongs to somebody else
                path.unlink()
                num_removed += 1
    return num_removed


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # it runs, as somebody else
    return True


def _check_sum(number: int, tokens: int, at_ns: int) -> int:
    # Mixed by odd factors, so that two fields that are each half old and half new do not cancel.
    return (number * 0x9E3779B97F4A7C15 + tokens * 0xC2B2AE3D27D4EB4F + at_ns * 0x165667B19E3779F9 + _CHECK) & _MASK
