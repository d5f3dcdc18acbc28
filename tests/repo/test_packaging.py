"""The wheel and the sdist hold the whole product and nothing else, and the installed command works away from the checkout."""

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import orthrus_serve

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def build(source: Path, what: str, into: Path) -> Path:
    """Calls the build backend in `source`, in the environment that the tests run in."""
    command = [sys.executable, "-W", "ignore", "-c", BUILD, what, str(into)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True)
    return into / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a build reads, in a folder of its own: building writes beside its sources."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("orthrus_serve", "loadgen", "configs", "deploy", "requirements"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, "build_wheel", tmp_path_factory.mktemp("wheel"))


def names_in(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_every_file_of_both_packages(wheel):
    listed = [
        path for package in ("orthrus_serve", "loadgen") for path in (ROOT / package).rglob("*") if path.is_file()
    ]
    expected = {path.relative_to(ROOT).as_posix() for path in listed if "__pycache__" not in path.parts}
    assert names_in(wheel) == expected


def test_the_sdist_makes_the_same_wheel(source, wheel, tmp_path):
    sdist = build(source, "build_sdist", tmp_path)
    shutil.unpack_archive(sdist, tmp_path)  # tarfile's own filters came with Python 3.11.4
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert (unpacked / "configs/orthrus.yaml").is_file()
    assert (unpacked / "requirements/cpu.lock").is_file()
    again = build(unpacked, "build_wheel", tmp_path)
    assert (again.name, names_in(again)) == (wheel.name, names_in(wheel))


def test_the_commands_of_the_wheel_work_away_from_the_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    entries = configparser.ConfigParser()
    entries.read(next(site.glob("*.dist-info")) / "entry_points.txt")
    for command, expected in (("orthrus-serve", f"orthrus-serve {orthrus_serve.__version__}\n"), ("loadgen", "usage")):
        module, _, function = entries["console_scripts"][command].partition(":")
        words = ["version"] if command == "orthrus-serve" else ["--help"]
        code = f"import sys; from {module} import {function}; sys.argv[1:] = {words}; sys.exit({function}())"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert expected in done.stdout
    where = subprocess.run(
        [sys.executable, "-c", "import orthrus_serve; print(orthrus_serve.__file__)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(site))


def test_the_version_is_in_the_wheels_name(wheel):
    assert wheel.name == f"orthrus_serve-{orthrus_serve.__version__}-py3-none-any.whl"
