"""LoRA's second product, one call of vLLM's kernel for each part of a packed layer, and kernel settings found by measuring.

One layer holds q, k and v, one holds gate and up. Stock vLLM 0.32 adds the adapter to all parts in one launch
(`lora/ops/triton_ops/lora_expand_op.py`); there the kernel reads where a part begins from memory, so the compiler cannot know
that it is aligned, and every access to the layer's output is two bytes wide. Launched part by part, the start is a number that
the launcher sees, and accesses are sixteen bytes wide. The kernel, its arithmetic and its result are the same.
"""

import os
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.lora.ops.triton_ops.lora_expand_op import _lora_expand
from vllm.utils.torch_utils import direct_register_custom_op

# Settings of the LoRA kernels by card, in vLLM's format; `python -m tests.gpu.lora_tuning` makes them.
TUNED_CONFIGS = Path(__file__).parent / "lora_configs"


def expand_parts(
    inputs: torch.Tensor,
    lora_b_weights: list[torch.Tensor],
    output_tensor: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    token_indices_sorted_by_lora_ids: torch.Tensor,
    num_tokens_per_lora: torch.Tensor,
    lora_token_start_loc: torch.Tensor,
    lora_ids: torch.Tensor,
    no_lora_flag_cpu: torch.Tensor,
    num_active_loras: torch.Tensor,
    offset_start: int = 0,
    add_inputs: bool = False,
) -> None:
    """Adds `inputs[i] @ lora_b_weights[i].T` to the i-th part of `output_tensor`, for rows that have an adapter.

    Args:
        inputs: `[parts, tokens, rank]`.
        lora_b_weights: for each part `[slots, 1, part size, rank]`.
        output_tensor: `[tokens, at least all parts]`, changed in place from column `offset_start` on.
        token_lora_mapping: this and the next six are vLLM's `LoRAKernelMeta.meta_args`.
        add_inputs: False overwrites instead of adding.
    """
    for index, weights in enumerate(lora_b_weights):
        _lora_expand(
            inputs[index : index + 1],
            [weights],
            output_tensor,
            token_lora_mapping,
            token_indices_sorted_by_lora_ids,
            num_tokens_per_lora,
            lora_token_start_loc,
            lora_ids,
            no_lora_flag_cpu,
            num_active_loras,
            offset_start,
            add_inputs,
        )
        offset_start += weights.shape[-2]


# One operation to the compiler, as stock's: it cannot put copies of the output between the parts.
direct_register_custom_op("orthrus_lora_expand", expand_parts, mutates_args=["output_tensor"])


def tuned_configs(device_name: str) -> str | None:
    """The folder with settings for that card, None when there are none (vLLM then takes its defaults)."""
    prefix = device_name.replace(" ", "_").replace("-", "_")
    return str(TUNED_CONFIGS) if any(TUNED_CONFIGS.glob(f"{prefix}_*.json")) else None


def use_tuned_configs(device_name: str) -> None:
    """Lets vLLM find our settings for that card, unless the operator names a folder."""
    folder = tuned_configs(device_name)
    if folder is not None and envs.VLLM_TUNED_CONFIG_FOLDER is None:
        os.environ["VLLM_TUNED_CONFIG_FOLDER"] = folder  # noqa: TID251  vLLM reads it nowhere else, and also without Ray


class PartwiseExpandMixin:
    """Mixed into vLLM's CUDA LoRA wrapper."""

    token_mapping_meta: Any
    lora_config: Any

    def add_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **_unused: Any,
    ) -> None:
        """As stock's, `y[:, part] += x[part] @ B[part].T`."""
        assert x.shape[0] == len(output_slices)
        meta = self.token_mapping_meta.meta_args(x.shape[1], self.lora_config.specialize_active_lora)
        torch.ops.vllm.orthrus_lora_expand(
            x, list(lora_b_stacked), y.view(-1, y.shape[-1]), *meta, offset_start, add_inputs
        )
