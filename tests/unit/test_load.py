"""A Serve file is read whole, and every mistake in it is answered with its key and the way out."""

import contextlib
import copy
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.config.load import parse_args, parse_serve_file, read_serve_file
from orthrus_serve.config.schema import LiveSpec
from orthrus_serve.errors import ConfigError

ARGS: dict[str, Any] = {
    "topology": "orthrus",
    "model": {"path": "/models/m"},
    "adapters": {"e": {"path": "/models/e", "dimensions": [64, 32]}},
}
FILE: dict[str, Any] = {
    "http_options": {"host": "127.0.0.1", "port": 8123},
    "applications": [{"name": "a", "import_path": "orthrus_serve.app:build", "args": ARGS}],
}
APP, ARG = ("applications", 0), ("applications", 0, "args")
ABSENT = object()


def file_with(*changes: tuple[tuple[str | int, ...], Any]) -> str:
    """The file above as YAML, with these places set; ABSENT removes one."""
    data = copy.deepcopy(FILE)
    for path, value in changes:
        place: Any = data
        for part in path[:-1]:
            place = place[part]
        if value is ABSENT:
            del place[path[-1]]
        else:
            place[path[-1]] = value
    return yaml.safe_dump(data)


def complaint_about(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_serve_file(text, "f.yaml")
    assert all(line.startswith("f.yaml: ") for line in str(caught.value).splitlines())
    return str(caught.value).replace("f.yaml: ", "")


def test_a_good_file_is_read():
    file = parse_serve_file(file_with())
    (application,) = file.applications
    assert (file.host, file.port, application.name, application.route_prefix) == ("127.0.0.1", 8123, "a", "/")
    assert application.args.adapters["e"].dimensions == (64, 32)
    assert application.args.base_name_adapter == "e"
    assert application.live == LiveSpec()


def test_serves_own_address_holds_where_the_file_names_none():
    file = parse_serve_file(file_with((("http_options",), None)))
    assert (file.host, file.port) == ("0.0.0.0", 8000)


def test_the_policy_set_live_is_read():
    engine = {"name": "Engine", "max_ongoing_requests": 512, "user_config": {"policy": "hetero_fcfs"}}
    (application,) = parse_serve_file(file_with(((*APP, "deployments"), [engine]))).applications
    assert application.live == LiveSpec(policy="hetero_fcfs")


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("http_option",), {}, "http_option: unknown key; did you mean 'http_options'?"),
        (("http_options", "prot"), 1, "http_options.prot: unknown key; did you mean 'port'?"),
        ((*APP, "arguments"), {}, "applications[0].arguments: unknown key"),
        (
            (*APP, "deployments"),
            [{"nam": "Engine"}],
            "applications[0].deployments[0].nam: unknown key; did you mean 'name'?",
        ),
        (
            (*APP, "deployments"),
            [{"name": "Engine", "ray_actor_options": {"num_gpu": 1}}],
            "applications[0].deployments[0].ray_actor_options.num_gpu: unknown key; did you mean 'num_gpus'?",
        ),
        ((*ARG, "vlm"), {}, "applications[0].args.vlm: unknown key; did you mean 'vllm'?"),
        ((*ARG, "adapters", "e", "Pooling"), "last", "args.adapters.e.Pooling: unknown key; did you mean 'pooling'?"),
        ((*ARG, "engine"), {"minshare": 0.1}, "args.engine.minshare: unknown key; did you mean 'min_share'?"),
        (
            (*APP, "deployments"),
            [{"name": "Engine", "user_config": {"polcy": "orthrus"}}],
            "deployments[0].user_config.polcy: unknown key; did you mean 'policy'?",
        ),
    ],
)
def test_an_unknown_key_is_named_at_every_level(path, value, expected):
    assert expected in complaint_about(file_with((path, value)))


def test_a_far_fetched_key_is_answered_with_the_keys_that_exist():
    assert (
        "unknown key; known here: card_share, embed_weight, max_wait_steps, min_share, peak_tflops, step_log, target_tpot_ms"
        in complaint_about(file_with(((*ARG, "engine"), {"zzz": 1})))
    )


