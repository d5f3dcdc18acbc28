"""Lets vLLM's V2 model runner run on CPU: its Triton kernels are interpreted, with numpy, instead of compiled.

CUDA runs V2 only, and this is how its code is tested without a GPU: slow (some 45 ms a step), so small. Test only, and for a
process of its own: it decides for every Triton kernel of the process.

`python -m tests.engine.triton_interpreter MODULE [ARGUMENT ...]` runs a module that way.
"""

import os
import runpy
import sys
from typing import Any


class _InterpretedDriver:
    """What vLLM and Triton ask of a backend's driver before any kernel is launched. It never launches one."""

    @staticmethod
    def is_active() -> bool:
        # Triton takes the only active driver; vLLM switches Triton off unless there is exactly one.
        return True

    @staticmethod
    def get_current_target() -> Any:
        # Asked for while kernels are declared (launch heuristics look at the target's backend and warp size).
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 1)

    @staticmethod
    def get_current_device() -> int:
        # Declared kernels cache what they know per device.
        return 0


class _InterpretedBackend:
    driver = _InterpretedDriver
    compiler = None


def use_interpreter() -> None:
    """Before vLLM is imported. Later changes nothing: `@triton.jit` reads the switch when it decorates."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    import triton.backends

    # vLLM's CPU build keeps Triton only if a backend named "cpu" exists (vllm/triton_utils/importing.py).
    triton.backends.backends["cpu"] = _InterpretedBackend()  # type: ignore[assignment]


if __name__ == "__main__":
    use_interpreter()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
