"""The worked example: Iter-RetGen against a running server, by HTTP alone, with the stock OpenAI client.

Embeds a small corpus while the same engine answers a chat, then answers questions that need two passages each, all at once.
Leaves out the method (`iter_retgen.py`), starting the server (`local_server.py`) and fetching the corpus (`model fetch`).
"""

import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from openai import APIError, BadRequestError, OpenAI

from orthrus_serve.errors import ModelError, OrthrusError
from orthrus_serve.ops.iter_retgen import (
    Hop,
    Passage,
    PassageIndex,
    Vectors,
    choose_passages,
    run_hops,
    shorten,
)

CORPUS = Path("~/.cache/orthrus_serve/demo/corpus.jsonl")
NUM_HOPS = 2
# With whole leads of 700 characters this is some 25,000 tokens: under a minute on two cores.
NUM_OTHER_PASSAGES = 150
MAX_PASSAGE_CHARS = 700
PASSAGES_PER_REQUEST = 8
MAX_THOUGHT_TOKENS = 40
CHAT_QUESTION = "What is the capital of France?"

QUESTIONS = (
    ("Which city is the capital of the country where Machu Picchu stands?", "Lima"),
    ("Which city is the capital of the country where Petra was carved into the rock?", "Amman"),
    ("Which city is the capital of the country where Angkor Wat stands?", "Phnom Penh"),
)
# What the questions need, and passages near enough to be mistaken for it.
WANTED_TITLES = (
    *("Machu Picchu", "Peru", "Petra", "Jordan", "Angkor Wat", "Cambodia"),
    *("Bolivia", "Chile", "Ecuador", "Colombia", "Inca Empire", "Andes", "Chichen Itza", "Lake Titicaca"),
    *("Syria", "Israel", "Lebanon", "Iraq", "Saudi Arabia", "Kuwait", "Persepolis", "Dead Sea"),
    *("Thailand", "Laos", "Vietnam", "Myanmar", "Khmer Empire", "Borobudur", "Mekong", "Taj Mahal", "Colosseum"),
)


class DemoError(OrthrusError):
    """The example cannot run: no server, or a server without the two kinds of model."""


@dataclass(frozen=True)
class Names:
    """The two names that the server serves."""

    generator: str
    embedder: str


@dataclass(frozen=True)
class Chat:
    """A streamed answer. Seconds from the request's start to the first token, and from there to the last."""

    text: str
    num_tokens: int
    ttft_s: float
    rest_s: float


