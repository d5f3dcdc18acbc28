"""The mixed model runner: embedding rows ride through vLLM's generation runner, and their hidden states go to the pooler.

Masquerade: inside the worker a new embedding request becomes a greedy one-token request, so that sampler, penalties, LoRA and
pipeline state stay right without a change; after the forward its hidden rows are pooled, its sampled token is dropped and its
vector attached to the output. Leaves out scheduling and everything that a request can ask for over HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from typing_extensions import override
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from orthrus_serve.engine.lora_check import require_bound
from orthrus_serve.engine.pooling import ChunkRows, FinishedVectors, ProgressivePooler
from orthrus_serve.engine.settings import EngineSettings
from orthrus_serve.engine.transfer import HostCopy
from orthrus_serve.engine.vllm_compat import SchedulerOutput
from orthrus_serve.engine.vllm_fixes import unfinished_prompts_without_seeds

_ONE_GREEDY_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)

# Stock front ends neither append an end-of-sequence token nor take an ended embedding; a vector from here would be wrong.
_NO_FRONT = (
    "an embedding arrived that no Orthrus front half prepared: start `vllm serve` with the --middleware option that "
    "`orthrus-serve vllm-args` prints, or give PoolingParams.extra_kwargs a 'pooling'"
)


@dataclass(frozen=True)
class Embedded:
    """The embedding rows of a step, and the vectors it completed, on their way to the host.

    Args:
        ids: every embedding request with rows in the step.
        finished: the vectors that are complete; None when there are none, and then `copy` is None too.
        copy: the copy of these vectors.
    """

    ids: Sequence[str]
    finished: FinishedVectors | None
    copy: HostCopy | None

    def attach_to(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Waits for the copy; then drops the rows' sampled tokens and attaches the vectors. Changes and returns `output`."""
        vectors = self.finished.on_host(self.copy.wait()) if self.finished and self.copy else {}
        return attach_vectors(output, self.ids, vectors)


Rows = tuple[torch.Tensor | None, Sequence[str], Sequence[int]]


