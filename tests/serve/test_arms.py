"""Two arms behind one address, over fake engines: weights, sessions, forcing, copies, live changes, the report."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from ray import serve

from orthrus_serve.app import compose
from orthrus_serve.config.load import parse_args
from orthrus_serve.ops.ab import report
from orthrus_serve.policy import slices
from orthrus_serve.serving.engine_replica import IDLE_WATCH_GAP_S
from tests.serve.conftest import FAKE_ARGS, App
from tests.serve.fakes import start_fake
from tests.serve.test_fake_app import until

EMBED, COMPLETE = "/v1/embeddings", "/v1/completions"
ARMS = {"old": {"topology": "hetero_fcfs"}, "new": {"topology": "orthrus"}}


@pytest.fixture(scope="module")
def ab(serve_url: str) -> Iterator[App]:
    shared = {key: value for key, value in FAKE_ARGS.items() if key not in ("topology", "num_replicas")}
    args = parse_args({**shared, "arms": ARMS, "front": {"num_replicas": 2}})
    serve.run(compose(args, start_fake), name="ab", route_prefix="/ab-test")
    app = App("ab", f"{serve_url}/ab-test")
    until(lambda: len(app.info("Front")) == 2, limit_s=60)
    yield app
    serve.delete("ab", _blocking=False)


@pytest.fixture
def client(ab: App) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=ab.url, timeout=30) as opened:
        yield opened


def live(app: App, **user_config: Any) -> list[str | None]:
    """Sets the Fronts' `user_config`; returns what each refused."""
    serve.get_deployment_handle("Front", app.name).broadcast("reconfigure", user_config).results(timeout_s=10)
    return [front["refused"] for front in app.info("Front")]


def arm_of(client: httpx.Client, session: str | None = None, **fields: Any) -> str:
    headers = {} if session is None else {"X-Session-Id": session}
    answer = client.post(EMBED, json={"input": "a", **fields}, headers=headers)
    assert answer.status_code == 200
    return answer.headers["x-orthrus-arm"]


def ended(app: App, arm: str, how: str) -> int:
    """Requests that ended so at the arm's engine."""
    time.sleep(2 * IDLE_WATCH_GAP_S)  # an idle engine's report is as old as that
    return sum(info["report"].get(how, 0) for info in app.info(f"Engine-{arm}"))


def test_requests_are_shared_by_weight_and_sessions_stay(ab: App, client: httpx.Client) -> None:
    assert live(ab, weights={"old": 3, "new": 1}) == [None, None]
    found = Counter(arm_of(client) for _ in range(200))
    assert 25 < found["new"] < 80
    for session in ("a", "b", "c", "d"):
        assert len({arm_of(client, session) for _ in range(8)}) == 1  # on both Fronts


