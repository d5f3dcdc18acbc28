"""The front half of a mixed engine under plain `vllm serve`: one ASGI middleware, named by vLLM's own `--middleware` option.

At start it gives vLLM's engine client what `MixedLLM` adds (end-of-sequence token, pooling by adapter, no bare model, aborted
embeddings as errors) and refuses what was never tested; after that it checks `/v1/embeddings` as a replica would. Leaves every
other route as vLLM made it. Its settings travel in `--additional-config`, which `orthrus-serve vllm-args` writes.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from orthrus_serve.config.complaint import sentences
from orthrus_serve.config.schema import AppArgs
from orthrus_serve.engine.args import refuse_large_heads, refuse_untested
from orthrus_serve.engine.engine_kwargs import FRONT_KEY, scheduler_class
from orthrus_serve.engine.llm import MixedLLM, embed_dimensions
from orthrus_serve.engine.pooling_head import vector_sizes
from orthrus_serve.errors import ConfigError, OrthrusError, RequestError
from orthrus_serve.serving.asgi_io import ClientLeftError, read_body, send_error, with_length
from orthrus_serve.serving.request_check import check_request
from orthrus_serve.serving.served import Served, served_by
from orthrus_serve.serving.tunnel import ASGIApp, Message, Receive, Send

Scope = MutableMapping[str, Any]

EMBEDDINGS = "/v1/embeddings"


@dataclass(frozen=True)
class _Front:
    served: Served
    max_body_bytes: int


class OrthrusMiddleware:
    """Made by vLLM around its app: `--middleware orthrus_serve.serving.vllm_middleware.OrthrusMiddleware`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._front: _Front | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._start(scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "POST" and scope["path"] == EMBEDDINGS:
            await self._embed(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._front = upgrade(scope["app"].state.engine_client)
        except OrthrusError as error:
            # An exception here would be taken for an app without a lifespan, and served all the same.
            await receive()
            await send({"type": "lifespan.startup.failed", "message": f"Orthrus: {error}"})
            return
        await self._app(scope, receive, send)

    async def _embed(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._front is not None  # the lifespan came first
        try:
            body = await read_body(receive, scope["headers"], self._front.max_body_bytes)
            checked = check_request(EMBEDDINGS, body, self._front.served)
        except ClientLeftError:
            return
        except RequestError as error:
            await send_error(send, error)
            return
        embed_dimensions.set(checked.dimensions)
        headers = with_length(scope["headers"], len(checked.body))
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()  # the client's disconnect
            replayed = True
            return {"type": "http.request", "body": checked.body, "more_body": False}

        await self._app({**scope, "headers": headers}, replay, send)


def upgrade(engine: Any) -> _Front:
    """Makes vLLM's engine client a mixed one, in place, and returns what requests are checked against.

    Raises:
        ConfigError: the command line lacks a part of what makes an engine mixed, or asks for what was never tested.
    """
    config = engine.vllm_config
    args = _args_of(config.additional_config)
    _require_mixed(config)
    refuse_untested(config)
    refuse_large_heads(args, config)
    engine.__class__ = MixedLLM
    engine.configure(args.adapters)
    served = served_by(
        args,
        base_name=_base_name(config.model_config),
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
        vector_sizes=vector_sizes(args.adapters, engine.model_config.get_hidden_size()),
    )
    return _Front(served, args.limits.max_body_bytes)


def _args_of(additional_config: object) -> AppArgs:
    raw = additional_config.get(FRONT_KEY) if isinstance(additional_config, Mapping) else None
    if raw is None:
        raise ConfigError(f"--additional-config: lacks {FRONT_KEY!r}; `orthrus-serve vllm-args FILE` prints it whole")
    try:
        return AppArgs.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(sentences(error, AppArgs, ("--additional-config", FRONT_KEY)))) from error


def _require_mixed(config: Any) -> None:
    worker, scheduler = config.parallel_config.worker_cls, config.scheduler_config.scheduler_cls
    wanted = scheduler_class(async_scheduling=bool(config.scheduler_config.async_scheduling))
    if scheduler != wanted:
        raise ConfigError(f"--scheduler-cls: must be {wanted} with these settings, got {scheduler}")
    if not str(worker).startswith("orthrus_serve.engine.worker.Mixed"):
        raise ConfigError(f"--worker-cls: must be one of orthrus_serve.engine.worker, got {worker}")


def _base_name(model_config: Any) -> str:
    name = model_config.served_model_name
    return name if isinstance(name, str) else name[0]
