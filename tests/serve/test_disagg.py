"""Two real engines on CPU, one that prefills and embeds and one that decodes: answers as without, and either may die."""

import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

from orthrus_serve.app import build
from tests.serve.conftest import TINY_VLLM, App, computed_tokens
from tests.serve.soak_faults import core_of
from tests.serve.test_fake_app import leave_when, until
from tests.serve.test_verify import verify

pytest.importorskip("nixl")

EMBED, COMPLETE, CHAT = "/v1/embeddings", "/v1/completions", "/v1/chat/completions"
LEASE_S = 20
NUM_CLIENTS = 8
WHOLE = {"topology": "hetero_fcfs"}  # the same engines, and nothing is handed over


def args_of(tiny: Any) -> dict[str, Any]:
    return {
        "topology": "disagg_pd",
        "num_replicas": 2,
        "disagg_pd": {"prefill": 1, "decode": 1},
        "kv_connector": "nixl",
        "kv_lease_s": LEASE_S,
        "model": {"path": str(tiny.model)},
        "adapters": {"orthrus-embed": {"path": str(tiny.adapter)}},
        "generate_adapters": {"tuned": {"path": str(tiny.adapter)}},
        "num_gpus_per_replica": 0,
        "num_cpus_per_replica": 0.5,
        "front": {"num_replicas": 1},
        "limits": {"max_inputs": 64, "max_n": 8},
        "vllm": TINY_VLLM,
    }


@pytest.fixture(scope="module")
def app(serve_url: str, tiny: Any) -> Iterator[App]:
    serve.run(build(args_of(tiny)), name="pd", route_prefix="/pd")
    yield App("pd", f"{serve_url}/pd")
    serve.delete("pd", _blocking=False)


@pytest.fixture
def http(app: App) -> Iterator[httpx.Client]:
    """An HTTP client; afterwards nothing is charged, open or kept."""
    with httpx.Client(base_url=app.url, timeout=120, limits=httpx.Limits(max_connections=200)) as opened:
        yield opened
    until(lambda: at_rest(app), limit_s=90)


def at_rest(app: App) -> bool:
    fronts, engines = app.info("Front"), app.info("Engine")
    charged = [(f["open"], f["tokens"], f["loads"]) for f in fronts]
    left = [(e["open"], e["in_engine"], e["kept"]) for e in engines]
    return charged == [(0, 0, {})] and left == [(0, 0, 0)] * 2


def settle(app: App) -> None:
    """Waits until nothing is open and what the engines say of themselves is of after the last request."""
    until(lambda: at_rest(app), limit_s=90)
    computed_tokens(app, 2)


def by_role(http: httpx.Client) -> dict[str, dict[str, Any]]:
    """The engines of the status page, by what they do."""
    page = http.get("/status").json()
    return {"prefill" if "embed" in engine["kinds"] else "decode": engine for engine in page["engines"]}


def prefilled(http: httpx.Client) -> dict[str, int]:
    return {role: engine["totals"]["prefill_tokens"] for role, engine in by_role(http).items()}


def handovers(http: httpx.Client) -> Counter[str]:
    """What both metrics of handovers counted so far, all processes together."""
    counts: Counter[str] = Counter()
    page = http.get("/metrics").text
    for word, count in re.findall(
        r'^orthrus_(?:engine_)?handovers_total{.*?(?:handed|fetch)="(\w+)".*} (\d+)', page, re.MULTILINE
    ):
        counts[word] += int(count)
    return counts


def switch(app: App, to: dict[str, Any]) -> None:
    serve.get_deployment_handle("Front", app.name).broadcast("reconfigure", to).results(timeout_s=10)


def without(app: App, ask: Callable[[], Any]) -> Any:
    """What `ask` gets when nothing is handed over."""
    switch(app, WHOLE)
    try:
        return ask()
    finally:
        switch(app, {})


