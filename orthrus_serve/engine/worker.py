"""Workers that build the mixed runner, for CPU and CUDA. Nothing else differs from vLLM's own.

Each platform's vLLM modules are imported inside: importing the CUDA worker on a CPU build fails, and the other way round.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from typing_extensions import override
from vllm.platforms import current_platform

from orthrus_serve.engine.runner import mixed_runner_class
from orthrus_serve.engine.vllm_compat import CPU_HOOKS, CUDA_HOOKS, verify_hooks
from orthrus_serve.engine.vllm_fixes import make_intermediate_tensors, same_cores


@contextmanager
def lora_wrapper(platform: Any, name: str) -> Iterator[None]:
    """LoRA layers ask the platform for their wrapper while the model loads; within this they are told `name`."""
    stock = platform.__dict__["get_punica_wrapper"]
    platform.get_punica_wrapper = classmethod(lambda _: name)
    try:
        yield
    finally:
        platform.get_punica_wrapper = stock


if current_platform.is_cpu() or TYPE_CHECKING:
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker import cpu_worker
    from vllm.v1.worker.cpu_worker import CPUWorker

    verify_hooks(CPU_HOOKS)
    _GROUPED_LORA = "orthrus_serve.engine.cpu_lora.GroupedPunicaWrapperCPU"

    class MixedCPUWorker(CPUWorker):
        """CPU worker with the mixed runner and grouped LoRA products."""

        @override
        def init_device(self) -> None:
            # CPUWorker builds its runner inline, without a factory: swap the class that it looks up, only for that moment.
            owner: Any = cpu_worker
            if self.use_v2_model_runner:
                from vllm.v1.worker.cpu import model_runner as owner  # noqa: PLC0415  needs Triton, V1 does not
            stock = owner.CPUModelRunner
            owner.CPUModelRunner = mixed_runner_class(stock, is_v2=bool(self.use_v2_model_runner))
            try:
                super().init_device()
            finally:
                owner.CPUModelRunner = stock

        @override
        def initialize_from_config(self, kv_cache_config: Any) -> None:
            with same_cores():
                super().initialize_from_config(kv_cache_config)

        @override
        def load_model(self, **kwargs: Any) -> None:
            with lora_wrapper(CpuPlatform, _GROUPED_LORA):
                super().load_model(**kwargs)
            if not self.use_v2_model_runner:
                make_intermediate_tensors(self.model_runner)


if current_platform.is_cuda() or TYPE_CHECKING:
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.v1.worker.gpu_worker import Worker

    from orthrus_serve.engine.lora_expand import use_tuned_configs

    verify_hooks(CUDA_HOOKS)
    _HOST_SORTED_LORA = "orthrus_serve.engine.gpu_lora.HostSortedPunicaWrapperGPU"

    class MixedGPUWorker(Worker):
        """CUDA worker with the mixed runner. V2 only: the runner that vLLM keeps."""

        @override
        def _make_model_runner(self) -> Any:
            if not self.use_v2_model_runner:
                raise RuntimeError("Orthrus runs the V2 model runner on CUDA: set VLLM_USE_V2_MODEL_RUNNER=1")
            from vllm.v1.worker.gpu.model_runner import GPUModelRunner  # noqa: PLC0415  as vLLM does

            return mixed_runner_class(GPUModelRunner, is_v2=True)(self.vllm_config, self.device)

        @override
        def load_model(self, **kwargs: Any) -> None:
            use_tuned_configs(current_platform.get_device_name())
            with lora_wrapper(CudaPlatformBase, _HOST_SORTED_LORA):
                super().load_model(**kwargs)
