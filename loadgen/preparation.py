"""What is asked of a target before any load: does it answer, how does it tokenise, and the vectors of the corpus.

Ends in values that workers take along: a `PromptTable` and, for sessions, vectors. Nothing here is timed or counted.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.client import Client, Target
from loadgen.corpus import Corpus, Passage
from loadgen.errors import TargetError
from loadgen.iter_retgen import as_array
from loadgen.prompts import PromptMaker, PromptTable, table_by_ratio
from loadgen.records import Kind
from loadgen.settings import PromptSettings
from loadgen.vector_index import unit

TOKENIZED_PASSAGES = 200
FIRST_WORDS = 48
AT_ONCE = 8
BATCH = 16  # passages per request while the index is built
PROBE_TIMEOUT_S = 120.0
SAME_MODEL_COSINE = 0.999  # bfloat16 and other neighbours in the batch change less than this
SPACE_MARKS = ("Ġ", "▁", " ")  # how tokenizers write a space before a word
In = TypeVar("In")
Out = TypeVar("Out")


class _Tokenized(msgspec.Struct):
    tokens: list[int]
    token_strs: list[str] | None = None


async def make_prompt_table(
    target: Target,
    prompts: PromptSettings,
    corpus: Corpus,
    kinds: Sequence[Kind],
    client: Client,
    http: aiohttp.ClientSession,
) -> PromptTable:
    """The table for this target: by its own tokenizer where it tells (`/tokenize`), else by a ratio that is measured or given.

    Raises:
        TargetError: the target does not answer, or ids are wanted and it does not tell its tokens.
    """
    words = tuple(word for passage in corpus.passages[:TOKENIZED_PASSAGES] for word in passage.text.split())
    if prompts.form == "random_ids":
        ids = np.random.default_rng(11).integers(10, prompts.vocabulary, size=1 << 18)
        table = replace(table_by_ratio(words, 1.0, "random token ids"), ids=ids)
        return await _with_extra(table, client, kinds)
    if prompts.tokens_per_word is None:
        table = await _by_tokenizer(target, prompts.form == "ids", corpus, http)
        if table is not None:
            return await _with_extra(table, client, kinds)
    if prompts.form == "ids":
        raise TargetError(
            f"{target.name}: prompts.form=ids needs the server's /tokenize, which did not answer as expected"
        )
    if prompts.tokens_per_word is not None:
        ratio = prompts.tokens_per_word
        return table_by_ratio(words, ratio, f"{ratio:g} tokens per word, as given (prompts.tokens_per_word)")
    return await _by_probe(words, client, kinds)


async def check_target(client: Client, kinds: Sequence[Kind], target: Target) -> None:
    """One small request per kind.

    Raises:
        TargetError: it failed; says what the server answered.
    """
    for kind in kinds:
        error, _ = await _probe(client, kind, "Which river flows through Vienna?")
        if error is not None:
            url = target.embeddings_url if kind == "embed" else target.generation_url
            raise TargetError(f"{target.name}: a first {kind} request to {url} failed: {error}")


async def corpus_vectors(
    client: Client, passages: Sequence[Passage], prefix: str, file: Path | None, progress: Callable[[int], None]
) -> NDArray[np.float32]:
    """Vectors of all passages (passages × dimensions) by the target's own embedder, or from `file`.

    The cache is keyed by the model's name and the texts, and used only if the target still gives the first passage the same
    vector: other weights, other vectors.

    Raises:
        TargetError: an embedding failed.
    """
    texts = [f"{prefix}{passage.title}: {passage.text}" for passage in passages]
    [first] = await _embed_batch(client, texts[:1])
    if file is not None and (cached := read_vectors_file(file, len(texts), first)) is not None:
        return cached
    batches = [texts[begin : begin + BATCH] for begin in range(0, len(texts), BATCH)]

    async def one(batch: list[str]) -> list[NDArray[np.float32]]:
        vectors = await _embed_batch(client, batch)
        progress(len(batch))
        return vectors

    vectors = np.stack([vector for batch in await _each(batches, one, at_once=4) for vector in batch])
    if file is not None:
        write_vectors_file(file, vectors)
    return vectors


def vectors_file(cache: Path, model: str, passages: Sequence[Passage], prefix: str) -> Path:
    """Where the vectors of these passages by a model of this name are kept."""
    digest = hashlib.blake2b(f"{model}\0{prefix}".encode(), digest_size=16)
    for passage in passages:
        digest.update(f"\0{passage.title}\0{passage.text}".encode())
    return cache.expanduser() / f"{digest.hexdigest()}.npy"


def read_vectors_file(file: Path, num_vectors: int, first: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """The kept vectors, or None if there are none or they are not those of the model that gave `first`."""
    if not file.is_file():
        return None
    vectors: NDArray[np.float32] = np.load(file)
    if vectors.shape != (num_vectors, len(first)):
        return None
    cosine = float(unit(vectors[:1])[0] @ unit(first[np.newaxis])[0])
    return vectors if cosine > SAME_MODEL_COSINE else None


def write_vectors_file(file: Path, vectors: NDArray[np.float32]) -> None:
    """Keeps the vectors for the next run."""
    file.parent.mkdir(parents=True, exist_ok=True)
    np.save(file, vectors)


async def _embed_batch(client: Client, texts: list[str]) -> list[NDArray[np.float32]]:
    vectors = await client.embed(texts, PROBE_TIMEOUT_S)
    if vectors.error is not None:
        raise TargetError(f"embedding the corpus: {vectors.error}")
    return [as_array(vector) for vector in vectors.data]


async def _by_tokenizer(
    target: Target, with_ids: bool, corpus: Corpus, http: aiohttp.ClientSession
) -> PromptTable | None:
    """Words and their sizes as the target cuts them; None if it does not tell."""
    texts = [passage.text for passage in corpus.passages[:TOKENIZED_PASSAGES]]
    if await _tokenize(target, http, texts[0]) is None:
        return None
    passages = await _each(texts, lambda text: _tokenize(target, http, text))
    sized: list[tuple[str, int]] = []
    ids: list[int] = []
    for text, tokenized in zip(texts, passages, strict=True):
        if tokenized is None or tokenized.token_strs is None:
            continue
        ids += tokenized.tokens
        sized += sizes_of_words(text, tokenized.token_strs)
    if not sized:
        return None
    firsts = list(dict.fromkeys(word for word, size in sized if size == 1))[:FIRST_WORDS]
    counted = await _each(firsts, lambda word: _tokenize(target, http, word))
    return PromptTable(
        words=tuple(word for word, _ in sized),
        sizes=np.array([size for _, size in sized], dtype=np.int64),
        first_words=tuple(firsts),
        first_sizes=np.array([1 if count is None else len(count.tokens) for count in counted], dtype=np.int64),
        extra={},
        sizing="exact by the server's /tokenize" if not with_ids else "exact: token ids of real text",
        ids=np.array(ids, dtype=np.int64) if with_ids else None,
    )


def sizes_of_words(text: str, token_strs: Sequence[str]) -> list[tuple[str, int]]:
    """Each word of a text but the first, with the tokens that begin with its space; [] where tokens and words do not match up.

    The first word is left out: without a space before it it may be cut otherwise.
    """
    groups: list[int] = []
    for string in token_strs:
        if string.startswith(SPACE_MARKS):
            groups.append(1)
        elif groups:
            groups[-1] += 1
    words = text.split()[1:]
    return list(zip(words, groups, strict=True)) if len(words) == len(groups) else []


async def _tokenize(target: Target, http: aiohttp.ClientSession, text: str) -> _Tokenized | None:
    body = {"model": target.generate_model, "prompt": text, "return_token_strs": True}
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            async with http.post(f"{target.generation_url}/tokenize", json=body) as response:
                if response.status != 200:
                    return None
                return msgspec.json.decode(await response.read(), type=_Tokenized)
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError):
        return None


async def _with_extra(table: PromptTable, client: Client, kinds: Sequence[Kind]) -> PromptTable:
    """The table with what the server counts on top of the words, found by one request per kind."""
    extra: dict[Kind, int] = {}
    for kind in kinds:
        prompt = PromptMaker(table, np.random.default_rng(13)).make(kind, 64)
        error, counted = await _probe(client, kind, prompt)
        if error is None and counted is not None:
            extra[kind] = counted - 64
    return replace(table, extra=extra)


async def _by_probe(words: tuple[str, ...], client: Client, kinds: Sequence[Kind]) -> PromptTable:
    sample = words[:200]
    error, counted = await _probe(client, kinds[0], " ".join(sample))
    if error is not None or counted is None:
        ratio, source = 1.4, "assumed: the server tells neither tokens nor usage"
    else:
        ratio, source = counted / len(sample), "measured by one request; the server has no /tokenize"
    return table_by_ratio(words, ratio, f"{ratio:.2f} tokens per word, {source}")


async def _probe(client: Client, kind: Kind, prompt: str | list[int]) -> tuple[str | None, int | None]:
    """The error and the prompt tokens that the server counted."""
    if kind == "embed":
        vectors = await client.embed([prompt], PROBE_TIMEOUT_S)
        return vectors.error, vectors.prompt_tokens
    answer = await client.generate(prompt, 2, PROBE_TIMEOUT_S)
    return answer.error, answer.prompt_tokens


async def _each(items: Sequence[In], act: Callable[[In], Awaitable[Out]], at_once: int = AT_ONCE) -> list[Out]:
    """`act` on every item, at most `at_once` at a time, results in order."""
    places = asyncio.Semaphore(at_once)

    async def one(item: In) -> Out:
        async with places:
            return await act(item)

    return list(await asyncio.gather(*(one(item) for item in items)))
