"""Iter-RetGen sessions against the scripted server, whose vectors of texts with shared words are near each other."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from loadgen.arrivals import ClosedLoop
from loadgen.corpus import Passage
from loadgen.iter_retgen import Library, RetGenSessions, as_array, next_query
from loadgen.lengths import Fixed
from loadgen.mock_server import Fault, Script, vector_of
from loadgen.questions import Question
from loadgen.records import SessionRecord
from loadgen.requester import Recorder
from loadgen.stage_run import StageRun
from loadgen.stages import Sessions
from loadgen.stop import StopRule
from loadgen.vector_index import IndexKind, VectorIndex
from tests.unit.loadgen.builders import place, served, stage

PASSAGES = (
    Passage("Violins", "violins are made of spruce and maple wood"),
    Passage("Tides", "tides rise and fall with the moon"),
    Passage("Bees", "bees make honey from nectar of flowers"),
)
QUESTION = Question("q1", "what makes honey from nectar", answer="w0 w1 w2", gold_titles=["Bees"])


def library(embed_documents: bool, index: IndexKind = "flat") -> Library:
    vectors = np.stack([as_array(vector_of(f"passage: {p.title}: {p.text}", 64)) for p in PASSAGES])
    return Library(PASSAGES, VectorIndex(vectors, index), (QUESTION,), "query: ", "passage: ", 50, embed_documents)


async def run_sessions(
    embed_documents: bool, fault: Fault | None = None, index: IndexKind = "flat"
) -> tuple[Recorder, list[SessionRecord], list[str]]:
    script = Script(dimensions=64, ttft_s=0.02, generate_faults={} if fault is None else {1: fault}, fault_every=1000)
    async with served(script) as (server, client):
        now = asyncio.get_running_loop().time
        recorder, sessions = Recorder("stage", 0, now), list[SessionRecord]()
        with ThreadPoolExecutor(1) as searcher:
            execute = RetGenSessions(client, recorder, library(embed_documents, index), searcher, 30.0, sessions)
            content = Sessions(Fixed(2), Fixed(2), Fixed(3))
            what = stage(ClosedLoop(1), content, StopRule(max_requests=1))
            await StageRun(what, 0, place(), execute, now).run(now())
    return recorder, sessions, server.seen.prompts


async def test_a_session_embeds_retrieves_and_generates_hop_by_hop() -> None:
    recorder, [session], prompts = await run_sessions(embed_documents=False)
    assert [(record.kind, record.role, record.hop) for record in recorder.records] == [
        ("embed", "query", 0),
        ("generate", "answer", 0),
        ("embed", "query", 1),
        ("generate", "answer", 1),
    ]
    assert (session.error, session.hops, len(session.retrieval_s)) == (None, 2, 2)
    assert "bees make honey" in prompts[1]  # what was retrieved is in the prompt
    assert prompts[2] == "query: w0 w1 w2 what makes honey from nectar"  # the answer is in the next query
    assert session.e2e_s >= 0.04  # two hops of 20 ms to the first token
    assert session.generate_s >= 0.04


async def test_answers_and_retrieval_are_scored_against_the_known_ones() -> None:
    _, [session], _ = await run_sessions(embed_documents=False)
    assert (session.exact_match, session.f1, session.contains_answer) == (1.0, 1.0, 1.0)
    assert (session.recall_first_hop, session.recall_any_hop) == (1.0, 1.0)


async def test_the_second_variant_also_embeds_what_was_retrieved() -> None:
    recorder, [session], prompts = await run_sessions(embed_documents=True)
    assert [record.role for record in recorder.records] == ["query", "documents", "answer"] * 2
    assert session.error is None
    assert sum(prompt.startswith("passage: ") for prompt in prompts) == 4  # two documents a hop, two hops


async def test_a_failed_request_ends_its_session_as_failed() -> None:
    recorder, [session], _ = await run_sessions(embed_documents=False, fault="error_event")
    assert session.error == "hop 2, answer: error in the stream: engine died"
    assert session.hops == 1
    assert session.f1 is None
    assert [record.ok for record in recorder.records] == [True, True, True, False]


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_the_index_finds_the_nearest_passage_first(kind: IndexKind) -> None:
    vector = as_array(vector_of("query: honey from nectar of flowers", 64))
    assert library(False, kind).index.nearest(vector, 2)[0] == 2


def test_the_next_query_is_the_text_and_then_the_question() -> None:
    assert next_query("query: ", "", "who?") == "query: who?"
    assert next_query("query: ", "word " * 100, "who?").count("word") == 60
