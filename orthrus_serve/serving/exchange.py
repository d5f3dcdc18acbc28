"""The answering half of one HTTP exchange: passes messages on, names the arm, and remembers how the answer went.

Leaves out what is answered.
"""

import time
from collections.abc import Callable

from orthrus_serve.serving.tunnel import Message, Send

ARM_HEADER = b"x-orthrus-arm"


class Exchange:
    """Stands in for an ASGI `send`.

    Attributes:
        arm: the arm that answers; empty where there are none.
        status: None until the answer begins.
        first_s: when the first part of a stream was sent (monotonic clock); None of an answer in one piece.
        tap: sees every message, and may change it.
        num_tokens: prompt and output tokens of the answer, as far as they are known.
    """

    def __init__(self, send: Send, arm: str = "") -> None:
        self._send = send
        self.arm = arm
        self.status: int | None = None
        self.first_s: float | None = None
        self.num_tokens = 0
        self.tap: Callable[[Message], Message] | None = None
        self.is_cut = False
        self.has_left = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.arm:
                message = {**message, "headers": [*message["headers"], (ARM_HEADER, self.arm.encode())]}
        elif self.first_s is None and message.get("more_body") and message.get("body"):
            self.first_s = time.monotonic()
        if self.tap is not None:
            message = self.tap(message)
        await self._send(message)
