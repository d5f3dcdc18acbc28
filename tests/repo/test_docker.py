"""The images' files: linted, pinned, non-root, with a health check; what they copy exists and nothing else gets in."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import orthrus_serve
from orthrus_serve.config.load import read_serve_file
from tests.repo.docker_steps import Stage, Step, ignore_patterns, is_ignored, stages_of

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "deploy/docker").glob("Dockerfile.*"))
HADOLINT = Path(sys.executable).parent / "hadolint"


def stages(file: Path) -> list[Stage]:
    return stages_of(file.read_text(encoding="utf-8"))


def steps(file: Path, name: str) -> list[Step]:
    return [step for stage in stages(file) for step in stage.steps if step.name == name]


def named(file: Path) -> str:
    return file.name


def test_there_is_an_image_for_cpu_and_one_for_cuda():
    assert [file.name for file in DOCKERFILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint is not installed (requirements/dev.lock)")
@pytest.mark.parametrize("file", DOCKERFILES, ids=named)
def test_hadolint_finds_nothing(file):
    done = subprocess.run([HADOLINT, "--no-color", file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("file", DOCKERFILES, ids=named)
def test_every_base_image_names_an_exact_version(file):
    for stage in stages(file):
        assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm", stage.base)


@pytest.mark.parametrize("file", DOCKERFILES, ids=named)
def test_the_image_runs_as_somebody_else_than_root_and_tells_its_health(file):
    last = stages(file)[-1]
    names = [step.name for step in last.steps]
    (user,) = [step.rest for step in last.steps if step.name == "USER"]
    assert user == "1000:1000"
    assert {"HEALTHCHECK", "CMD"} <= set(names[names.index("USER") :])
    # What runs as root does so before.
    assert "RUN" not in names[names.index("USER") :]


@pytest.mark.parametrize("file", DOCKERFILES, ids=named)
def test_what_is_built_is_left_behind_but_for_one_folder(file):
    build, last = stages(file)
    copies = [step for step in last.steps if step.name == "COPY" and step.source_stage]
    assert [(step.source_stage, step.words) for step in copies] == [(build.name, ["/opt/orthrus", "/opt/orthrus"])]


@pytest.mark.parametrize("file", DOCKERFILES, ids=named)
def test_whatever_is_copied_is_there_and_is_let_in(file):
    patterns = ignore_patterns()
    sources = [name for step in steps(file, "COPY") if not step.source_stage for name in step.words[:-1]]
    assert sources
    for name in sources:
        assert (ROOT / name).exists(), name
        assert not is_ignored(name, patterns), name


@pytest.mark.parametrize("file", DOCKERFILES, ids=named)
def test_packages_come_from_a_lock_and_nothing_is_resolved(file):
    installs = [line for step in steps(file, "RUN") for line in re.findall(r"pip install ([^&]+)", step.rest)]
    assert len(installs) == 2
    for line in installs:
        assert line.startswith("--no-deps ")
    assert f"-r requirements/{file.suffix.removeprefix('.')}.lock" in installs[0]


@pytest.mark.parametrize("file", DOCKERFILES, ids=named)
def test_the_image_starts_a_configuration_that_it_holds(file):
    (command,) = steps(file, "CMD")
    (config,) = re.findall(r"configs/[\w-]+\.yaml", command.rest)
    (application,) = read_serve_file(ROOT / config).applications
    assert (application.args.num_gpus_per_replica > 0) == (file.suffix == ".cuda")


@pytest.mark.parametrize("file", DOCKERFILES, ids=named)
def test_the_names_in_the_comments_are_of_this_version(file):
    tags = re.findall(r"-t orthrus-serve:(\S+)-(\w+) ", file.read_text(encoding="utf-8"))
    assert tags == [(orthrus_serve.__version__, file.suffix.removeprefix("."))]


def test_nothing_but_the_product_gets_into_the_build():
    patterns = ignore_patterns()
    for name in (".git/config", ".venv/bin/python", "tests/conftest.py", "docs/ab.md", "secrets.env", "deploy/x.yaml"):
        assert is_ignored(name, patterns), name
    assert is_ignored("orthrus_serve/__pycache__/cli.cpython-311.pyc", patterns)
    for name in (
        "orthrus_serve/engine/lora_configs/NVIDIA_H200_SHRINK.json",
        "pyproject.toml",
        "loadgen/data/words.txt",
    ):
        assert not is_ignored(name, patterns), name


def test_steps_are_read_as_docker_reads_them():
    text = "FROM a AS b\n# no\nRUN one \\\n # no\n    && two\nCOPY --from=b x y /z/\nENV A=1 \\\n    B=2\n"
    (stage,) = stages_of(text)
    assert (stage.base, stage.name) == ("a", "b")
    assert [(step.name, step.rest) for step in stage.steps] == [
        ("RUN", "one && two"),
        ("COPY", "--from=b x y /z/"),
        ("ENV", "A=1 B=2"),
    ]
    assert (stage.steps[1].source_stage, stage.steps[1].words) == ("b", ["x", "y", "/z/"])


def test_the_readme_of_the_package_is_in_the_build():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["readme"] == "README.md"
    assert project["license-files"] == ["LICENSE"]
