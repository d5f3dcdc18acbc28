"""The command line: one sentence for what can be mended, exit code 2, no traceback."""

from pathlib import Path

import pytest

from orthrus_serve import __version__
from orthrus_serve.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"


def test_a_plan_names_pools_gpus_kinds_policy_and_rule(capsys):
    assert main(["plan", str(CONFIGS / "orthrus.yaml")]) == 0
    out = capsys.readouterr().out
    for words in (
        "4 GPUs in all",
        "4 replicas, 1 GPU each",
        "generate and embed",
        "least_remaining_tokens",
        "2048 tokens",
    ):
        assert words in out


def test_a_plan_shows_the_policy_that_user_config_asks_for(tmp_path, capsys):
    text = (CONFIGS / "cpu.yaml").read_text()
    file = tmp_path / "live.yaml"
    file.write_text(text + "    deployments:\n      - name: Engine\n        user_config: {policy: hetero_fcfs}\n")
    assert main(["plan", str(file)]) == 0
    assert "policy       hetero_fcfs" in capsys.readouterr().out


def test_a_plan_tells_of_a_weight_that_is_not_one(tmp_path, capsys):
    text, words = (CONFIGS / "cpu.yaml").read_text(), "an embedding token counts as 4 of a generation's prompt"
    file = tmp_path / "weight.yaml"
    for deployments, is_told in (
        ("", False),
        ("    deployments: [{name: Engine, user_config: {embed_weight: 4}}]\n", True),
    ):
        file.write_text(text + deployments)
        assert main(["plan", str(file)]) == 0
        assert (words in capsys.readouterr().out) is is_told


@pytest.mark.parametrize("verb", ["check", "plan"])
def test_a_wrong_file_is_one_sentence_per_mistake_and_exit_code_2(verb, tmp_path, capsys):
    file = tmp_path / "wrong.yaml"
    file.write_text((CONFIGS / "cpu.yaml").read_text().replace("topology:", "topolgy:"))
    assert main([verb, str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"error: {file}: applications[0].args.topolgy: unknown key; did you mean 'topology'?\n"
    assert captured.out == ""


def test_a_missing_file_is_a_sentence(capsys):
    assert main(["check", "/nowhere/x.yaml"]) == 2
    assert capsys.readouterr().err == "error: /nowhere/x.yaml: cannot be read: No such file or directory\n"


def test_version_names_the_packages_that_matter(capsys):
    assert main(["version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"orthrus-serve {__version__}\n")
    assert len(out.splitlines()) == 4


@pytest.mark.parametrize("argv", [[], ["nope"], ["check"], ["check", "x.yaml", "--fast"], ["model"]])
def test_a_wrong_command_line_is_refused_with_usage(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: orthrus-serve" in capsys.readouterr().err
