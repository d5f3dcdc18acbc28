"""How many floating-point operations the model itself needs for a step, on one device: what utilisation is measured by.

Linear in three counts, so that a step costs three products. The coefficients are asked of vLLM's own estimate, once, when the
engine starts: it knows experts, shared attention and parallelism. Leaves out adapters and pooling (below 2 % of a 7B model's),
and what a window keeps a layer from attending to: with sliding windows attention is left out whole. What a device can do at
most is in `telemetry/device_peaks.py`.
"""

from dataclasses import dataclass
from typing import Any

from orthrus_serve.engine.vllm_compat import FLOPS_HOOKS, verify_hooks

# A context longer than any sliding window, to find out whether there is one.
_LONG = 2**20


@dataclass(frozen=True)
class FlopCounts:
    """Operations for each token, for each position that a token attends to, and for each row that is sampled."""

    per_token: float = 0.0
    per_attended: float = 0.0
    per_row: float = 0.0

    def of_step(self, num_tokens: int, num_attended: int, num_rows: int) -> float:
        """Operations of a step. `num_attended` adds up, over its tokens, the positions that each attends to, itself among
        them."""
        return self.per_token * num_tokens + self.per_attended * num_attended + self.per_row * num_rows


NO_FLOPS = FlopCounts()


def flops_of(vllm_config: Any) -> FlopCounts:
    """The counts of a configured engine; zero for a model that vLLM has no estimate of."""
    verify_hooks(FLOPS_HOOKS)
    from vllm.v1.metrics.perf import ExecutionContext, ModelMetrics  # noqa: PLC0415  after the check that it is there

    metrics = ModelMetrics(vllm_config)

    def ask(num_tokens: int, context: int) -> float:
        rows = ExecutionContext()
        rows.add(num_tokens, context, is_prefill=True)
        return float(metrics.get_num_flops(rows, per_gpu=True))

    if not metrics.is_enabled():
        return NO_FLOPS
    one = ask(1, 0)
    per_token = ask(2, 0) - one
    per_attended = ask(1, 1) - one
    if abs(ask(1, _LONG) - one - per_attended * _LONG) > 0.01 * per_attended * _LONG:
        per_attended = 0.0
    return FlopCounts(per_token, per_attended, max(0.0, one - per_token))
