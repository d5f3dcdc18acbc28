"""Fixes of bugs in stock vLLM that a mixed engine meets beside AsyncLLM. Each says what goes wrong without it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from typing_extensions import override
from vllm.distributed import get_pp_group
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import output_processor
from vllm.v1.engine.output_processor import OutputProcessor

from orthrus_serve.engine.vllm_compat import ENGINE_HOOKS, verify_hooks

# The scheduler's reason for ending a generation that neither its grammar nor its sampling parameters leave a token.
NO_TOKEN_LEFT = "no_token_left"


def complete_aborted_poolings(outputs: Sequence[Any], states: Any) -> None:
    """Gives every ended pooling request without a vector an empty one.

    Stock (v1/engine/output_processor.py, "assert req_state.detokenizer is not None"): an abort or error of a pooling request
    that comes from the engine's side (pause, KV load failure) has no pooling output, and the failing assertion ends the whole
    AsyncLLM. The empty vector becomes an error in `MixedLLM.encode`.
    """
    for output in outputs:
        state = states.get(output.request_id)
        is_pooling = state is not None and state.detokenizer is None
        if is_pooling and output.pooling_output is None and output.finish_reason is not None:
            output.pooling_output = output_processor.EMPTY_CPU_TENSOR


def refuse_the_unanswerable(outputs: Sequence[Any], states: Any) -> list[str]:
    """Makes a request without a token that may follow its caller's error (a 400), not the server's.

    Stock (v1/core/sched/scheduler.py, "grammar rejected tokens"): `structured_outputs` beside `allowed_token_ids` that have
    nothing in common, or a vocabulary that cannot write what the grammar asks for, leave every token masked; one is sampled
    none the less, the grammar rejects it, and the caller reads "Internal server error".

    Returns:
        Requests of several outputs whose others are to be ended: their caller has its answer.
    """
    parents: list[str] = []
    for output in outputs:
        if output.stop_reason != NO_TOKEN_LEFT:
            continue
        state = states.get(output.request_id)
        if state is None or state.queue is None:
            continue
        message = (
            f"After {state.detokenizer.num_output_tokens()} tokens of output, no token may follow: the format asked for has "
            "none in common with those allowed (allowed_token_ids, bad_words, logit_bias, min_tokens), or the model's "
            "vocabulary cannot write that format."
        )
        state.queue.put(VLLMValidationError(message, parameter="structured_outputs"))
        if state.parent_req is not None:
            parents.append(state.parent_req.request_id)
    return parents


class FixedOutputProcessor(OutputProcessor):
    """vLLM's output processor with `complete_aborted_poolings` and `refuse_the_unanswerable` before it."""

    @override
    def process_outputs(self, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        complete_aborted_poolings(engine_core_outputs, self.request_states)
        refused = refuse_the_unanswerable(engine_core_outputs, self.request_states)
        processed = super().process_outputs(engine_core_outputs, *args, **kwargs)
        if refused:  # nearly never, and this is called for every step
            processed.reqs_to_abort.extend(self.abort_requests(refused, internal=True))
        return processed


def fix_output_processor(llm: Any) -> None:
    """Makes an engine's output processor a fixed one, in place."""
    verify_hooks(ENGINE_HOOKS)
    llm.output_processor.__class__ = FixedOutputProcessor


@contextmanager
def unfinished_prompts_without_seeds(input_batch: Any, discarded_rows: Sequence[int]) -> Iterator[None]:
    """Hides the random generators of rows whose sampled token will be discarded, while tokens are sampled.

    Stock (v1/worker/gpu_model_runner.py, "gen.set_offset(gen.get_offset() - 4)"): the V1 runner samples from unfinished
    prompts too and then rewinds their generators. A CPU generator has no offset, so the first chunk of a seeded request's
    prompt ends EngineCore. A generator that was never used needs no rewinding.
    """
    hidden = {row: input_batch.generators.pop(row) for row in discarded_rows if row in input_batch.generators}
    try:
        yield
    finally:
        input_batch.generators.update(hidden)


@contextmanager
def same_cores() -> Iterator[None]:
    """Keeps this thread on the cores that it may run on now.

    Stock (kv_connector/v1/nixl/base_worker.py, "rsv_cores_for_kv"): on CPU the connector ties the worker's own thread, which
    computes, to the last core of each NUMA node: on a machine of two cores all engines then share one.
    """
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def make_intermediate_tensors(runner: Any) -> None:
    """Gives a V1 runner that is not the first pipeline rank the buffers that it receives hidden states in.

    Stock (v1/worker/cpu_worker.py, `_should_warm_up_model`): they are made in the warm-up pass, which an eager CPU worker with
    an explicit KV size skips; the first step then fails on an assertion.
    """
    if get_pp_group().is_first_rank or getattr(runner, "intermediate_tensors", None) is not None:
        return
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )
