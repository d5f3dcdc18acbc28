"""The answering half of one HTTP exchange: passes messages on, names the arm, and remembers how the answer went.

Leaves out what is answered.
"""

import time
from collections.abc import Callable

from orthrus_serve.serving.tunnel import Header, Message, Send
from orthrus_serve.types import ReplicaId

ARM_HEADER = b"x-orthrus-arm"


class Exchange:
    """Stands in for an ASGI `send`.

    Attributes:
        arm: the arm that answers; empty where there are none.
        request_id: the client's, or the one that Serve or the Front made.
        traced: what the headers that go on to the engine become; as they are, without tracing.
        status: None until the answer begins.
        first_s: when the first part of a stream was sent (monotonic clock); None of an answer in one piece.
        tap: sees every message, and may change it.
        num_tokens: prompt and output tokens of the answer, as far as they are known.
        placed_s: when a replica was first chosen (monotonic clock); None before that.
        replica: the replica that was last chosen.
        num_tries: how many replicas were asked.
    """

    def __init__(self, send: Send, arm: str = "") -> None:
        self._send = send
        self.arm = arm
        self.request_id = ""
        self.traced: Callable[[list[Header]], list[Header]] = list
        self.status: int | None = None
        self.first_s: float | None = None
        self.num_tokens = 0
        self.placed_s: float | None = None
        self.replica: ReplicaId | None = None
        self.num_tries = 0
        self.tap: Callable[[Message], Message] | None = None
        self.is_cut = False
        self.has_left = False

    def tried(self, replica_id: ReplicaId | None, placed_s: float | None) -> None:
        """A replica was asked, or none was found."""
        if replica_id is None:
            return
        self.num_tries += 1
        self.replica = replica_id
        if self.placed_s is None:
            self.placed_s = placed_s

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
