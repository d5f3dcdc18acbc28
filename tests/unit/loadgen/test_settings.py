"""Settings of a run: unknown keys are refused with a suggestion, and contradictions stop the run."""

from pathlib import Path

import pytest

from loadgen.arrivals import Burst, ClosedLoop, Poisson, Ramp, Replay
from loadgen.errors import SettingsError
from loadgen.plan import stages_of
from loadgen.run import kinds_of, target_of
from loadgen.settings import TargetSettings
from loadgen.settings_file import overlay, parse_assignment, parse_settings, read_yaml
from loadgen.stages import Listed, Mix


def test_an_unknown_key_is_refused_with_a_suggestion() -> None:
    with pytest.raises(SettingsError, match="stop.max_duration: unknown key; did you mean 'max_duration_s'"):
        parse_settings({"workload": {"kind": "ratio"}, "stop": {"max_duration": 3}})


def test_every_problem_is_named_with_its_key() -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings({"workload": {"kind": "ratio", "embed_share": 2}, "processes": 0, "nonsense": 1})
    text = str(caught.value)
    assert "embed_share" in text
    assert "processes" in text
    assert "nonsense: unknown key" in text


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "load.yaml"
    file.write_text("seed: 1\nseed: 2\n")
    with pytest.raises(SettingsError, match="'seed' is given twice"):
        read_yaml(file)


def test_flags_win_over_the_file_and_another_kind_replaces_a_mapping_whole() -> None:
    file = {"workload": {"kind": "ratio", "embed_share": 0.9}, "seed": 1}
    assert overlay(file, parse_assignment("workload.embed_share=0.1"))["workload"] == {
        "kind": "ratio",
        "embed_share": 0.1,
    }
    assert overlay(file, {"workload": {"kind": "block"}}) == {"workload": {"kind": "block"}, "seed": 1}


def test_without_a_seed_one_is_drawn_so_that_two_runs_do_not_repeat_their_prompts() -> None:
    seeds = {parse_settings({"workload": {"kind": "ratio"}}).seed for _ in range(5)}
    assert len(seeds) > 1
    assert parse_settings({"workload": {"kind": "ratio"}, "seed": 4}).seed == 4


def test_embeddings_and_generations_may_have_addresses_of_their_own() -> None:
    target = target_of(TargetSettings(embeddings_url="http://e:1/v1/", generation_url="http://g:2"))
    assert (target.embeddings_url, target.generation_url) == ("http://e:1", "http://g:2")
    one = target_of(TargetSettings(base_url="http://x:3/"))
    assert one.metrics_urls == ("http://x:3/metrics",)


def test_each_workload_becomes_its_stages(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 105.0, "kind": "generate", "prompt_tokens": 9, "output_tokens": 3}\n'
        '{"timestamp": 100.0, "kind": "embed", "prompt_tokens": 7}\n'
    )

    def stages(**workload: object):
        return stages_of(parse_settings({"workload": workload, "stop": {"max_duration_s": 9}}))

    [coin] = stages(kind="ratio", embed_share=0.9)
    assert coin.streams[0].arrivals == ClosedLoop(64)
    [pools] = stages(kind="pools", embed={"kind": "closed", "clients": 9}, generate={"kind": "poisson", "rate": 2})
    assert [stream.arrivals for stream in pools.streams] == [ClosedLoop(9), Poisson(2.0)]
    phases = stages(kind="phases", requests_per_phase=30, clients=4)
    shares = [stage.streams[0].content.embed_share for stage in phases if isinstance(stage.streams[0].content, Mix)]
    assert shares == [0.1, 0.5, 0.9]
    assert all(stage.stop.max_requests == 30 and not stage.steady for stage in phases)
    [block] = stages(kind="block", num_generate=3, num_embed=2, send_per_s=100)
    assert block.streams[0].arrivals == Burst(5, 100.0)
    assert isinstance(block.streams[0].content, Listed)
    assert [work.kind for work in block.streams[0].content.works] == ["generate"] * 3 + ["embed"] * 2
    [replay] = stages(kind="trace", path=str(trace), speed=2)
    assert replay.streams[0].arrivals == Replay((0.0, 5.0), 2.0)
    assert kinds_of([replay]) == ("embed", "generate")
    levels = stages(kind="embed", arrivals={"kind": "poisson", "rate": 1}, levels=[2, 4])
    assert [stage.streams[0].arrivals for stage in levels] == [Poisson(2.0), Poisson(4.0)]
    [ramp] = stages(kind="generate", arrivals={"kind": "ramp", "steps": [[1, 5], [2, 5]]})
    assert ramp.streams[0].arrivals == Ramp(((1.0, 5.0), (2.0, 5.0)))
    assert not ramp.steady
    [sessions] = stages(kind="iter_retgen")
    assert kinds_of([sessions]) == ("embed", "generate")


def test_a_ramp_and_levels_contradict_each_other() -> None:
    workload = {"kind": "embed", "arrivals": {"kind": "ramp", "steps": [[1, 1]]}, "levels": [1]}
    with pytest.raises(SettingsError, match="a ramp has its own steps"):
        stages_of(parse_settings({"workload": workload}))


def test_a_trace_without_tokens_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 1.0, "kind": "generate", "prompt_tokens": 9}\n')
    with pytest.raises(SettingsError, match="request 1"):
        stages_of(parse_settings({"workload": {"kind": "trace", "path": str(trace)}}))