class MixedRunnerMixin:
    """Embeds beside generating. Mixed into a vLLM runner by `mixed_runner_class`, with a `_rows` that knows the runner."""

    execute_model_state: Any
    vllm_config: Any
    device: torch.device

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = EngineSettings.from_additional_config(self.vllm_config.additional_config)
        self.pooler_progress = ProgressivePooler(self.vllm_config.scheduler_config.max_num_seqs)
        self._embedded: Embedded | None = None

    def _rows(self) -> Rows:
        """Hidden states `[rows, d]` of the forward just done (None on all but the last pipeline rank), the request ids in
        batch order, and the first row of each request followed by the row after the last."""
        raise NotImplementedError

    def _copy_stream(self) -> Any:
        """The CUDA stream on which the runner copies its outputs to the host; None where there is none."""
        return None

    def get_supported_tasks(self) -> tuple[str, ...]:
        tasks = tuple(super().get_supported_tasks())  # pyright: ignore[reportAttributeAccessIssue]
        return (*tasks, "embed") if "generate" in tasks and "embed" not in tasks else tasks

    def add_lora(self, lora_request: Any) -> bool:
        added = super().add_lora(lora_request)  # pyright: ignore[reportAttributeAccessIssue]
        require_bound(self, lora_request)
        return added

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        size = self.vllm_config.model_config.get_hidden_size()
        for spec in self.settings.adapters.values():
            if spec.head is not None:
                self.pooler_progress.load_head(spec.head, size, self.device)

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        parent = super().execute_model  # pyright: ignore[reportAttributeAccessIssue]
        if kwargs.get("dummy_run"):
            return parent(scheduler_output, *args, **kwargs)
        output = parent(self._masquerade(scheduler_output), *args, **kwargs)
        self._embedded = None
        if output is None and len(self.pooler_progress) and self.execute_model_state is not None:
            ids = [rid for rid in scheduler_output.num_scheduled_tokens if rid in self.pooler_progress]
            if ids:
                self._embedded = self._pool(scheduler_output, ids)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)  # pyright: ignore[reportAttributeAccessIssue]
        embedded, self._embedded = self._embedded, None
        if embedded is None or output is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return MixedAsyncOutput(output, embedded)
        if not output.req_ids:  # not the last pipeline rank: nothing was sampled here
            return output
        return embedded.attach_to(output)

    def _masquerade(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Begins and forgets pooling states, and shows the parent runner one-token generations instead of embeddings.

        Finished means aborted too. A preempted request keeps its state: it comes back with a chunk that starts at 0 (V1: as
        a cached request, V2: as a new one), and that begins its sums anew.
        """
        for request_id in scheduler_output.finished_req_ids:
            self.pooler_progress.remove(request_id)
        for request_id in scheduler_output.preempted_req_ids or ():
            self.pooler_progress.drop_states(request_id)
        new_requests = []
        for new in scheduler_output.scheduled_new_reqs:
            if new.pooling_params is not None:
                if "pooling" not in (new.pooling_params.extra_kwargs or {}):
                    raise RuntimeError(_NO_FRONT)
                adapter = new.lora_request.lora_name if new.lora_request else None
                spec = self.settings.pooling_of(adapter, new.pooling_params.extra_kwargs)
                self.pooler_progress.add(new.req_id, spec, len(new.prompt_token_ids or ()))
                new = replace(new, sampling_params=_ONE_GREEDY_TOKEN, pooling_params=None)
            new_requests.append(new)
        return replace(scheduler_output, scheduled_new_reqs=new_requests)

    @torch.inference_mode()
    def _pool(self, scheduler_output: SchedulerOutput, ids: list[str]) -> Embedded:
        hidden, order, first_rows = self._rows()
        if hidden is None:
            return Embedded(ids, None, None)
        starts = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        place = {request_id: i for i, request_id in enumerate(order)}
        chunks = [
            ChunkRows(rid, int(first_rows[place[rid]]), int(first_rows[place[rid] + 1]), starts[rid]) for rid in ids
        ]
        finished = self.pooler_progress.step(hidden, chunks)
        return Embedded(ids, finished, HostCopy(finished.vectors, self._copy_stream()) if finished else None)


class MixedAsyncOutput(AsyncModelRunnerOutput):
    """An output that is still being computed (async scheduling), with the vectors on their way to the host beside it."""

    def __init__(self, inner: AsyncModelRunnerOutput, embedded: Embedded) -> None:
        self._inner = inner
        self._embedded = embedded

    @override
    def get_output(self) -> ModelRunnerOutput:
        return self._embedded.attach_to(self._inner.get_output())


def attach_vectors(
    output: ModelRunnerOutput, ids: Sequence[str], vectors: dict[str, torch.Tensor]
) -> ModelRunnerOutput:
    """Drops the sampled token of each embedding row and attaches its vector, if complete. Changes and returns `output`.

    vLLM's `update_from_output` takes a pooler output per row and an empty list of sampled tokens as they are.
    """
    pooled: list[torch.Tensor | None] = [None] * len(output.req_ids)
    for request_id in ids:
        row = output.req_id_to_index[request_id]
        if output.sampled_token_ids:
            output.sampled_token_ids[row] = []
        pooled[row] = vectors.get(request_id)
    output.pooler_output = pooled
    return output


class _V1Rows(MixedRunnerMixin):
    discard_request_mask: Any
    input_batch: Any
    query_start_loc: Any

    @override
    def sample_tokens(self, grammar_output: Any) -> Any:
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        with unfinished_prompts_without_seeds(self.input_batch, discarded):
            return super().sample_tokens(grammar_output)

    @override
    def _rows(self) -> Rows:
        return self.execute_model_state.hidden_states, self.input_batch.req_ids, self.query_start_loc.np


class _V2Rows(MixedRunnerMixin):
    output_copy_stream: Any

    @override
    def _copy_stream(self) -> Any:
        return self.output_copy_stream

    @override
    def _rows(self) -> Rows:
        batch = self.execute_model_state.input_batch
        return self.execute_model_state.hidden_states, batch.req_ids, batch.query_start_loc_np


def mixed_runner_class(parent: type, *, is_v2: bool) -> type:
    """The mixed subclass of a vLLM model runner class (V1 or V2, CPU or CUDA)."""
    return type(f"Mixed{parent.__name__}", (_V2Rows if is_v2 else _V1Rows, parent), {})
