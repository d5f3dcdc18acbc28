"""A generation shared by two replicas, as the Front conducts it: two calls in turn, their charges, and a lost half."""

import asyncio
import json
import re
from typing import Any

import pytest

from orthrus_serve.serving.pool import PoolUnavailableError, ReplicaLostError
from tests.unit.test_front import EMBED, GONE, JSON, REPLICAS, Client, ScriptedPool

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
PARAMS = {"remote_request_id": "r", "do_remote_prefill": True}
HANDED = [(200, JSON), json.dumps({"handover": PARAMS}).encode()]
ANSWER = [(200, JSON), b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}']
FAILED = [(500, JSON), b'{"error": {}}']
PROMPT = json.dumps({"prompt": list(range(3, 53)), "max_tokens": 10, "stop": "x"}).encode()


def client_of(pool: ScriptedPool) -> Client:
    return Client(pool, topology="disagg_pd", num_replicas=2, kv_connector="nixl")


async def ask(*scripts: list[Any], path: str = COMPLETE, body: bytes = PROMPT) -> tuple[Client, ScriptedPool]:
    pool = ScriptedPool(*scripts)
    client = client_of(pool)
    await client.ask("POST", path, body)
    return client, pool


async def test_the_prompt_is_asked_of_one_replica_and_the_answer_of_another() -> None:
    client, pool = await ask(HANDED, ANSWER)
    (first, prefill, _), (second, decode, _) = pool.opened
    assert (first.body, second.body) == (PROMPT, PROMPT), "replicas make their bodies themselves"
    assert prefill == {"kind": "generate", "charge": 50, "expected_output": 0, "stage": "prefill", "handover": None}
    assert decode == {"kind": "generate", "charge": 10, "expected_output": 10, "stage": "decode", "handover": PARAMS}
    assert (client.status, client.body) == (200, ANSWER[1])
    assert 'outcome="ok",topology="disagg_pd"} 1.0' in client.metrics.text()


@pytest.mark.parametrize("lost", [[ReplicaLostError("died")], FAILED, [GONE, b"{}"], [(200, JSON), RuntimeError("?")]])
async def test_without_the_first_half_the_second_replica_computes_it_whole(lost: list[Any]) -> None:
    client, pool = await ask(lost, ANSWER)
    _, known, avoid = pool.opened[1]
    assert known == {"kind": "generate", "charge": 60, "expected_output": 10}
    assert avoid == ("r1",)
    assert client.status == 200


async def test_where_nothing_was_handed_over_the_second_replica_computes_it_whole() -> None:
    client, pool = await ask([(200, JSON), b'{"whole": "prompt_logprobs"}'], ANSWER)
    assert [known.get("handover") for _, known, _ in pool.opened] == [None, None]
    assert pool.opened[1][2] == ()
    assert client.status == 200


async def test_when_the_second_half_is_lost_before_its_first_byte_another_replica_computes_it_whole() -> None:
    client, pool = await ask(HANDED, [ReplicaLostError("died")], ANSWER)
    assert [known["charge"] for _, known, _ in pool.opened] == [50, 10, 60]
    assert [known.get("handover") for _, known, _ in pool.opened] == [None, PARAMS, None]
    assert client.status == 200


async def test_a_request_that_kills_both_halves_is_not_tried_on_a_third_replica() -> None:
    client, pool = await ask([ReplicaLostError("died")], [ReplicaLostError("died")], ANSWER)
    assert len(pool.opened) == 2
    assert (client.status, client.error["code"]) == (503, "replica_lost")


async def test_an_error_of_the_clients_ends_the_request() -> None:
    client, pool = await ask([(400, JSON), b'{"error": {"message": "bad"}}'])
    assert len(pool.opened) == 1
    assert (client.status, client.body) == (400, b'{"error": {"message": "bad"}}')
    assert 'outcome="invalid",topology="disagg_pd"} 1.0' in client.metrics.text()


@pytest.mark.parametrize(
    ("scripts", "counted"),
    [
        ([HANDED, ANSWER], {"over": 1}),
        ([[(200, JSON), b'{"whole": "n"}'], ANSWER], {"whole": 1}),
        ([[ReplicaLostError("died")], ANSWER], {"lost": 1}),
        ([FAILED, ANSWER], {"lost": 1}),
        ([[(400, JSON), b"{}"]], {"refused": 1}),
        ([HANDED, [ReplicaLostError("died")], ANSWER], {"over": 1, "retried": 1}),
    ],
)
async def test_what_comes_of_the_first_half_is_counted(scripts: list[Any], counted: dict[str, int]) -> None:
    client, _ = await ask(*scripts)
    lines = re.findall(r'^orthrus_handovers_total{arm="",handed="(\w+)"} (\d)', client.metrics.text(), re.MULTILINE)
    assert {handed: int(count) for handed, count in lines if count != "0"} == counted


async def test_no_replica_at_all_is_a_503() -> None:
    client, _ = await ask([PoolUnavailableError("none")])
    assert (client.status, client.error["code"]) == (503, "no_replica")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBED, {"input": "x"}),
        (COMPLETE, {"prompt": ["a", "b"]}),
        (COMPLETE, {"prompt": "a", "n": 2}),
        (CHAT, {"messages": [], "n": 3}),
    ],
)
async def test_what_is_not_one_prompt_with_one_output_is_one_call(path: str, body: dict[str, Any]) -> None:
    client, pool = await ask(ANSWER, path=path, body=json.dumps(body).encode())
    assert len(pool.opened) == 1
    assert "stage" not in pool.opened[0][1]
    assert client.status == 200


@pytest.mark.parametrize("out", [{"replicas": REPLICAS[:1]}, {"quarantined": {REPLICAS[0]: "sick"}}])
async def test_where_one_replica_is_left_it_computes_everything(out: dict[str, Any]) -> None:
    pool = ScriptedPool(ANSWER)
    client = client_of(pool)
    for name, value in out.items():
        setattr(client.state, name, value)
    await client.ask("POST", COMPLETE, PROMPT)
    assert len(pool.opened) == 1


async def test_other_topologies_make_one_call() -> None:
    pool = ScriptedPool(ANSWER)
    await Client(pool, topology="dedicated", num_replicas=2).ask("POST", COMPLETE, PROMPT)
    assert len(pool.opened) == 1


async def test_a_client_that_leaves_while_its_prompt_is_computed_cancels_that_call_and_no_other_is_made() -> None:
    pool = ScriptedPool([...])
    client = client_of(pool)
    asking = asyncio.create_task(client.ask("POST", COMPLETE, PROMPT))
    for _ in range(10):
        await asyncio.sleep(0)
    assert pool.calls
    client.left.set()
    await asking
    assert pool.calls[0].is_cancelled
    assert len(pool.calls) == 1
    assert 'outcome="cancelled"' in client.metrics.text()


async def test_a_first_replica_that_fails_is_put_out_and_one_that_answers_is_not() -> None:
    client, _ = await ask(FAILED, ANSWER)
    assert list(client.state.quarantined) == ["r1"]
    client, _ = await ask(HANDED, ANSWER)
    assert client.state.quarantined == {}