def test_a_misspelt_required_key_is_complained_about_once():
    text = complaint_about(file_with(((*ARG, "topology"), ABSENT), ((*ARG, "topolgy"), "orthrus")))
    assert text == "applications[0].args.topolgy: unknown key; did you mean 'topology'?"


def test_all_mistakes_in_args_are_told_at_once():
    text = complaint_about(file_with(((*ARG, "num_replicas"), 0), ((*ARG, "limits"), {"max_n": "3"}), ((*ARG, "x"), 1)))
    assert [line.split(":")[0].removeprefix("applications[0].args.") for line in text.splitlines()] == [
        "x",
        "num_replicas",
        "limits.max_n",
    ]


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ((*ARG, "topology"), ABSENT, "applications[0].args.topology: missing"),
        (
            (*ARG, "autoscaling"),
            {"min_replicas": 3, "max_replicas": 2, "target_tokens_per_replica": 1},
            "args.autoscaling.max_replicas: must be at least min_replicas (3), got 2",
        ),
        (
            (*ARG, "autoscaling"),
            {"min_replicas": 2, "max_replicas": 3, "target_tokens_per_replica": 1},
            "args.num_replicas: must be from autoscaling.min_replicas to max_replicas (2 to 3), got 1",
        ),
        (
            (*ARG, "autoscaling"),
            {"min_replicas": 0, "max_replicas": 2, "target_tokens_per_replica": 1},
            "args.autoscaling.min_replicas: must be at least 1",
        ),
        (
            (*ARG, "autoscaling"),
            {"max_replicas": 2, "target_tokens_per_replica": 0},
            "args.autoscaling.target_tokens_per_replica: must be at least 1",
        ),
        (
            (*APP, "deployments"),
            [{"name": "Engine", "autoscaling_config": {"max_replicas": 2}}],
            "deployments[0].autoscaling_config: would override what args say; write args.autoscaling instead",
        ),
        ((*ARG, "topology"), "dedicated", "args.num_replicas: topology dedicated needs at least 2"),
        ((*ARG, "topology"), "disagg_pd", "args.num_replicas: topology disagg_pd needs at least 2, one that prefills"),
        ((*ARG, "kv_connector"), "nixle", "args.kv_connector: must be"),
        ((*ARG, "kv_lease_s"), 5, "args.kv_lease_s: must be at least 6"),
        ((*ARG, "vllm"), {"kv_transfer_config": {}}, "vllm.kv_transfer_config is set by Orthrus: write kv_connector"),
        (
            (*ARG, "disagg_pd"),
            {"prefill": 0, "decode": 1},
            "args.disagg_pd.prefill: must be at least 1, got the number 0",
        ),
        (
            (*APP, "deployments"),
            [{"name": "Front", "user_config": {"topology": "disagg_pd"}}],
            "user_config.topology: disagg_pd moves KV between engines",
        ),
        (
            (*ARG, "dedicated"),
            {"embed": 0, "generate": 1},
            "args.dedicated.embed: must be at least 1, got the number 0",
        ),
        ((*ARG, "router"), {"rule": "round-robin"}, "got the text 'round-robin'; did you mean 'round_robin'?"),
        (
            (*APP, "deployments"),
            [{"name": "Front", "user_config": {"topology": "dedicated"}}],
            "dedicated needs args.num",
        ),
        (
            (*APP, "deployments"),
            [{"name": "Front", "user_config": {"rul": 1}}],
            "deployments[0].user_config.rul: unknown",
        ),
        ((*ARG, "topology"), "orthus", "got the text 'orthus'; did you mean 'orthrus'?"),
        ((*ARG, "num_replicas"), True, "num_replicas: must be a whole number, got true"),
        ((*ARG, "num_replicas"), "2", "num_replicas: must be a whole number, got the text '2'"),
        ((*ARG, "num_replicas"), 0, "num_replicas: must be at least 1, got the number 0"),
        ((*ARG, "num_gpus_per_replica"), 1.5, "num_gpus_per_replica: above one it must be a whole number, got 1.5"),
        ((*ARG, "num_cpus_per_replica"), float("nan"), "num_cpus_per_replica: must be a finite number"),
        ((*ARG, "model"), "/m", "args.model: must be a mapping, got the text '/m'"),
        ((*ARG, "model", "path"), "", "args.model.path: must not be empty"),
        ((*ARG, "model", "name"), False, "quote them"),
        ((*ARG, "model", "name"), "e", "args.adapters: 'e' names two things"),
        ((*ARG, "adapters"), {}, "args.adapters: name at least one embedding adapter"),
        ((*ARG, "adapters", "e", "dimensions"), [64, 0], "adapters.e.dimensions: every entry must be at least 1"),
        ((*ARG, "adapters", "e", "dimensions"), 64, "adapters.e.dimensions: must be a list, got the number 64"),
        ((*ARG, "embed_adapter"), "f", "args.embed_adapter: 'f' is not one of ['e']"),
        ((*ARG, "streams"), {"chunks_per_s": 0}, "args.streams.chunks_per_s: must be more than 0"),
        ((*ARG, "streams"), {"chunks_per_s": float("inf")}, "args.streams.chunks_per_s: must be a finite number"),
        ((*ARG, "admission"), {"embed": {"e2e_ms": 0}}, "args.admission.embed.e2e_ms: must be more than 0"),
        ((*ARG, "admission"), {"generate": {"tttf_ms": 1}}, "did you mean 'ttft_ms'?"),
        ((*ARG, "admission"), {"headroom": {"low": 0.9}}, "headroom.high: must not be below normal, nor normal"),
        ((*ARG, "admission"), {"keys": {"sk-1": {}}}, "args.admission.keys: a key is named by its SHA-256"),
        ((*ARG, "vllm"), {"model": "x"}, "args.vllm.model is set by Orthrus: write model.path"),
        ((*ARG, "vllm"), {7: 1}, "args.vllm: the key 7 must be text: quote it"),
        ((*APP, "args"), ABSENT, "applications[0].args: must be a mapping with at least topology"),
        ((*APP, "import_path"), "orthrus_serve.app:bild", "did you mean 'orthrus_serve.app:build'?"),
        ((*APP, "import_path"), "other.app:make", "applications: none has import_path orthrus_serve.app:build"),
        ((*APP, "import_path"), ABSENT, "applications[0].import_path: must be text"),
        ((*APP, "port"), 8000, "applications[0].port: belongs to http_options"),
        ((*APP, "route_prefix"), "v1", "applications[0].route_prefix: must begin with '/'"),
        ((*APP, "name"), "", "applications[0].name: must be text"),
        ((*APP, "deployments"), {"Engine": {}}, "applications[0].deployments"),
        ((*APP, "deployments"), [{"name": "Engin"}], "deployments[0].name: must be Front or Engine"),
        ((*APP, "deployments"), [{"name": "Front"}] * 2, "it is there twice"),
        ((*APP, "deployments"), [{"name": "Engine", "num_replicas": 2}], "write args.num_replicas instead"),
        ((*APP, "deployments"), [{"name": "Front", "num_replicas": 2}], "write args.front.num_replicas instead"),
        ((*APP, "deployments"), [{"name": "Engine", "user_config": {"policy": "x"}}], "user_config.policy: must be"),
        (("http_options", "port"), 70000, "http_options.port: must be a port from 1 to 65535"),
        (("http_options", "port"), 6379, "6379 is taken by Ray's control store"),
        (("http_options", "host"), 1, "http_options.host: must be an address"),
        (("http_options", "request_timeout_s"), -1, "request_timeout_s: must be more than 0 seconds"),
        (("http_options",), [1], "http_options: must be a mapping, got a list"),
        (("grpc_options",), {"port": 8123}, "grpc_options.port: 8123 is also http_options.port"),
        (("proxy_location",), "headonly", "did you mean 'HeadOnly'?"),
        (("applications",), [], "applications: must be a list with at least one application"),
        (("applications",), ["x"], "applications[0]: must be a mapping"),
        (("applications",), FILE["applications"] * 2, "applications[1].name: 'a' is also that of another application"),
    ],
)
def test_a_wrong_value_is_refused_in_a_sentence(path, value, expected):
    assert expected in complaint_about(file_with((path, value)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("applications:\n- import_path: x\n  import_path: y\n", "line 3: the key 'import_path' is given twice"),
        ("applications: [", "not valid YAML"),
        ("a: !!python/object:os.system {}", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
        ("", "must be a mapping with the key 'applications', got nothing"),
        ("- 1", "must be a mapping with the key 'applications', got a list"),
        ("applications: [{args: 2024-01-01, import_path: 'orthrus_serve.app:build'}]", "args: must be a mapping"),
        ("applications: &a [*a]", "applications[0]"),
        ("http_options: &a {b: *a}", "anchor that holds itself"),
        ("[" * 5000, "nested too deeply"),
    ],
)
def test_text_that_is_no_configuration_is_refused_in_a_sentence(text, expected):
    assert expected in complaint_about(text)


def test_a_merged_mapping_may_be_overridden():
    text = file_with() + "x: &x {port: 1}\n"
    merged = text.replace("http_options:\n", "http_options:\n  <<: {port: 9999, keep_alive_timeout_s: 5}\n")
    assert "x: unknown key" in complaint_about(merged)
    assert parse_serve_file(merged.replace("x: &x {port: 1}\n", "")).port == 8123


def test_another_packages_application_may_stand_beside_ours():
    other = {"name": "other", "route_prefix": "/other", "import_path": "their.app:make", "args": {"any": "thing"}}
    file = parse_serve_file(file_with((("applications",), [other, *FILE["applications"]])))
    assert [application.path for application in file.applications] == [("applications", 1)]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="missing.yaml: cannot be read: No such file"):
        read_serve_file(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_serve_file(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\xff")
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        read_serve_file(tmp_path / "binary.yaml")


def test_args_alone_are_named_from_their_own_root():
    with pytest.raises(ConfigError, match=r"^num_replicas: must be at least 1"):
        parse_args({**ARGS, "num_replicas": 0})
    with pytest.raises(ConfigError, match=r"^adapters: name at least one"):
        parse_args({**ARGS, "adapters": {}})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("ab.", max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=4), inner, max_size=3),
    max_leaves=8,
)
places = st.sampled_from(
    [(key,) for key in FILE] + [(*APP, key) for key in ("args", "name", "import_path", "deployments", "route_prefix")]
    + [(*ARG, key) for key in (*ARGS, "vllm", "limits", "engine", "front", "num_replicas")]
    + [("http_options", key) for key in ("host", "port", "request_timeout_s")] + [("grpc_options",), ("proxy_location",)]
)  # fmt: skip


@given(st.lists(st.tuples(places, json_values), min_size=1, max_size=1))
def test_whatever_stands_in_a_place_the_answer_is_a_configuration_or_a_sentence(changes):
    with contextlib.suppress(ConfigError):
        parse_serve_file(file_with(*changes))


def test_prefill_and_decode_need_a_connector_and_one_device_an_engine():
    args = {**ARGS, "topology": "disagg_pd", "num_replicas": 2}
    with pytest.raises(ConfigError, match="kv_connector: topology disagg_pd moves KV between engines"):
        parse_args(args)
    with pytest.raises(ConfigError, match=r"kv_connector: is not supported with vllm.tensor_parallel_size above 1"):
        parse_args({**args, "kv_connector": "nixl", "num_gpus_per_replica": 2, "vllm": {"tensor_parallel_size": 2}})
    assert parse_args({**args, "kv_connector": "nixl"}).routed().ratio is None
    ratio = {"prefill": 1, "decode": 3}
    assert parse_args({**args, "kv_connector": "nixl", "disagg_pd": ratio}).routed().ratio == (1, 3)
