"""vLLM's own OpenAI app over a mixed engine: chat, completions, embeddings, tokenisation, errors. We write none of it.

Leaves out which of its routes may be reached (the Front's allow-list) and how bytes get here (the tunnel).
"""

from argparse import Namespace
from collections.abc import Mapping
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any

from fastapi.responses import JSONResponse
from starlette.middleware.exceptions import ExceptionMiddleware
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.entrypoints.openai.models.protocol import LoRAModulePath

from orthrus_serve.config.schema import AppArgs
from orthrus_serve.engine.args import engine_args, prepared_adapters
from orthrus_serve.engine.llm import MixedLLM, ReportingLLM

# Where FastAPI reads bodies, and what code that takes a field for something else raises there; vLLM answers TypeError itself.
PARSING = "fastapi.dependencies.utils"
UNREADABLE = (AttributeError, LookupError)


async def make_openai_app(engine: MixedLLM, args: AppArgs) -> Any:
    """The ASGI app. Loads the adapters into the engine, so an adapter that does not fit stops the start here.

    Raises:
        AdapterError, ValueError: an adapter that cannot be loaded or whose modules do not match the model.
    """
    return await openai_app(engine, engine_args(args), prepared_adapters(args))


async def openai_app(engine: ReportingLLM, started_with: AsyncEngineArgs, adapters: Mapping[str, str]) -> Any:
    """The ASGI app of an engine, whatever it serves.

    Args:
        started_with: the arguments that the engine was started with.
        adapters: served name → folder of every adapter to load.
    """
    front_end = FrontendArgs(lora_modules=[LoRAModulePath(name=name, path=path) for name, path in adapters.items()])
    namespace = Namespace(**(vars(front_end) | vars(started_with)))
    tasks = await engine.get_supported_tasks()
    app = build_app(namespace, supported_tasks=tasks, model_config=engine.model_config)
    await init_app_state(engine, app.state, namespace, tasks)
    app.state.server = SimpleNamespace()  # handlers look for the uvicorn server, which there is none of
    _refuse_unreadable_bodies(app)
    return app


def _refuse_unreadable_bodies(app: Any) -> None:
    """Adds our handler of errors. The application's layers are made already; made anew, its counters of requests would be
    found taken, and count nothing."""
    layer = app.middleware_stack or app.build_middleware_stack()
    app.middleware_stack = layer
    while not isinstance(layer, ExceptionMiddleware):
        layer = layer.app
    for kind in UNREADABLE:
        layer.add_exception_handler(kind, _refuse_unreadable)


async def _refuse_unreadable(_request: Any, error: Exception) -> JSONResponse:
    """A 400 for a body on which vLLM's own checks stumble (`"tools": [1]`, say): they run before types are checked, and what
    they raise then would be a 500."""
    if not any(frame.f_globals.get("__name__") == PARSING for frame, _ in walk_tb(error.__traceback__)):
        raise error
    problem = f"misses {error}" if isinstance(error, LookupError) else f"has a field of the wrong type: {error}"
    message = f"The body {problem}."
    return JSONResponse({"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}, 400)
