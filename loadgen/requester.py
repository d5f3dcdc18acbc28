"""Makes single requests happen and records each exactly once: answered, failed, or unfinished when the run gave up waiting."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loadgen.answer import Answer, Vectors
from loadgen.client import Client, Prompt
from loadgen.prompts import PromptMaker
from loadgen.records import UNFINISHED, Kind, Record, Role
from loadgen.stages import AnyWork, Work


@dataclass(frozen=True)
class Label:
    """What a record says about where its request belongs."""

    scheduled_s: float | None = None
    session: int | None = None
    hop: int | None = None
    role: Role | None = None


@dataclass
class Recorder:
    """Requests of one stage in one worker, in the order of their ends."""

    stage: str
    worker: int
    now: Callable[[], float]
    records: list[Record] = field(default_factory=list[Record])

    async def embed(
        self,
        client: Client,
        inputs: Sequence[Prompt],
        timeout_s: float,
        label: Label,
        asked_tokens: int | None,
    ) -> Vectors:
        """One embeddings request, recorded."""
        sent_s = self.now()
        vectors = Vectors(error=UNFINISHED)
        try:
            vectors = await client.embed(inputs, timeout_s)
        finally:
            answer = Answer(error=vectors.error, prompt_tokens=vectors.prompt_tokens)
            self._add("embed", sent_s, answer, label, asked=(asked_tokens, None))
        return vectors

    async def generate(
        self, client: Client, prompt: Prompt, max_tokens: int, timeout_s: float, label: Label, asked_tokens: int | None
    ) -> Answer:
        """One generation, recorded."""
        sent_s = self.now()
        answer = Answer(error=UNFINISHED)
        try:
            answer = await client.generate(prompt, max_tokens, timeout_s)
        finally:
            self._add("generate", sent_s, answer, label, asked=(asked_tokens, max_tokens))
        return answer

    def _add(
        self, kind: Kind, sent_s: float, answer: Answer, label: Label, asked: tuple[int | None, int | None]
    ) -> None:
        self.records.append(
            Record(
                stage=self.stage,
                kind=kind,
                worker=self.worker,
                scheduled_s=label.scheduled_s,
                sent_s=sent_s,
                first_token_s=answer.first_token_s,
                last_token_s=answer.last_token_s,
                ended_s=self.now(),
                gaps_s=answer.gaps_s,
                error=answer.error,
                asked_prompt_tokens=asked[0],
                prompt_tokens=answer.prompt_tokens,
                asked_output_tokens=asked[1],
                output_tokens=answer.output_tokens,
                output_counted_by=answer.output_counted_by,
                session=label.session,
                hop=label.hop,
                role=label.role,
            )
        )


@dataclass(frozen=True)
class SingleRequests:
    """Executes `Work`: one prompt, one request."""

    client: Client
    prompts: PromptMaker
    recorder: Recorder
    timeout_s: float

    async def __call__(self, work: AnyWork, scheduled_s: float | None) -> bool:
        """True for a success."""
        if not isinstance(work, Work):
            raise TypeError(f"not a single request: {work}")
        prompt = self.prompts.make(work.kind, work.prompt_tokens)
        label = Label(scheduled_s=scheduled_s)
        if work.kind == "embed":
            vectors = await self.recorder.embed(self.client, [prompt], self.timeout_s, label, work.prompt_tokens)
            return vectors.error is None
        answer = await self.recorder.generate(
            self.client, prompt, work.output_tokens, self.timeout_s, label, work.prompt_tokens
        )
        return answer.error is None
