"""The Front and error events within streams: whose fault they are decides what follows."""

import pytest

from tests.unit.test_front import SSE, Client, ScriptedPool


@pytest.mark.parametrize("has_begun", [True, False])
@pytest.mark.parametrize(("kind", "is_callers"), [("invalid_request_error", True), ("server_error", False)])
async def test_an_error_event_that_is_the_callers_own_fault_is_nothing_against_the_replica(
    kind: str, is_callers: bool, has_begun: bool
) -> None:
    event = b'event: error\ndata: {"error":{"message":"x","type":"%s","param":null,"code":null}}\n\n' % kind.encode()
    begun = [b'data: {"a": 1}\n\n'] if has_begun else []
    pool = ScriptedPool(*[[(200, SSE), *begun, event]] * 2)
    client = await Client(pool).ask("POST", "/v1/completions", b'{"prompt": "x"}')
    assert client.status == 200
    assert client.body.endswith(event)
    assert client.counted("ok" if is_callers else "failed")
    # One that comes before anything else may be the replica's, and is tried on another one.
    assert len(pool.opened) == (1 if is_callers or has_begun else 2)
