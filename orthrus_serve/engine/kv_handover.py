"""KV that one engine computed and another fetches: the connector's settings, and what makes a handover safe. Imports no vLLM.

vLLM's connector moves blocks by their place in the prompt and trusts that both sides see the same prompt. Guards: KV is fetched
only for the tokens and the adapter for which it was computed (`orthrus_prompt`, a digest that travels with the handover), never
from oneself, and never so late that the other engine may have given its place to others; else it is computed anew.
Leaves out the transfer itself (vLLM's `NixlConnector`).
"""

from array import array
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from orthrus_serve.config.schema import AppArgs

CONNECTOR = "NixlConnector"
DIGEST = "orthrus_prompt"
FETCH_BY = "orthrus_fetch_by_s"
# The part of a lease within which fetching begins. The rest is for what went before (the Front) and for the transfer.
LEASE_RATIO = 0.5


def kv_transfer_kwargs(args: AppArgs, *, on_cpu: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's `KVTransferConfig`, JSON-able; none without a connector.

    Every engine both gives and takes: roles are the router's, so that another engine can take over a lost one's role.
    """
    if args.kv_connector is None:
        return {}
    return {
        "kv_transfer_config": {
            "kv_connector": CONNECTOR,
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu" if on_cpu else "cuda",
            # KV that cannot be fetched (its engine is gone) is computed here instead.
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": args.kv_lease_s},
        }
    }


def prompt_digest(request: Any) -> str:
    """Of a vLLM `Request`: its prompt's tokens and its adapter, whose KV differs."""
    adapter = request.lora_request.lora_name if request.lora_request is not None else ""
    ids = array("q", request.prompt_token_ids or ())
    return blake2b(ids.tobytes() + adapter.encode(), digest_size=16).hexdigest()


def is_to_fetch(params: Mapping[str, Any] | None) -> bool:
    """Whether a request's prompt is to be fetched from another engine, and was not asked for yet."""
    return bool(params and params.get("do_remote_prefill"))


def with_deadline(params: Mapping[str, Any], lease_s: float, now_s: float) -> dict[str, Any]:
    """A handover that arrived now, with the time (this process's monotonic clock) by which its fetching begins."""
    return {**params, FETCH_BY: now_s + LEASE_RATIO * lease_s}


def give_up_late(params: dict[str, Any] | None, now_s: float) -> bool:
    """Whether it is too late to fetch; if so, `params` ask for no fetching any more."""
    if params is None or not is_to_fetch(params) or now_s <= params.get(FETCH_BY, now_s):
        return False
    params["do_remote_prefill"] = False  # in place: the connector must still hear of this request's end
    return True


def problem_with(params: Mapping[str, Any], request: Any, own_engine_id: str | None) -> str | None:
    """Why a handover must not be fetched for that request; None when it may."""
    if params.get(DIGEST) != prompt_digest(request):
        return "it is of another prompt"
    if params.get("remote_engine_id") == own_engine_id:
        return "it is of this engine"
    return None
