"""Starting and stopping a background server: the process, its log, its port. Real processes; no Ray."""

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from typing_extensions import override

from orthrus_serve.errors import ConfigError
from orthrus_serve.ops import local_server
from orthrus_serve.ops.local_server import Paths, ServerError
from tests.ports import free_port

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def paths(tmp_path) -> Paths:
    return Paths(tmp_path / "state")


def fake_serve(paths: Paths, tmp_path: Path, script: str) -> subprocess.Popen[bytes]:
    """A process whose command line looks like `…/serve run`, known to `paths`."""
    program = tmp_path / "serve"
    program.write_text(f"print('runs', flush=True)\n{script}", encoding="utf-8")
    paths.folder.mkdir(exist_ok=True)
    paths.log.touch()
    process = subprocess.Popen([sys.executable, str(program), "run"], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()  # until then its command line may still be empty
    paths.pid.write_text(str(process.pid), encoding="utf-8")
    return process


def test_stop_ends_the_server_and_forgets_it(paths, tmp_path):
    process = fake_serve(paths, tmp_path, "import time\ntime.sleep(600)")
    said: list[str] = []
    assert local_server.running_pid(paths) == process.pid
    local_server.stop(paths, said.append)
    assert local_server.running_pid(paths) is None
    assert not paths.pid.exists()
    assert said == ["The server is stopped"]


def test_stop_without_a_server_says_so(paths):
    said: list[str] = []
    local_server.stop(paths, said.append)
    assert said == ["No server of this folder is running"]


def test_another_program_with_the_same_number_is_left_alone(paths):
    paths.folder.mkdir()
    paths.pid.write_text(str(os.getpid()), encoding="utf-8")  # this process is no server
    assert local_server.running_pid(paths) is None


def test_a_server_that_ends_while_starting_is_reported_with_its_log(paths, tmp_path):
    process = fake_serve(paths, tmp_path, "")
    paths.log.write_text("why it ended\n", encoding="utf-8")
    process.wait()
    with pytest.raises(ServerError, match=r"failed to start.*\nwhy it ended"):
        local_server.wait_until_healthy(f"http://127.0.0.1:{free_port()}", process, paths, lambda _: None)


def test_a_replica_that_fails_ends_the_start_and_the_server(paths, tmp_path):
    process = fake_serve(paths, tmp_path, "import time\ntime.sleep(600)")
    paths.log.write_text("Exception in Replica(id='x'), the replica will be stopped.\n", encoding="utf-8")
    with pytest.raises(ServerError, match="the replica will be stopped"):
        local_server.wait_until_healthy(f"http://127.0.0.1:{free_port()}", process, paths, lambda _: None)
    assert local_server.running_pid(paths) is None


def test_the_end_of_the_log_leaves_out_health_questions(tmp_path):
    log = tmp_path / "log"
    log.write_text("first\nlast\n" + "INFO Front x -- GET / 503 2ms\n" * 100, encoding="utf-8")
    assert local_server.tail(log, num_lines=1) == "last"


@pytest.mark.parametrize("status", [200, 503])
def test_only_an_answer_of_200_is_healthy(status):
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        @override
        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Health)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert local_server.is_healthy(f"http://127.0.0.1:{server.server_port}") == (status == 200)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert not local_server.is_healthy(f"http://127.0.0.1:{server.server_port}")


def test_a_model_that_is_not_there_stops_the_start_before_anything_runs(paths, tmp_path):
    document = yaml.safe_load((REPOSITORY / "configs/cpu.yaml").read_text(encoding="utf-8"))
    document["applications"][0]["args"]["model"]["path"] = str(tmp_path / "absent")
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    with pytest.raises(ConfigError, match="absent is not a folder"):
        local_server.start(str(file), paths, lambda _: None)
    assert not paths.log.exists()


def test_the_command_line_answers_a_refusal_with_its_reason_and_status_2(tmp_path, capsys):
    code = local_server.main(["--folder", str(tmp_path / "state"), "start", str(tmp_path / "absent.yaml")])
    assert code == 2
    assert "absent.yaml" in capsys.readouterr().err
