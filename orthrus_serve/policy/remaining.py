"""Remaining tokens, defined once: what a Front charges a request and what a replica reports of it are the same sum. Pure.

    remaining = prompt tokens not computed + max(0, min(most, expected) - made)        for each output

Leaves out how a Front guesses the prompt and the expected output (`charge.py`), and where a replica has its facts from.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Facts about one request inside an engine; an embedding has no output.

    Attributes:
        num_prompt_left: prompt tokens not computed yet.
        num_made: output tokens made.
        max_output: output tokens at which it ends at the latest.
    """

    num_prompt_left: int
    num_made: int = 0
    max_output: int = 0


def output_left(expected_output: int, max_output: int | None, num_made: int = 0) -> int:
    """Tokens that an output is still expected to have, never negative; `max_output` None is no limit."""
    expected = expected_output if max_output is None else min(expected_output, max_output)
    return max(0, expected - num_made)


def remaining_tokens(progress: Collection[Progress], expected_output: int) -> int:
    """What is left of a call: of all its requests that the engine holds; those that it has finished are not among them."""
    return sum(
        max(0, request.num_prompt_left) + output_left(expected_output, request.max_output, request.num_made)
        for request in progress
    )
