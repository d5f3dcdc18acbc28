"""The first half of a generation that two replicas share: its prompt is computed by a replica of the first role.

Guards: whatever becomes of that half, the request goes on: without a handover the second replica computes it whole. The two
calls are made one after the other (Serve gives all calls of one HTTP request one id). Leaves out the bodies (`handover.py`),
the second half, and retries of it (`front.py`).
"""

from dataclasses import dataclass
from typing import Any

from orthrus_serve.errors import RequestError
from orthrus_serve.policy.charge import RequestShape
from orthrus_serve.serving.calls import opened, try_reply
from orthrus_serve.serving.exchange import Exchange
from orthrus_serve.serving.handover import Handover, read_prefill
from orthrus_serve.serving.live_arms import Arm
from orthrus_serve.serving.tries import Tries
from orthrus_serve.serving.tunnel import Reply, TunnelRequest
from orthrus_serve.telemetry.catalog import Handed
from orthrus_serve.telemetry.log import event_log

log = event_log(__name__)


@dataclass(frozen=True)
class Prefilled:
    """What came of the first half: what the second replica is to fetch, or the answer that ends the request (an error of the
    client's). Neither: the second replica computes the request whole. `handed` is for counters."""

    handover: Handover | None = None
    refusal: Reply | None = None
    handed: Handed = "whole"

    @property
    def told(self) -> dict[str, Any]:
        """What the second replica's call says of the first (arguments of `calls.opened`)."""
        return {} if self.handover is None else {"stage": "decode", "handover": self.handover}


WHOLE = Prefilled()


def is_shared(arm: Arm, shape: RequestShape | None) -> bool:
    """Whether two replicas share this request: one prompt with one output, where there are replicas of both roles."""
    if shape is None or shape.kind != "generate" or not arm.routing.hands_over:
        return False
    running = set(arm.state.replicas) - set(arm.state.quarantined)
    return shape.num_outputs == 1 and len(running) > 1


async def prefill(request: TunnelRequest, shape: RequestShape, arm: Arm, tries: Tries, send: Exchange) -> Prefilled:
    """Has the prompt computed. A failure is among `tries` afterwards, so that a request that kills replicas meets two at most.

    Raises:
        RequestError: 503, no replica can take it.
    """
    with opened(request, arm, shape, tries.failed_on, "prefill") as call:
        try:
            reply = await try_reply(call, send.request_id)
        except RequestError:
            raise
        except Exception:  # whatever it is, the other half may do without
            log.exception("prefill_failed", request_id=send.request_id)
            reply = None
        finally:
            send.placed_s = call.placed_s  # not one try more: the second half is the same one
        tries.saw(reply, call.replica_id)
    if tries.gone is not None:
        arm.keeper.told(tries.gone, "its engine is gone")
    if reply is None or tries.has_just_failed:
        return Prefilled(handed="lost")
    if tries.replica_id is not None:
        arm.keeper.ended(shape.kind, (), tries.replica_id, "")
    if reply.status != 200:
        return Prefilled(refusal=reply, handed="refused")
    handover = read_prefill(reply)
    return Prefilled(handover) if handover is None else Prefilled(handover, handed="over")
