"""What `deploy/README.md` says agrees with what makes it: the sizing table, the commands, the objects and their options."""

import re
import shlex
from pathlib import Path

from orthrus_serve.config.load import read_serve_file
from orthrus_serve.ops.manifest_command import generated, parse
from orthrus_serve.ops.size_table import MODELS, table
from orthrus_serve.policy.sizing import REACHED_RATIO

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "deploy/README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]


def test_the_sizing_table_is_what_the_command_prints():
    assert "\n".join(table(MODELS)) in PAGE
    assert f"tokens/s = {REACHED_RATIO:.3f} ×" in PAGE


def test_the_manifests_command_on_the_page_works():
    (command,) = [line for line in COMMANDS if line.startswith(".venv/bin/orthrus-serve manifests")]
    words = shlex.split(command)[2:]
    words[0] = str(ROOT / words[0])
    made = generated(parse(words))
    assert set(made) == {"orthrus-models.yaml", "orthrus-4gpu.yaml"}
    for name in made:
        assert f"mine/{name}" in PAGE


def test_every_file_that_a_command_names_is_there():
    named = {
        word for line in COMMANDS for word in re.findall(r"(?<![\w/])(?:configs|requirements|deploy)/[\w./-]+", line)
    }
    assert {"requirements/cuda.lock", "configs/orthrus.yaml", "deploy/systemd/environment"} <= named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_models_are_fetched_to_where_the_file_looks_for_them():
    args = read_serve_file(ROOT / "configs/orthrus.yaml").applications[0].args
    home = str(Path.home())
    for path in (args.model.path, *(adapter.path for adapter in args.adapters.values())):
        folder = re.match(r"/models/[^/]+", path.removeprefix(home))
        assert folder is not None
        assert f"--local-dir /var/lib/orthrus{folder[0]}\n" in PAGE + "\n"


def test_the_page_and_the_units_start_ray_alike():
    unit = (ROOT / "deploy/systemd/orthrus-ray.service").read_text(encoding="utf-8").replace("\\\n", " ")
    (of_unit,) = re.findall(r"^ExecStart=\S+/ray start (.*)$", unit, re.MULTILINE)
    (of_page,) = [line.partition("ray start ")[2] for line in COMMANDS if "/ray start" in line]
    assert set(of_page.split()) == set(of_unit.split()) - {"--port=6379", "--dashboard-port=8265"}
