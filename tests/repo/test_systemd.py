"""The units for one host: systemd takes them, and they call commands and options that exist."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orthrus_serve.cli import make_parser

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/systemd"
UNITS = sorted(FOLDER.glob("*.service"))
BIN = Path(sys.executable).parent


def commands(unit: Path) -> list[list[str]]:
    text = unit.read_text(encoding="utf-8").replace("\\\n", " ")
    return [shlex.split(line.lstrip("-")) for line in re.findall(r"^Exec\w+=(.*)$", text, re.MULTILINE)]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_wrong(tmp_path):
    for unit in UNITS:
        # It looks whether programs are there, which on the host they will be.
        text = unit.read_text(encoding="utf-8").replace("/opt/orthrus/bin/", f"{BIN}/")
        (tmp_path / unit.name).write_text(text, encoding="utf-8")
    units = [str(tmp_path / unit.name) for unit in UNITS]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_run_as_their_own_user_with_the_shared_environment(unit):
    text = unit.read_text(encoding="utf-8")
    assert "\nUser=orthrus\n" in text
    assert "\nEnvironmentFile=/etc/orthrus/environment\n" in text


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_every_option_of_a_command_exists(unit):
    found = commands(unit)
    assert found
    for program, verb, *rest in found:
        name = Path(program).name
        if name == "orthrus-serve":
            make_parser().parse_args([verb, *rest])
            continue
        known = subprocess.run([BIN / name, verb, "--help"], capture_output=True, text=True, check=True).stdout
        for word in rest:
            if word.startswith("--"):
                assert re.search(rf"{re.escape(word.split('=')[0])}\b", known), word


def test_the_environment_sets_what_ray_needs_and_no_secret():
    lines = (FOLDER / "environment").read_text(encoding="utf-8").splitlines()
    names = {line.split("=")[0] for line in lines if line and not line.startswith("#")}
    assert names == {"RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED"}
