"""LoRA on CPU: one matrix product per adapter instead of gathered weights per token, and base rows left alone.

Stock vLLM 0.32 (lora/ops/torch_ops/lora_ops.py) uses index -1, which means "no adapter", as a Python index: it picks the last
slot, so a base row that shares a step with an adapter's row gets that adapter. It also gathers `[tokens, out, rank]` weights.
"""

import torch
from typing_extensions import override
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

Group = tuple[int, torch.Tensor | None]


def groups_of(indices: torch.Tensor) -> list[Group]:
    """Adapter slots in use, each with its rows; None for "all rows". Rows with index -1 are in no group."""
    slots = [int(slot) for slot in torch.unique(indices) if slot >= 0]
    if len(slots) == 1 and bool((indices == slots[0]).all()):
        return [(slots[0], None)]
    return [(slot, (indices == slot).nonzero().flatten()) for slot in slots]


class GroupedPunicaWrapperCPU(PunicaWrapperCPU):
    """vLLM's CPU wrapper with grouped products. Shapes: x `[n, in]`, A `[slots, 1, rank, in]`, B `[slots, 1, out, rank]`."""

    _token_groups: list[Group] | None = None
    _sampler_groups: list[Group] | None = None

    @override
    def update_metadata(self, *args, **kwargs) -> None:
        super().update_metadata(*args, **kwargs)
        self._token_groups = self._sampler_groups = None

    @override
    def _apply_shrink(self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
        _shrink(y.view(-1, y.shape[-1]), x, w_t_all, scale, self._groups())

    @override
    def _apply_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        _expand(y, x, w_t_all, slice(y_offset, y_offset + y_slice_size), self._groups())

    @override
    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **kwargs
    ) -> None:
        _expand(y, x, lora_b_stacked, slice(0, y.shape[1]), self._groups())

    @override
    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs,
    ) -> None:
        if self._sampler_groups is None:
            self._sampler_groups = groups_of(self.sampler_indices)
        rows, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        low = torch.zeros(x.shape[0], lora_b_stacked.shape[-1], dtype=torch.float32)
        _shrink(low, x, lora_a_stacked, scale, self._sampler_groups)
        _expand(rows, low, lora_b_stacked, slice(0, rows.shape[1]), self._sampler_groups)

    def _groups(self) -> list[Group]:
        if self._token_groups is None:
            self._token_groups = groups_of(self.token_lora_indices)
        return self._token_groups


def _weights(stacked: torch.Tensor, slot: int) -> torch.Tensor:
    return stacked[slot].flatten(0, -2) if stacked.dim() == 4 else stacked[slot]


def _shrink(y: torch.Tensor, x: torch.Tensor, stacked: torch.Tensor, scale: float, groups: list[Group]) -> None:
    y.zero_()
    for slot, rows in groups:
        a = _weights(stacked, slot).to(y.dtype)
        if rows is None:
            y[:, : a.shape[0]] = (x.to(y.dtype) @ a.T) * scale
        else:
            y[rows, : a.shape[0]] = (x[rows].to(y.dtype) @ a.T) * scale


def _expand(y: torch.Tensor, x: torch.Tensor, stacked: torch.Tensor, columns: slice, groups: list[Group]) -> None:
    target = y[:, columns]
    for slot, rows in groups:
        b = _weights(stacked, slot).to(y.dtype)
        if rows is None:
            target += (x.to(y.dtype) @ b.T)[:, : target.shape[1]]
        else:
            target.index_add_(0, rows, (x[rows].to(y.dtype) @ b.T)[:, : target.shape[1]])
