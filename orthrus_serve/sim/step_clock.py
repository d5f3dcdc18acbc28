"""How long a step of a simulated engine takes, from measured steps. Pure.

A step that holds prompt chunks is bound by arithmetic, a straight line in its tokens and decodes, but never shorter than the
host needs to launch it; a step of decodes alone is bound by reading weights and KV. Each is fitted by the product's own
`StepTimeModel`. Leaves out what a step holds (`batching.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from orthrus_serve.policy.step_time import StepTimeModel

# The fit is online and forgets: rows are shown so often that its beginning does not matter.
NUM_SHOWINGS = 60


@dataclass(frozen=True)
class MeasuredStep:
    """Tokens of a step, how many of them are decodes, and its duration."""

    tokens: int
    decodes: int
    duration_s: float


def _ms(tokens: int, decodes: int, duration_ms: float) -> MeasuredStep:
    return MeasuredStep(tokens, decodes, duration_ms / 1e3)


# Mistral-7B shapes with a rank-16 adapter on one H200: `curve` of docs/benchmarks/2026-11-30-gpu-steps/speed2.json.gz
# (embeddings, embeddings beside decodes, decodes alone). Shorter chunk steps are the host's: see `H200_HOST_S`.
H200_STEPS = (
    *(_ms(tokens, 0, ms) for tokens, ms in ((1024, 27.012), (1536, 39.39), (2048, 50.753), (4096, 100.213))),
    *(_ms(2048, decodes, ms) for decodes, ms in ((16, 51.298), (64, 53.869), (128, 56.046), (240, 59.41))),
    *(_ms(decodes, decodes, ms) for decodes, ms in ((16, 4.963), (64, 6.43), (128, 8.451), (240, 13.199))),
)
# "Steps under some 500 tokens that hold prompt chunks take 10 to 13 ms whatever they hold" (the note on that run).
H200_HOST_S = 0.0115


@dataclass(frozen=True)
class StepClock:
    """Durations of steps.

    Attributes:
        chunks: of steps with prompt chunks.
        decodes: of steps without any.
        host_s: the shortest step with chunks.
    """

    chunks: StepTimeModel
    decodes: StepTimeModel
    host_s: float = 0.0

    def duration_s(self, tokens: int, decodes: int) -> float:
        """Of a step of so many tokens, decodes among them."""
        if tokens == decodes:
            return self.decodes.predict(tokens, decodes)
        return max(self.host_s, self.chunks.predict(tokens, decodes))


def fit(steps: Iterable[MeasuredStep], host_s: float = 0.0) -> StepClock:
    """A clock that goes by these steps."""
    steps = list(steps)
    largest = float(max(step.tokens for step in steps))
    chunks, decodes = StepTimeModel(scale=largest), StepTimeModel(scale=largest)
    for _ in range(NUM_SHOWINGS):
        for step in steps:
            (decodes if step.tokens == step.decodes else chunks).observe(step.tokens, step.decodes, step.duration_s)
    return StepClock(chunks, decodes, host_s)


def h200() -> StepClock:
    """One H200."""
    return fit(H200_STEPS, H200_HOST_S)
