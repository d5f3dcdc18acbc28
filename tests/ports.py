"""Ports for servers that a test starts. Leaves out servers that take port 0 and say which one they got."""

import random
import socket
from pathlib import Path

_LOWEST, _USUAL_END = 20_000, 32_768  # above Ray's own defaults, below what Linux hands out unless told otherwise
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_given: set[int] = set()


def free_port() -> int:
    """A port that nobody listens on, and that the kernel gives to nobody by itself.

    A server binds its port seconds after it was chosen. One from the ephemeral range can be gone by then: any connection that
    any process opens takes one, and a Ray beside it opens hundreds.
    """
    end = int(_EPHEMERAL.read_text(encoding="ascii").split()[0]) if _EPHEMERAL.exists() else _USUAL_END
    if end <= _LOWEST:
        end = _USUAL_END  # this machine hands out all of them: no port is safe, some port is needed
    choice = random.SystemRandom()  # the workers of a test run must not agree on a seed
    while True:
        port = choice.randrange(_LOWEST, end)
        if port not in _given and _is_free(port):
            _given.add(port)
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
