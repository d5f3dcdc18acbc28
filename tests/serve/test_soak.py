"""The soak, short: two real engines under load, a Front killed and a core killed. `make soak` has every fault, for an hour."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from ray import serve

from orthrus_serve.app import build
from tests.serve.conftest import App
from tests.serve.soak import Traffic, args_of, soak

FAULTS = ["Front killed", "core killed"]
# Files that a process may hold more than when it was young: its connections come and go.
MORE_FILES = 64
# Few enough that the machine has time for an engine that starts.
TRAFFIC = Traffic(num_usual=3, num_odd=1, think_s=1.0, warm_up_s=8.0)


@pytest.fixture(scope="module")
def app(serve_url: str, tiny: Any) -> Iterator[App]:
    serve.run(build(args_of(tiny.model, tiny.adapter)), name="soak", route_prefix="/soak")
    yield App("soak", f"{serve_url}/soak")
    serve.delete("soak", _blocking=False)


@pytest.mark.timeout(900)  # a core that was killed costs a new engine, beside clients that leave the machine little
def test_under_faults_every_request_ends_no_answer_is_wrong_and_nothing_is_left(app: App) -> None:
    found = asyncio.run(soak(app, 1.0, 1, TRAFFIC, FAULTS))  # each once
    assert [one["well_after_s"] for one in found["injected"] if one["well_after_s"] is None] == []
    assert found["requests"]["right"] > 50, found["requests"]
    assert not {"wrong", "none"} & set(found["requests"]), found["unmeant"]
    # Nobody but the clients of a killed Front may meet an end that is none: the proxy's own 500, or a closed connection.
    (front,) = [one for one in found["injected"] if one["what"] == "Front killed"]
    until_s = front["at_s"] + front["well_after_s"]
    assert [one for one in found["unmeant"] if not (one["at_s"] <= until_s and one["ended_s"] >= front["at_s"])] == []
    for process in found["usage"].values():
        assert process["files_at_end"] <= process["files"] + MORE_FILES, process
