"""An engine that shares its card with another one: says what it has left, and scales its steps from what the other says.

Lives in the scheduler, on the core's own thread. Leaves out the arithmetic (`policy/card_share.py`) and the shared memory
(`card_page.py`).
"""

from collections.abc import Collection
from typing import Any

from orthrus_serve.engine.card_page import CardPage
from orthrus_serve.engine.lane_queue import lane_of
from orthrus_serve.engine.vllm_compat import Request
from orthrus_serve.policy.card_share import CardLoad, credited, share_of, share_tokens
from orthrus_serve.policy.charge import OutputLengths
from orthrus_serve.policy.remaining import Progress, remaining_tokens
from orthrus_serve.policy.step_plan import Lane
from orthrus_serve.types import CardShare


class CardPartner:
    """One of two engines on a card.

    Args:
        path: the page (`card_page.make_page`).
        slot: which of its two this engine writes.

    Attributes:
        told: of the last step, what both had left and this engine's share; for the record of steps.
    """

    def __init__(self, path: str, slot: int) -> None:
        self._page = CardPage(path, slot)
        self._lengths = OutputLengths()
        self._credit = 0
        self._granted: int | None = None  # of the step that is being scheduled; None: nothing to be carried over
        self.told: dict[str, float] = {}

    def budget(
        self,
        rule: CardShare,
        min_share: float,
        decodes: int,
        largest: int,
        *,
        requests: Collection[Request],
        can_chunk: bool,
    ) -> int:
        """Publishes what this engine has left, and returns the budget of its next step, at most `largest`.

        Args:
            requests: all that the engine holds.
            can_chunk: whether an input may be computed in parts; otherwise what a step leaves over is carried to the next.
        """
        load = CardLoad(self._remaining(requests), self._page.other_tokens())
        self._page.publish(load.own)
        share = share_of(rule, load, min_share)
        self.told = {"own": load.own, "other": load.other, "share": round(share, 4)}
        tokens = share_tokens(share, largest, decodes)
        self._granted = None if can_chunk else credited(self._credit, tokens, largest)
        return tokens if self._granted is None else self._granted

    def computed(self, tokens: int, *, is_line_empty: bool) -> None:
        """The step holds so many tokens. Nobody waiting: nothing is carried over, an idle engine saves up no credit."""
        self._credit = 0 if self._granted is None or is_line_empty else max(0, self._granted - tokens)

    def learn(self, were_running: Collection[Request]) -> None:
        """Takes in the lengths of outputs that are complete."""
        for request in were_running:
            if request.pooling_params is None and request.is_finished():
                self._lengths.observe(request.num_output_tokens)

    def rest(self) -> None:
        """Nothing is left: the other engine has the card at once."""
        self._page.publish(0)

    def _remaining(self, requests: Collection[Request]) -> int:
        # An output that outlives its expectation counts nothing, yet its engine is not idle: one token each at least.
        left = remaining_tokens([_progress(request) for request in requests], self._lengths.expected)
        return max(left, len(requests))


def _progress(request: Request) -> Progress:
    prompt_left = request.num_prompt_tokens - request.num_computed_tokens
    most: Any = request.max_tokens if lane_of(request) is Lane.GENERATE else 0
    return Progress(prompt_left, request.num_output_tokens, most)