class Client:
    """What the example asks of a server, with the stock OpenAI client."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url.rstrip("/")
        self._openai = OpenAI(base_url=f"{self.base_url}/v1", api_key="unused", timeout=300, max_retries=0)
        self.names = self._find_names()

    def _find_names(self) -> Names:
        # An adapter names the model that it belongs to as its parent; one that generates refuses to embed. An embedder that is
        # a model of its own is listed behind the generator.
        models = self._openai.models.list().data
        generators = [model.id for model in models if getattr(model, "parent", None) is None]
        adapters = [model.id for model in models if getattr(model, "parent", None) is not None]
        embedders = [name for name in [*adapters, *generators[1:]] if self._embeds(name)]
        if not generators or not embedders:
            raise DemoError(
                f"{self.base_url} serves {[model.id for model in models]}: a generator and an adapter that embeds are needed"
            )
        return Names(generators[0], embedders[0])

    def _embeds(self, name: str) -> bool:
        try:
            self._openai.embeddings.create(model=name, input="query: ?")
        except BadRequestError:
            return False
        return True

    def embed(self, texts: Sequence[str]) -> tuple[Vectors, int]:
        """Vectors [texts, dimensions] and the number of tokens read."""
        answer = self._openai.embeddings.create(model=self.names.embedder, input=list(texts))
        return np.array([item.embedding for item in answer.data], dtype=np.float32), answer.usage.prompt_tokens

    def complete(self, prompt: str) -> str:
        """One line of text, greedily."""
        answer = self._openai.completions.create(
            model=self.names.generator, prompt=prompt, max_tokens=MAX_THOUGHT_TOKENS, temperature=0, stop=["\n"]
        )
        return answer.choices[0].text

    def chat(self, question: str) -> Chat:
        """A short answer, streamed."""
        began_s = time.monotonic()
        stream = self._openai.chat.completions.create(
            model=self.names.generator,
            messages=[{"role": "user", "content": question}],
            max_tokens=48,
            temperature=0,
            stream=True,
        )
        parts: list[str] = []
        first_s = began_s
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                first_s = first_s if parts else time.monotonic()
                parts.append(chunk.choices[0].delta.content)
        return Chat("".join(parts).strip(), len(parts), first_s - began_s, time.monotonic() - first_s)

    def num_steps(self) -> tuple[int, int]:
        """Steps that the engines have run, and those that held both kinds."""
        text = httpx.get(f"{self.base_url}/metrics", timeout=30, trust_env=False).text
        return counter(text, "orthrus_engine_steps_total"), counter(text, "orthrus_engine_mixed_steps_total")


def counter(metrics: str, name: str) -> int:
    """The sum of a counter over its labels in Prometheus text; 0 when it is not there."""
    return round(sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)", metrics, re.MULTILINE)))


def main(base_url: str, corpus: Path = CORPUS) -> int:
    """Runs the example and prints it. Returns 0 when it ran, whatever the small model answered.

    Raises:
        DemoError: the server does not answer, or lacks one of the two kinds of model.
        ModelError: the corpus is not there.
    """
    passages = load_corpus(corpus)
    try:
        return run(Client(base_url), passages)
    except (APIError, httpx.HTTPError) as error:
        raise DemoError(f"{base_url}: {error} Is the server up? `make run` starts one.") from error


def load_corpus(path: Path) -> list[Passage]:
    """Reads `{"title", "text"}` lines; texts are shortened to whole sentences."""
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}. `orthrus-serve model fetch` writes it.") from error
    rows = [json.loads(line) for line in lines]
    return [Passage(row["title"], shorten(row["text"], MAX_PASSAGE_CHARS)) for row in rows]


def run(client: Client, corpus: Sequence[Passage]) -> int:
    """The example, from the first line to the curl lines."""
    began_s = time.monotonic()
    steps_before = client.num_steps()
    passages = choose_passages(corpus, WANTED_TITLES, NUM_OTHER_PASSAGES)
    say("Iter-RetGen: embed the query, retrieve, generate, embed the next query. One engine does all of it.\n")
    say(f"Server     {client.base_url}: {client.names.generator} generates, {client.names.embedder} embeds")
    say(f"Passages   {len(passages)} of {len(corpus):,} leads of Wikipedia articles")
    index = embed_passages(client, passages)
    num_right = answer_questions(client, index)
    num_steps, num_mixed = (after - before for after, before in zip(client.num_steps(), steps_before, strict=True))
    say(f"\nAnswers    {num_right} of {len(QUESTIONS)} as expected, after {time.monotonic() - began_s:.0f} s in all")
    say(f"Steps      {num_steps:,} forward passes; {num_mixed:,} of them held embedding and generation tokens together")
    say("\nTry it:\n\n" + "\n\n".join(curl_lines(client.base_url, client.names)) + "\n")
    return 0


def embed_passages(client: Client, passages: Sequence[Passage]) -> PassageIndex:
    """Embeds all passages, two requests at a time, while a chat is answered beside them."""
    began_s = time.monotonic()
    texts = [f"passage: {passage.full_text}" for passage in passages]
    batches = [texts[i : i + PASSAGES_PER_REQUEST] for i in range(0, len(texts), PASSAGES_PER_REQUEST)]
    vectors: list[Vectors] = []
    num_tokens = 0
    with ThreadPoolExecutor(max_workers=3) as pool:
        embeddings = [pool.submit(client.embed, batch) for batch in batches[:2]]
        chat = pool.submit(client.chat, CHAT_QUESTION)
        embeddings += [pool.submit(client.embed, batch) for batch in batches[2:]]
        for i, embedding in enumerate(embeddings, start=1):
            rows, tokens = embedding.result()
            vectors.append(rows)
            num_tokens += tokens
            if i % 5 == 0 or i == len(batches):
                say(f"Embedding  {sum(map(len, vectors))}/{len(texts)} passages, {time.monotonic() - began_s:.0f} s")
        took_s = time.monotonic() - began_s
        say(f"           {num_tokens:,} tokens in {took_s:.1f} s: {num_tokens / took_s:.0f} tokens/s")
        show_chat(chat)
    return PassageIndex(passages, np.concatenate(vectors))


def show_chat(chat: "Future[Chat]") -> None:
    """Prints the answer that was generated while passages were embedded."""
    answer = chat.result()
    each_ms = 1000 * answer.rest_s / max(1, answer.num_tokens - 1)
    say(f"Meanwhile  {CHAT_QUESTION} {answer.text!r}")
    say(
        f"           first token after {answer.ttft_s:.2f} s, then one every {each_ms:.0f} ms, between embedding chunks"
    )


def answer_questions(client: Client, index: PassageIndex) -> int:
    """Runs all questions at the same time, prints each when it is done, and returns how many answers are right."""

    def hops_of(question: str) -> list[Hop]:
        return list(run_hops(question, NUM_HOPS, index, embed_query, client.complete, time.monotonic))

    def embed_query(query: str) -> Vectors:
        return client.embed([f"query: {query}"])[0][0]

    num_right = 0
    with ThreadPoolExecutor(max_workers=len(QUESTIONS)) as pool:
        for (question, expected), hops in zip(QUESTIONS, pool.map(hops_of, [q for q, _ in QUESTIONS]), strict=True):
            num_right += show_question(question, expected, hops)
    return num_right


def show_question(question: str, expected: str, hops: Sequence[Hop]) -> bool:
    """Prints one question with its hops, and returns whether the last text names the expected answer."""
    say(f"\nQuestion   {question}")
    for i, hop in enumerate(hops, start=1):
        query = "the question" if i == 1 else "the question and the text of the hop before"
        found = " · ".join(f"{item.passage.title} {item.score:.2f}" for item in hop.found)
        say(f"  hop {i}    query      {query}")
        say(f"           retrieved  {found}")
        say(f"           read       {hop.read.title}")
        say(f"           generated  {hop.text}")
        say(
            f"           took       embed {hop.embed_s:.2f} s, retrieve {hop.retrieve_s:.3f} s, generate {hop.generate_s:.2f} s"
        )
    is_right = expected.lower() in hops[-1].text.lower()
    verdict = "as expected" if is_right else f"expected {expected}; a model of this size errs at times"
    say(f"  answer   {hops[-1].text}  ({verdict})")
    return is_right


def curl_lines(base_url: str, names: Names) -> list[str]:
    """Three commands to try against the server that just answered."""
    post = "-H 'Content-Type: application/json' -d"
    chat = {
        "model": names.generator,
        "messages": [{"role": "user", "content": "What is the capital of Peru?"}],
        "temperature": 0,
        "stream": True,
    }
    embed = {"model": names.embedder, "input": ["query: capital of Peru", "passage: Lima is the capital of Peru."]}
    return [
        f"curl -N {base_url}/v1/chat/completions {post} '{json.dumps(chat)}'",
        f"curl {base_url}/v1/embeddings {post} '{json.dumps(embed)}'",
        f"curl -s {base_url}/metrics | grep orthrus_engine",
    ]


def say(line: str) -> None:
    """Prints at once, also into a pipe."""
    print(line, flush=True)