def test_an_arm_can_be_forced_and_an_unknown_one_is_a_400(ab: App, client: httpx.Client) -> None:
    live(ab, weights={"old": 1, "new": 0})
    pids = {}
    for arm in ("old", "new"):
        answer = client.post(EMBED, json={"input": "a"}, headers={"X-Orthrus-Arm": arm, "X-Session-Id": "s"})
        pids[answer.headers["x-orthrus-arm"]] = answer.json()["pid"]
    assert set(pids) == {"old", "new"}
    assert pids["old"] != pids["new"]
    answer = client.post(EMBED, json={"input": "a"}, headers={"X-Orthrus-Arm": "newer"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_arm")
    until(lambda: 'reason="unknown_arm"' in client.get("/metrics").text)  # one of two Fronts answers
    stream = {"prompt": "x", "stream": True}
    assert client.post(COMPLETE, json=stream, headers={"X-Orthrus-Arm": "new"}).headers["x-orthrus-arm"] == "new"
    assert client.get("/v1/models", headers={"X-Orthrus-Arm": "new"}).headers["x-orthrus-arm"] == "new"


def test_copies_reach_the_other_arm_and_nobody_waits_for_them(ab: App, client: httpx.Client) -> None:
    live(ab, weights={"old": 1, "new": 0}, mirror={"from": "old", "to": "new", "share": 1.0})
    before = ended(ab, "new", "finished")
    assert {arm_of(client) for _ in range(10)} == {"old"}
    until(lambda: ended(ab, "new", "finished") == before + 10)
    forced = client.post(EMBED, json={"input": "a"}, headers={"X-Orthrus-Arm": "new"})
    assert (forced.status_code, forced.headers["x-orthrus-arm"]) == (200, "new")
    assert ended(ab, "new", "finished") == before + 11  # not copied to itself
    assert 'orthrus_mirrored_requests_total{arm="new",copied="ok",kind="embed"' in client.get("/metrics").text


def test_a_failing_mirror_touches_nobody(ab: App, client: httpx.Client) -> None:
    live(ab, weights={"old": 1, "new": 0}, mirror={"from": "old", "to": "new", "share": 1.0})
    # Makes the new arm's engine fail whatever it is asked, for a while.
    client.post(EMBED, json={"input": "a", "fake": {"sick_s": 3.0}}, headers={"X-Orthrus-Arm": "new"})
    before = ended(ab, "new", "aborted")
    times: list[float] = []
    for _ in range(10):
        began_s = time.monotonic()
        assert arm_of(client) == "old"
        times.append(time.monotonic() - began_s)
    assert sorted(times)[5] < 1.0
    until(lambda: ended(ab, "new", "aborted") > before)
    live(ab)
    until(lambda: client.post(EMBED, json={"input": "a"}, headers={"X-Orthrus-Arm": "new"}).status_code == 200)


def test_a_change_of_weights_drops_nothing_and_moves_few_sessions(ab: App, client: httpx.Client) -> None:
    sessions = [f"session-{number}" for number in range(60)]
    live(ab, weights={"old": 0.9, "new": 0.1})
    before = {session: arm_of(client, session) for session in sessions}
    statuses: list[int] = []
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=ab.url, timeout=30) as own:
            while not stop.is_set():
                body = {"model": "orthrus", "prompt": "x", "max_tokens": 5, "fake": {"gap_s": 0.02}}
                statuses.append(own.post(COMPLETE, json=body).status_code)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for new in (0.2, 0.5, 1.0, 0.0, 0.2):
        time.sleep(0.3)
        assert live(ab, weights={"old": 1 - new, "new": new}) == [None, None]
    stop.set()
    for thread in threads:
        thread.join()
    assert len(statuses) > 20
    assert set(statuses) == {200}
    after = {session: arm_of(client, session) for session in sessions}
    moved = [session for session in sessions if before[session] != after[session]]
    assert len(moved) < 15
    assert all(after[session] == "new" for session in moved)


@pytest.mark.parametrize(
    ("user_config", "reason"),
    [
        ({"weights": {"old": 1}}, "new missing"),
        ({"weights": {"old": 1, "nwe": 1, "new": 0}}, "did you mean 'new'?"),
        ({"weights": {"old": 0, "new": 0}}, "one must be above 0"),
        ({"weights": {"old": -1, "new": 1}}, "at least 0"),
        ({"mirror": {"from": "old", "to": "old", "share": 0.1}}, "the same arm"),
        ({"topology": "orthrus"}, "each arm has its own"),
        ({"arms": {"new": {"topology": "dedicated"}}}, "at least 2"),
    ],
)
def test_a_change_that_cannot_be_is_refused_and_changes_nothing(
    ab: App, client: httpx.Client, user_config: dict[str, Any], reason: str
) -> None:
    live(ab, weights={"old": 1, "new": 0})
    assert all(reason in (refused or "") for refused in live(ab, **user_config))
    assert {front["weights"]["new"] for front in ab.info("Front")} == {0}
    assert live(ab, arms={"new": {"topology": "unified_homo", "rule": "round_robin"}}) == [None, None]
    page = client.get("/status").json()
    assert (page["arms"]["new"]["topology"], page["arms"]["old"]["topology"]) == ("unified_homo", "hetero_fcfs")


def test_metrics_and_health_name_the_arm(ab: App, client: httpx.Client) -> None:
    live(ab)
    for arm in ARMS:
        client.post(EMBED, json={"input": "a"}, headers={"X-Orthrus-Arm": arm})
    lines = client.get("/metrics").text.splitlines()
    for name in ("orthrus_requests_total{", "orthrus_engine_steps_total{"):
        for arm in ARMS:
            assert any(line.startswith(name) and f'arm="{arm}"' in line for line in lines)
    assert set(client.get("/health").json()["pools"]) == {"Engine-old", "Engine-new"}


def test_the_report_finds_a_planted_difference(ab: App) -> None:
    live(ab, weights={"old": 1, "new": 1})

    def ask(arm: str, delay_s: float) -> None:
        with httpx.Client(base_url=ab.url, timeout=30, headers={"X-Orthrus-Arm": arm}) as own:
            until_s = time.monotonic() + 6.5 * slices.SLICE_S
            while time.monotonic() < until_s:
                own.post(EMBED, json={"input": "a", "fake": {"delay_s": delay_s}})

    threads = [threading.Thread(target=ask, args=pair) for pair in (("old", 0.4), ("new", 0.1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = report(ab.url)
    assert any(line.startswith("arm          new: orthrus on 1 CPU replica(s), weight 0.5") for line in lines)
    (median,) = [line for line in lines if "end to end p50" in line]
    assert "cannot tell" not in median
    assert " -" in median
    (rate,) = [line for line in lines if "requests/s" in line]
    assert "+" in rate
    (tail,) = [line for line in lines if "end to end p99" in line]
    assert "cannot tell yet" in tail
