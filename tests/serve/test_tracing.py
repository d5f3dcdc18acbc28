"""One request is one trace, from the client through the Front to the engine, and nothing that is told of it holds its text."""

import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from tests.serve.collector import Collector, Span
from tests.serve.conftest import App
from tests.serve.test_fake_app import until

CLIENT_SPAN = "00f067aa0ba902b7"
SECRET = "marmalade"  # a word of every prompt here, and of nothing else


def traced(real: App, path: str, body: dict[str, Any], collector: Collector) -> tuple[str, dict[str, Span]]:
    """Asks, and waits for the spans of Front and engine. Returns the id of the request, and its spans by name."""
    trace, request_id = uuid.uuid4().hex, f"id-{uuid.uuid4().hex[:12]}"
    headers = {"traceparent": f"00-{trace}-{CLIENT_SPAN}-01", "X-Request-Id": request_id}
    answer = httpx.post(f"{real.url}{path}", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == request_id
    until(lambda: {"route", f"POST {path}", "llm_request"} <= {span.name for span in collector.of(trace)}, limit_s=60)
    return request_id, {span.name: span for span in collector.of(trace)}


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/completions", {"model": "orthrus", "prompt": SECRET, "max_tokens": 3}, "generate"),
        ("/v1/completions", {"model": "orthrus", "prompt": SECRET, "max_tokens": 3, "stream": True}, "generate"),
        ("/v1/embeddings", {"model": "orthrus-embed", "input": SECRET}, "embed"),
    ],
)
def test_the_engines_span_hangs_below_the_fronts_and_that_below_the_clients(
    real: App, collector: Collector, path: str, body: dict[str, Any], kind: str
) -> None:
    request_id, spans = traced(real, path, body, collector)
    front, route, engine = spans[f"POST {path}"], spans["route"], spans["llm_request"]
    assert (front.service, front.parent, front.is_error) == ("orthrus-front", CLIENT_SPAN, False)
    assert (route.service, route.parent) == ("orthrus-front", front.id)
    assert (engine.service, engine.parent) == ("orthrus-engine", front.id)
    assert front.attributes["orthrus.kind"] == kind
    assert front.attributes["orthrus.request_id"] == request_id
    assert request_id in engine.attributes["gen_ai.request.id"]
    assert front.start_ns == route.start_ns <= route.end_ns <= front.end_ns
    assert route.attributes["orthrus.replica"] == front.attributes["orthrus.replica"]
    assert front.attributes["http.response.status_code"] == 200


def test_a_refused_request_has_a_span_too(real: App, collector: Collector) -> None:
    trace = uuid.uuid4().hex
    body = {"model": "orthrus", "prompt": SECRET, "n": 0}
    answer = httpx.post(
        f"{real.url}/v1/completions", json=body, headers={"traceparent": f"00-{trace}-{CLIENT_SPAN}-01"}, timeout=60
    )
    assert answer.status_code == 400
    until(lambda: any(span.name == "POST /v1/completions" for span in collector.of(trace)), limit_s=60)
    front = next(span for span in collector.of(trace) if span.name == "POST /v1/completions")
    assert (front.attributes["orthrus.outcome"], front.is_error) == ("invalid", False)


def test_no_span_and_no_log_holds_a_prompt(real: App, collector: Collector) -> None:
    request_id, _ = traced(real, "/v1/completions", {"model": "orthrus", "prompt": SECRET, "max_tokens": 2}, collector)
    assert not any(SECRET in str(value) for span in collector.spans for value in span.attributes.values())
    logs = Path(ray.nodes()[0]["ObjectStoreSocketName"]).parents[1] / "logs"
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in logs.rglob("*.*") if file.is_file()]
    assert any(f"request_ended request_id={request_id} path=/v1/completions" in text for text in texts)
    assert [text for text in texts if SECRET in text] == []
