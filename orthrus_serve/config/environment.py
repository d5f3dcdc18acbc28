"""The switches that vLLM and its libraries read from the environment, as the processes of an engine replica need them.

The one place where they are decided: a replica gets them through Ray's `runtime_env`. Leaves out what Ray itself reads before
it starts (`RAY_*`), which belongs to whoever starts Ray; only its token is read here, for talking to a Ray that runs.
"""

import os
from pathlib import Path

from orthrus_serve.config.schema import AppArgs


def replica_environment(args: AppArgs) -> dict[str, str]:
    """Environment variables of every engine replica of this application."""
    on_cuda = args.num_gpus_per_replica > 0
    # CPU engines run eager, and yet the first request for logprobs would stop everybody for a compiler run of 20 s.
    only_on_cpu = {} if on_cuda else {"TORCHDYNAMO_DISABLE": "1"}
    # vLLM's own default is another protocol on another port.
    protocol = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_SERVICE_NAME": "orthrus-engine"}
    # V2 is the runner that vLLM keeps; on CPU it exists through Triton's interpreter only. Stock engines on CUDA get what vLLM
    # takes for their model.
    runner = {} if on_cuda and args.embedder is not None else {"VLLM_USE_V2_MODEL_RUNNER": "1" if on_cuda else "0"}
    return {
        **only_on_cpu,
        **(protocol if args.tracing is not None else {}),
        **runner,
        # Models are folders; nothing is fetched behind the operator's back, and nothing is reported.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Our limits decide; vLLM's own, which cannot be set per application, must not be lower.
        "VLLM_MAX_COMPLETION_PROMPTS": str(args.limits.max_inputs),
        "VLLM_MAX_N_SEQUENCES": str(max(args.limits.max_inputs, args.limits.max_n)),
    }


def kv_side_channel(host: str, port: int) -> None:
    """Where the engine core of this process tells others how to fetch KV from it; its connector reads it when it is made."""
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host  # noqa: TID251 - this is the one place
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)  # noqa: TID251


def ray_auth_token() -> str | None:
    """The token that Ray's commands send, from where they have it: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token."""
    token = os.environ.get("RAY_AUTH_TOKEN", "").strip()  # noqa: TID251 - this is the one place
    if token:
        return token
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"  # noqa: TID251
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
