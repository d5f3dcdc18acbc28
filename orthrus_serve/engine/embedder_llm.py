"""AsyncLLM of a model that only embeds, in vLLM's own pooling runner: topology `separate_models`.

Adds the channel, the length that vectors are cut to, and metrics beside those of another engine in the same process. Leaves
out pooling, which the model's own files say and vLLM does.
"""

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from typing_extensions import override
from vllm.outputs import PoolingRequestOutput
from vllm.pooling_params import PoolingParams
from vllm.v1.metrics.loggers import PrometheusStatLogger

from orthrus_serve.engine.llm import ReportingLLM, embed_dimensions, require_vector
from orthrus_serve.engine.vllm_compat import EMBEDDER_HOOKS, verify_hooks

verify_hooks(EMBEDDER_HOOKS)


class EmbedderLLM(ReportingLLM):
    """One engine that embeds. Made by `separate.start_separate`."""

    @override
    async def encode(
        self, prompt: Any, pooling_params: PoolingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Embeds one input.

        Raises:
            ValueError: the input is empty or too long. A clean 400 in vLLM's app.
            EmbeddingFailedError: the request was admitted but has no vector.
        """
        if not prompt["prompt_token_ids"]:
            raise ValueError("input: an embedding needs at least one token")
        if embed_dimensions.get() is not None:
            pooling_params.dimensions = embed_dimensions.get()
        async for output in super().encode(prompt, pooling_params, request_id, **kwargs):
            require_vector(output)
            yield output


def own_metrics(registry: CollectorRegistry) -> type[PrometheusStatLogger]:
    """vLLM's Prometheus logger, publishing into this registry.

    The stock one registers in the process's own, where a second engine would take the first one's metrics away.
    """

    class OwnMetrics(PrometheusStatLogger):
        _gauge_cls: Any = partial(Gauge, registry=registry)
        _counter_cls: Any = partial(Counter, registry=registry)
        _histogram_cls: Any = partial(Histogram, registry=registry)

    return OwnMetrics
