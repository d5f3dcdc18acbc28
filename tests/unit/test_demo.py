"""The worked example against a scripted server: what it sends, what it prints, and what it says when it cannot run."""

import json
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlparse

import pytest
from typing_extensions import override

from orthrus_serve.errors import ModelError
from orthrus_serve.ops import demo
from tests.ports import free_port

METRICS = """\
# TYPE orthrus_engine_steps_total counter
orthrus_engine_steps_total{replica="a"} 30
orthrus_engine_steps_total{replica="b"} 12.0
orthrus_engine_mixed_steps_total{replica="a"} 5
"""
COUNTRIES = {"Machu Picchu": "Peru", "Petra": "Jordan", "Angkor Wat": "Cambodia"}
CAPITALS = {"Peru": "Lima", "Jordan": "Amman", "Cambodia": "Phnom Penh"}
TOPICS = [*COUNTRIES, *CAPITALS, "Sea"]


def vector_of(text: str) -> list[float]:
    """One dimension for each topic; a country counts more than a place, so that a second hop ranks it first."""
    weights = [2.0 if topic in CAPITALS else 1.0 for topic in TOPICS]
    return [weight * (topic in text) + 0.01 for topic, weight in zip(TOPICS, weights, strict=True)]


def thought_about(prompt: str) -> str:
    passage = prompt.rsplit("Passage: ", 1)[1].split("\n")[0]
    country = next((name for name in CAPITALS if passage.startswith(name)), None)
    if country is not None:
        return f" The capital of {country} is {CAPITALS[country]}."
    return next(f" It is in {country}." for place, country in COUNTRIES.items() if passage.startswith(place))


class ScriptedServer(BaseHTTPRequestHandler):
    """Enough of the API for the example; answers can be worked out by hand."""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._send("text/plain", METRICS.encode())
        else:
            models = [{"id": "orthrus", "parent": None}, {"id": "orthrus-embed", "parent": "orthrus"}]
            self._send_json({"object": "list", "data": [{"object": "model", **model} for model in models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/v1/embeddings":
            assert body["model"] == "orthrus-embed"
            texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
            assert all(text.startswith(("query: ", "passage: ")) for text in texts)
            rows = [{"object": "embedding", "index": i, "embedding": vector_of(text)} for i, text in enumerate(texts)]
            self._send_json(
                {"object": "list", "data": rows, "model": "", "usage": {"prompt_tokens": 7, "total_tokens": 7}}
            )
        elif self.path == "/v1/completions":
            choice = {"index": 0, "text": thought_about(body["prompt"]), "finish_reason": "stop"}
            self._send_json({"id": "", "object": "text_completion", "created": 0, "model": "", "choices": [choice]})
        else:
            assert body["stream"]
            deltas = [{"index": 0, "delta": {"content": part}, "finish_reason": None} for part in ("Par", "is.")]
            chunks = [
                {"id": "", "object": "chat.completion.chunk", "created": 0, "model": "", "choices": [d]} for d in deltas
            ]
            lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
            self._send("text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _send_json(self, answer: dict[str, Any]) -> None:
        self._send("application/json", json.dumps(answer).encode())

    def _send(self, content_type: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    scripted = ThreadingHTTPServer(("127.0.0.1", 0), ScriptedServer)
    thread = threading.Thread(target=scripted.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{scripted.server_port}"
    scripted.shutdown()
    thread.join()
    scripted.server_close()


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"title": topic, "text": "…"}) for topic in TOPICS), encoding="utf-8")
    return path


def test_the_example_prints_hops_titles_answers_and_steps(server, corpus, capsys):
    assert demo.main(server, corpus) == 0
    printed = capsys.readouterr().out
    assert "Passages   7 of 7" in printed
    assert "'Paris.'" in printed
    assert "read       Machu Picchu" in printed
    assert "read       Peru" in printed
    assert "The capital of Cambodia is Phnom Penh.  (as expected)" in printed
    assert "3 of 3 as expected" in printed
    assert "Steps      0 forward passes" in printed  # the scripted counters stand still


def test_counters_are_summed_over_replicas():
    assert demo.counter(METRICS, "orthrus_engine_steps_total") == 42
    assert demo.counter(METRICS, "orthrus_engine_mixed_steps_total") == 5
    assert demo.counter(METRICS, "orthrus_engine_absent_total") == 0


def test_a_wrong_answer_is_shown_as_such(capsys):
    hop = demo.Hop("q", (), demo.Passage("Peru", ""), "The capital is Cusco.", 0, 0, 0)
    assert not demo.show_question("q", "Lima", [hop])
    assert "expected Lima" in capsys.readouterr().out


def test_without_a_server_it_says_how_to_start_one(corpus):
    with pytest.raises(demo.DemoError, match="make run"):
        demo.main(f"http://127.0.0.1:{free_port()}", corpus)


def test_without_its_corpus_it_says_how_to_get_it(tmp_path):
    with pytest.raises(ModelError, match="orthrus-serve model fetch"):
        demo.main("http://127.0.0.1:1", tmp_path / "absent.jsonl")


def test_curl_lines_are_shell_words_with_valid_bodies_for_open_routes():
    lines = demo.curl_lines("http://127.0.0.1:8000", demo.Names("orthrus", "orthrus-embed"))
    assert len(lines) == 3
    for line in lines[:2]:
        words = shlex.split(line)
        assert words[0] == "curl"
        assert words[words.index("-H") + 1] == "Content-Type: application/json"
        assert json.loads(words[words.index("-d") + 1])["model"] in ("orthrus", "orthrus-embed")
    paths = [urlparse(word).path for line in lines for word in shlex.split(line) if word.startswith("http://")]
    assert paths == ["/v1/chat/completions", "/v1/embeddings", "/metrics"]
