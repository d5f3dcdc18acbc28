"""Starts and stops one server on this machine in the background, for `make run` and `make stop`.

Guards: one server per folder, none on a port that is taken; a start that fails says why, with the end of its log. Leaves out
the switches that Ray reads from the environment (the Makefile sets them) and every other way of deploying.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from orthrus_serve.config.check import check_serve_file
from orthrus_serve.config.load import read_serve_file
from orthrus_serve.errors import OrthrusError

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
REPORT_EVERY_S = 15.0
# What Serve writes when an application cannot be built or a replica cannot start. `serve run` itself stays up, and tries again.
FAILURE_SIGNS = ("failed with exception:", "the replica will be stopped", "DEPLOY_FAILED")
# Lines of Serve's access log, one for each of our own questions about its health.
ACCESS_SIGNS = ("-- GET / ", "-- CALL health ")


class ServerError(OrthrusError):
    """The local server did not start or does not stop. The message says what to do."""


@dataclass(frozen=True)
class Paths:
    """Where the server's process id and output are kept."""

    folder: Path

    @property
    def pid(self) -> Path:
        """The process id of `serve run`, as text."""
        return self.folder / "server.pid"

    @property
    def log(self) -> Path:
        """Everything that the server prints."""
        return self.folder / "server.log"


def start(config: str, paths: Paths, say: Callable[[str], None]) -> str:
    """Starts `serve run CONFIG` on a Ray of its own and returns the base URL once `/health` answers 200.

    Raises:
        ConfigError: the file is wrong, or names a model that is not there.
        ServerError: another server runs, the port is taken, the server failed, or 600 s passed.
    """
    file = read_serve_file(config)
    check_serve_file(file)
    url = f"http://{file.host}:{file.port}"
    if running_pid(paths) is not None:
        if is_healthy(url):
            say(f"The server is up already at {url}")
            return url
        raise ServerError(f"A server of this folder runs and is not healthy. `make stop`, then look into {paths.log}")
    if is_taken(file.host, file.port):
        raise ServerError(
            f"Port {file.port} on {file.host} is in use by another program; set http_options.port in {config}"
        )
    say(f"Starting the server; its log is {paths.log}")
    process = launch(config, paths)
    wait_until_healthy(url, process, paths, say)
    return url


def launch(config: str, paths: Paths) -> subprocess.Popen[bytes]:
    """Runs `serve run` in a session of its own, so that it outlives the terminal, and notes its process id."""
    paths.folder.mkdir(parents=True, exist_ok=True)
    command = [str(Path(sys.executable).parent / "serve"), "run", "--address", "local", config]
    with paths.log.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    paths.pid.write_text(str(process.pid), encoding="utf-8")
    return process


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], paths: Paths, say: Callable[[str], None]) -> None:
    """Returns when `/health` answers 200. Raises ServerError with the end of the log when that will not happen."""
    began_s = said_s = time.monotonic()
    while not is_healthy(url):
        now_s = time.monotonic()
        failed = process.poll() is not None or failure_in(paths.log) is not None
        if failed or now_s - began_s > START_TIMEOUT_S:
            reason = "The server failed to start" if failed else f"No healthy server within {START_TIMEOUT_S:.0f} s"
            last = tail(paths.log)
            stop(paths, say=lambda _: None)
            raise ServerError(f"{reason}. From the end of {paths.log}:\n{last}")
        if now_s - said_s >= REPORT_EVERY_S:
            said_s = now_s
            say(f"  … {now_s - began_s:.0f} s")
        time.sleep(1.0)
    say(f"The server is up at {url} ({time.monotonic() - began_s:.0f} s)")


def stop(paths: Paths, say: Callable[[str], None]) -> None:
    """Ends the server of this folder and the Ray that it started; says so when there is none.

    Raises:
        ServerError: it is still there after 60 s.
    """
    pid = running_pid(paths)
    if pid is None:
        say("No server of this folder is running")
    else:
        os.kill(pid, signal.SIGTERM)
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while running_pid(paths) is not None:
            if time.monotonic() > deadline_s:
                raise ServerError(f"The server (process {pid}) is still there after {STOP_TIMEOUT_S:.0f} s")
            time.sleep(0.2)
        say("The server is stopped")
    paths.pid.unlink(missing_ok=True)


def running_pid(paths: Paths) -> int | None:
    """The process id of this folder's server, or None when it has ended or the number now belongs to another program."""
    with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
        pid = int(paths.pid.read_text(encoding="utf-8"))
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # a child that has ended would stay visible as a zombie
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"run" in command and any(part.endswith(b"/serve") for part in command):
            return pid
    return None


def is_healthy(url: str) -> bool:
    """Whether `/health` answers 200 within 5 s."""
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def is_taken(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex((host, port)) == 0


def failure_in(log: Path) -> str | None:
    """The first sign in the log that the application will not come up, or None."""
    text = log.read_text(encoding="utf-8", errors="replace")
    return next((sign for sign in FAILURE_SIGNS if sign in text), None)


def tail(log: Path, num_lines: int = 40) -> str:
    """The last lines of the log, without those that say that somebody asked for its health."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([line for line in lines if not any(sign in line for sign in ACCESS_SIGNS)][-num_lines:])


def main(argv: list[str] | None = None) -> int:
    """`start CONFIG` or `stop`. Returns 0, or 2 with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="local_server", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=Path(".make"), help="where the log and the process id are kept")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("start").add_argument("config")
    verbs.add_parser("stop")
    args = parser.parse_args(argv)
    paths = Paths(args.folder)

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        if args.verb == "start":
            start(args.config, paths, say)
        else:
            stop(paths, say)
    except OrthrusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