def in_parallel(ask: Callable[[Any], Any], bodies: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(ask, bodies))


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[str, Any]:
    """The text of a streamed answer, and its usage."""
    text, usage = "", None
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", path, json=asked) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        event = json.loads(line.removeprefix("data: "))
        for choice in event["choices"]:
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        usage = event.get("usage") or usage
    return text, usage


def counts(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"]


def answered(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.timeout(600)  # both engines start first
def test_two_hundred_answers_are_those_without_streamed_and_not(app: App, http: httpx.Client, tiny: Any) -> None:
    rng = random.Random(8)
    lengths = [rng.choice([rng.randint(1, 40), rng.randint(100, 300)]) for _ in range(200)]
    bodies = [
        {"prompt": [rng.randrange(3, 512) for _ in range(n)], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        for n in lengths
    ]
    settle(app)
    before, counted = prefilled(http), handovers(http)
    whole = in_parallel(lambda body: answered(http, COMPLETE, body), bodies)
    streams = in_parallel(lambda body: streamed(http, COMPLETE, body), bodies)
    assert [text for text, _ in streams] == [answer["choices"][0]["text"] for answer in whole]
    assert [counts(usage) for _, usage in streams] == [counts(answer["usage"]) for answer in whole]
    assert [answer["usage"]["prompt_tokens"] for answer in whole] == lengths
    settle(app)
    done = {role: tokens - before[role] for role, tokens in prefilled(http).items()}
    # One token of each prompt is left to the second; prompts asked again are in the first one's prefix cache, block by block.
    assert done["decode"] <= 400
    assert done["prefill"] >= sum(lengths)
    # Every one of the 400 was handed over and fetched; vLLM's own count of what moved is on the same page.
    assert handovers(http) - counted == {"over": 400, "accepted": 400}
    assert "vllm:nixl_bytes_transferred_sum" in http.get("/metrics").text
    alone = without(app, lambda: in_parallel(lambda body: answered(http, COMPLETE, body), bodies))
    assert [one["choices"] for one in whole] == [one["choices"] for one in alone]
    assert [one["usage"] for one in whole] == [one["usage"] for one in alone]


def test_embeddings_are_those_without_and_run_where_prompts_do(app: App, http: httpx.Client, tiny: Any) -> None:
    rng = random.Random(9)
    inputs = [[rng.randrange(3, 512) for _ in range(rng.randint(1, 200))] for _ in range(40)]

    def ask() -> list[list[float]]:
        return in_parallel(lambda ids: answered(http, EMBED, {"input": [ids]})["data"][0]["embedding"], inputs)

    settle(app)
    before = by_role(http)
    vectors = ask()
    settle(app)
    after = by_role(http)
    embedded = {role: after[role]["totals"]["embed_tokens"] - before[role]["totals"]["embed_tokens"] for role in after}
    assert embedded == {"prefill": sum(len(ids) + 1 for ids in inputs), "decode": 0}
    for vector, other in zip(vectors, without(app, ask), strict=True):
        assert sum(a * b for a, b in zip(vector, other, strict=True)) > 0.99999


LONG = " ".join(["w9"] * 600)
SAY = {"messages": [{"role": "user", "content": "w5 w6 w7 w8"}], "temperature": 0}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {**SAY, "max_tokens": 12}),
    "max_completion_tokens": (CHAT, {**SAY, "max_completion_tokens": 5}),
    "chat logprobs": (CHAT, {**SAY, "max_tokens": 4, "logprobs": True, "top_logprobs": 3}),
    "min_tokens": (COMPLETE, {"prompt": "w9 w8", "max_tokens": 30, "min_tokens": 20, "temperature": 0}),
    "one token": (COMPLETE, {"prompt": "w9", "max_tokens": 1, "temperature": 0}),
    "logprobs": (COMPLETE, {"prompt": "w9 w8 w7", "max_tokens": 5, "logprobs": 4, "temperature": 0}),
    "echo": (COMPLETE, {"prompt": "w9 w8 w7", "max_tokens": 5, "echo": True, "temperature": 0}),
    "echo with logprobs": (COMPLETE, {"prompt": "w9 w8", "max_tokens": 3, "echo": True, "logprobs": 1, "temperature": 0}),
    "prompt_logprobs": (COMPLETE, {"prompt": "w9 w8", "max_tokens": 3, "prompt_logprobs": 1, "temperature": 0}),
    "seeded": (COMPLETE, {"prompt": "w9 w8", "max_tokens": 20, "temperature": 1.0, "seed": 11}),
    "n": (COMPLETE, {"prompt": "w9 w8", "max_tokens": 5, "n": 3, "temperature": 1.0, "seed": 7}),
    "several prompts": (COMPLETE, {"prompt": ["w9 w8", "w7"], "max_tokens": 5, "temperature": 0}),
    "truncated": (COMPLETE, {"prompt": LONG, "truncate_prompt_tokens": 100, "max_tokens": 5, "temperature": 0}),
    "an adapter that generates": (COMPLETE, {"model": "tuned", "prompt": "w9 w8 w7", "max_tokens": 8, "temperature": 0}),
    "the longest prompt": (COMPLETE, {"prompt": [7] * 511, "max_tokens": 5, "temperature": 0}),
    "a choice": (COMPLETE, {"prompt": "w9", "max_tokens": 3, "temperature": 0, "structured_outputs": {"choice": ["w5", "w6"]}}),
}  # fmt: skip


@pytest.mark.parametrize("case", BODIES)
def test_every_field_acts_as_without(app: App, http: httpx.Client, case: str) -> None:
    path, body = BODIES[case]
    with_both, alone = answered(http, path, body), without(app, lambda: answered(http, path, body))
    for answer in (with_both, alone):
        for varying in ("id", "created", "kv_transfer_params"):
            answer.pop(varying, None)
    assert same(with_both, alone), (with_both, alone)


def same(left: Any, right: Any) -> bool:
    """Equal, but for the last digits of numbers."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return abs(left - right) < 1e-3
    return left == right


def test_a_stop_text_ends_the_answer_also_at_its_first_token(http: httpx.Client) -> None:
    asked = {"prompt": "w20 w21 w22", "max_tokens": 10, "temperature": 0, "ignore_eos": True}
    words = answered(http, COMPLETE, asked)["choices"][0]["text"].split()
    for place in (0, 4):
        stopped = answered(http, COMPLETE, {**asked, "stop": [words[place]]})
        (choice,) = stopped["choices"]
        assert (choice["finish_reason"], choice["text"].split()) == ("stop", words[: words.index(words[place])])


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "w3", "kv_transfer_params": {"do_remote_prefill": True}}, 400, "kv_transfer_params"),
        ({"prompt": "w3", "vllm_xargs": {"kv_transfer_params": "x"}}, 400, "vllm_xargs.kv_transfer_params"),
        ({"prompt": [3] * 600}, 400, "prompt"),
        ({"prompt": "w3", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": [3] * 500, "max_tokens": 400, "response_format": {"type": "nonsense"}}, 400, None),
        ({"prompt": "w3", "model": "nobody"}, 404, "model"),
    ],
)
def test_bad_requests_are_refused_as_without(http: httpx.Client, body: dict[str, Any], status: int, param: Any) -> None:
    answer = http.post(COMPLETE, json=body)
    assert answer.status_code == status, answer.text
    if param:
        assert answer.json()["error"]["param"] == param


def test_clients_that_leave_at_any_moment_leave_nothing_behind(app: App, http: httpx.Client) -> None:
    rng = random.Random(10)

    def leave(i: int) -> None:
        body = {
            "prompt": [rng.randrange(3, 512) for _ in range(rng.randint(1, 400))],
            "max_tokens": 60,
            "ignore_eos": True,
        }
        began_s, stays_s = time.monotonic(), rng.uniform(0, 0.4)
        leave_when(lambda: time.monotonic() - began_s > stays_s, app.url, COMPLETE, {**body, "stream": bool(i % 2)})

    in_parallel(leave, list(range(40)))  # the fixture looks at what is left


@dataclass
class Load:
    """Clients that ask until they are stopped, and how each of their requests ended."""

    app: App
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[Any] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=self.app.url, timeout=120) as http:
            while not self.stop.is_set():
                self.one(http, rng)

    def one(self, http: httpx.Client, rng: random.Random) -> None:
        ids = [rng.randrange(3, 512) for _ in range(rng.randint(1, 200))]
        if rng.random() < 0.3:
            self.whole(http.post(EMBED, json={"input": [ids]}))
            return
        body = {"prompt": ids, "max_tokens": rng.randint(1, 60), "temperature": 0, "ignore_eos": True}
        if rng.random() < 0.4:
            self.whole(http.post(COMPLETE, json=body))
            return
        with http.stream("POST", COMPLETE, json={**body, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        if response.status_code != 200 or not lines:
            self.wrong.append((response.status_code, lines[:2]))
        elif lines[-1] == "data: [DONE]":
            self.ends["streamed"] += 1
        elif any(line == "event: error" for line in lines):
            self.ends["cut"] += 1
        else:
            self.wrong.append(lines[-2:])

    def whole(self, answer: httpx.Response) -> None:
        if answer.status_code == 200:
            self.ends["answered"] += 1
        else:
            self.wrong.append((answer.status_code, answer.text[:300]))


def test_verify_finds_every_answer_equal_to_the_reference(
    app: App, http: httpx.Client, tiny: Any, tmp_path: Path
) -> None:
    before = prefilled(http)
    assert verify(app.url, tmp_path, args_of(tiny)) == (0, {})
    settle(app)
    # Prompts were prefilled on the one side, and the answers came from the other.
    assert prefilled(http)["prefill"] - before["prefill"] > 1000


def kill(engine: dict[str, Any], app: App, *, only_core: bool) -> None:
    (pid,) = [info["pid"] for info in app.info("Engine") if info["replica"] == engine["replica"]]
    core = core_of(pid).pid
    for victim in [core] if only_core else [pid, core]:
        os.kill(victim, signal.SIGKILL)


def are_back(http: httpx.Client, killed: str) -> bool:
    """Whether two engines answer, and neither is the one that was killed."""
    engines = http.get("/status").json()["engines"]
    return len(engines) == 2 and all(e["answered"] and e["listed"] and e["replica"] != killed for e in engines)


@pytest.mark.timeout(900)  # an engine starts meanwhile, on the cores of the one that answers
@pytest.mark.parametrize(("role", "only_core"), [("prefill", False), ("decode", True)])
def test_when_either_dies_under_load_only_streams_that_had_begun_are_cut(
    app: App, http: httpx.Client, role: str, only_core: bool
) -> None:
    load = Load(app)
    before = by_role(http)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(load.run, seed) for seed in range(NUM_CLIENTS)]
        try:
            until(lambda: load.ends.total() > 20, limit_s=240)
            kill(before[role], app, only_core=only_core)
            seen = load.ends.total()
            until(lambda: load.ends.total() > seen + 40, limit_s=300)  # the other one goes on
        finally:
            load.stop.set()
        for client in clients:
            client.result()
    assert load.wrong == []
    assert load.ends["cut"] <= NUM_CLIENTS, "at most what was open"
    until(lambda: are_back(http, before[role]["replica"]), limit_s=250)
    settle(app)
    # Both are back: prompts are handed over again.
    tokens = prefilled(http)
    rng = random.Random(role)  # no prompt that a prefix cache may have
    answered(http, COMPLETE, {"prompt": [rng.randrange(3, 512) for _ in range(200)], "max_tokens": 4})
    settle(app)
    assert prefilled(http)["prefill"] - tokens["prefill"] == 200
