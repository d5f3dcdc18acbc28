"""Cuts a byte stream into server-sent events, wherever the network cut it. Pure. Does not know what the data means."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """One event: its `data` lines joined by newlines, and its name (`message` unless the server gave one)."""

    data: bytes
    name: str = "message"


class EventParser:
    """Feed bytes, get the events that are complete. Line ends may be LF or CRLF; comments and unknown fields are skipped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[Event]:
        """Events completed by `chunk`, in order."""
        data = self._rest + chunk if self._rest else chunk
        if b"\r" in data:
            # A CR at the very end may belong to a LF that has not come yet.
            tail = b"\r" if data.endswith(b"\r") else b""
            data = data[: len(data) - len(tail)].replace(b"\r\n", b"\n") + tail
        *blocks, self._rest = data.split(b"\n\n")
        return [event for block in blocks if (event := _event(block)) is not None]

    def flush(self) -> list[Event]:
        """The last event of a stream that ended without a blank line."""
        block, self._rest = self._rest.strip(b"\r\n"), b""
        event = _event(block)
        return [] if event is None else [event]


def _event(block: bytes) -> Event | None:
    if block.startswith(b"data: ") and b"\n" not in block:  # nearly all of them
        return Event(block[6:])
    lines: list[bytes] = []
    name = "message"
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            lines.append(value)
        elif field == b"event":
            name = value.decode("utf-8", "replace")
    return Event(b"\n".join(lines), name) if lines else None
