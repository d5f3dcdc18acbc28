"""AsyncLLM for both tasks. Adds what an adapter means (end-of-sequence token, pooling, dimensions) and the channel.

Leaves out HTTP (vLLM's own app, `openai_app.py`) and everything that happens in EngineCore (`scheduler.py`, `runner.py`).
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from typing_extensions import override
from vllm.outputs import PoolingRequestOutput
from vllm.pooling_params import PoolingParams
from vllm.v1.engine.async_llm import AsyncLLM

from orthrus_serve.config.schema import AdapterSpec
from orthrus_serve.engine.channel import EngineChannel
from orthrus_serve.engine.vllm_fixes import fix_output_processor
from orthrus_serve.errors import ConfigError

# vLLM refuses `dimensions` by a check of the base model's config, so whoever feeds the app takes the field out of the body and
# sets it here, around the call; the app's own tasks inherit the context.
embed_dimensions: ContextVar[int | None] = ContextVar("embed_dimensions", default=None)

# Called with the id of every request that the engine takes, where whoever feeds the app wants to know which of them are its
# own: set like `embed_dimensions`. The ids are those of the channel's reports.
note_request: ContextVar[Callable[[str], None] | None] = ContextVar("note_request", default=None)


class EmbeddingFailedError(RuntimeError):
    """An admitted embedding request that ended without a vector (aborted by the engine, or not finite)."""


class ReportingLLM(AsyncLLM):
    """An engine with a channel to its scheduler, that tells its own ids of requests."""

    channel: EngineChannel

    def open_channel(self) -> None:
        """Opens the channel. Once, after construction."""
        self.channel = EngineChannel(self)
        fix_output_processor(self)

    @property
    def vocab_size(self) -> int:
        """Ids from 0 to `vocab_size` - 1 are tokens."""
        return self.model_config.get_vocab_size()

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return self.model_config.max_model_len

    @override
    async def add_request(self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """As upstream; where somebody asked for it, tells them the engine's own ids of the request (one for each output)."""
        collector = await super().add_request(request_id, prompt, params, *args, **kwargs)
        note = note_request.get()
        if note is not None:
            num_outputs = getattr(params, "n", 1)
            for index in range(num_outputs):  # as `ParentRequest.get_child_info` names them
                note(collector.request_id if num_outputs == 1 else f"{index}_{collector.request_id}")
        return collector


class MixedLLM(ReportingLLM):
    """One engine that generates and embeds. Made by `args.make_engine`."""

    adapters: Mapping[str, AdapterSpec]

    def configure(self, adapters: Mapping[str, AdapterSpec]) -> None:
        """Gives the engine its embedding adapters (by served name) and its channel. Once, after construction.

        Raises:
            ConfigError: an adapter wants an end-of-sequence token and the tokenizer has none.
        """
        if self.eos_token_id is None and any(spec.append_eos for spec in adapters.values()):
            raise ConfigError("adapters: append_eos is on, but the model's tokenizer has no end-of-sequence token")
        self.adapters = dict(adapters)
        self.open_channel()

    @property
    def eos_token_id(self) -> int | None:
        """The token that adapters with `append_eos` put at the end."""
        return self.renderer.get_tokenizer().eos_token_id if self.renderer.tokenizer is not None else None

    @override
    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: Any = None,
        **kwargs: Any,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Embeds one input.

        The prompt's token ids get the end-of-sequence token where the adapter says so, so `usage` counts it.

        Raises:
            ValueError: no embedding adapter was named, or the input is empty or too long. A clean 400 in vLLM's app.
            EmbeddingFailedError: the request was admitted but has no vector.
        """
        name = lora_request.lora_name if lora_request is not None else None
        adapter = self.adapters.get(name) if name else None
        if adapter is None:
            raise ValueError(f"embeddings need an embedding adapter in 'model': one of {sorted(self.adapters)}")
        token_ids = self._checked_token_ids(list(prompt["prompt_token_ids"]), adapter)
        pooling_params.extra_kwargs = {**(pooling_params.extra_kwargs or {}), **_pooling(adapter, pooling_params)}
        prompt = {**prompt, "prompt_token_ids": token_ids}
        async for output in super().encode(prompt, pooling_params, request_id, lora_request=lora_request, **kwargs):
            require_vector(output)
            yield output

    def _checked_token_ids(self, token_ids: list[int], adapter: AdapterSpec) -> list[int]:
        if not token_ids:
            raise ValueError("input: an embedding needs at least one token")
        if adapter.append_eos and token_ids[-1] != self.eos_token_id:
            assert self.eos_token_id is not None  # checked at start
            token_ids.append(self.eos_token_id)
        longest = self.max_model_len - 1  # the core rejects a prompt as long as the model's context
        if adapter.head is not None:
            longest = min(longest, adapter.head.max_input_tokens)
        if len(token_ids) > longest:
            counted = " (the end-of-sequence token included)" if adapter.append_eos else ""
            raise ValueError(
                f"input: {len(token_ids)} tokens{counted}, but at most {longest} fit; shorten or truncate it"
            )
        return token_ids


def _pooling(adapter: AdapterSpec, params: PoolingParams) -> dict[str, Any]:
    normalize = adapter.normalize if params.use_activation is None else params.use_activation
    return {"pooling": adapter.pooling, "normalize": normalize, "dimensions": embed_dimensions.get()}


def require_vector(output: PoolingRequestOutput) -> None:
    """Raises EmbeddingFailedError when a finished embedding has no vector, or one that is not finite."""
    vector = output.outputs.data
    if output.finished and (vector.numel() == 0 or not bool(torch.isfinite(vector).all())):
        reason = "it was ended by the engine" if vector.numel() == 0 else "its vector is not finite"
        raise EmbeddingFailedError(f"embedding {output.request_id} failed: {reason}")
