"""LoRA on CUDA: the kernels' row tables are made on the host, so that a step does not wait for the one before.

Stock vLLM 0.32 sorts and counts the rows of each adapter on the GPU and reads a flag and counts back
(`lora/punica_wrapper/punica_gpu.py`, "TODO avoid gpu<->cpu sync here"). Each step whose rows differ from the last one's, and so
every mixed step, then waits for the forward before it, and the GPU idles while the host launches the next. The mapping comes
from the host in the first place; here it is sorted there and sent by copies that nobody waits for. The kernels are stock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from typing_extensions import override
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

from orthrus_serve.engine.lora_expand import PartwiseExpandMixin
from orthrus_serve.engine.transfer import to_device


@dataclass(frozen=True)
class RowTables:
    """What the LoRA kernels look up, int32. `order` lists the rows adapter by adapter; -1, "no adapter", comes first.

    Attributes:
        slots: adapter slot of each row `[n]`, -1 for none.
        order: rows sorted by slot, stable `[n]`.
        active: slots in use, then -1 `[slots + 1]`.
        counts: rows of each active slot, then 0 `[slots + 1]`.
        starts: where each active slot begins in `order`, then 0 `[slots + 2]`.
        num_active: distinct values in `slots`, -1 counted as one; 0 when no row has an adapter.
    """

    slots: np.ndarray
    order: np.ndarray
    active: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    num_active: int


def slots_of(lora_ids: Sequence[int], slot_of: Mapping[int, int]) -> np.ndarray:
    """The slot of each row by its adapter id; -1 for id 0, which means no adapter.

    Raises:
        KeyError: an adapter id that has no slot.
    """
    ids = np.asarray(lora_ids, dtype=np.int64)
    slots = np.full(ids.shape, -1, dtype=np.int32)
    for lora_id in np.unique(ids):
        if lora_id > 0:
            slots[ids == lora_id] = slot_of[int(lora_id)]
    return slots


def row_tables(slots: np.ndarray, max_loras: int) -> RowTables:
    """Sorts and counts the rows of each slot. The same tables as `LoRAKernelMeta.prepare_tensors`."""
    active = np.full(max_loras + 1, -1, dtype=np.int32)
    counts = np.zeros(max_loras + 1, dtype=np.int32)
    starts = np.zeros(max_loras + 2, dtype=np.int32)
    if not (slots >= 0).any():
        return RowTables(slots, np.empty(0, dtype=np.int32), active, counts, starts, 0)
    order = np.argsort(slots, kind="stable").astype(np.int32)
    found, per_slot = np.unique(slots, return_counts=True)
    active[: len(found)], counts[: len(found)] = found, per_slot
    starts[1 : 1 + len(found)] = np.cumsum(per_slot)
    return RowTables(slots, order, active, counts, starts, len(found))


class HostSortedPunicaWrapperGPU(PartwiseExpandMixin, PunicaWrapperGPU):  # pyright: ignore[reportGeneralTypeIssues]  final
    """vLLM's CUDA wrapper whose metadata never waits for the GPU, and whose second product goes part by part."""

    @override
    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        self.is_prefill = mapping.is_prefill
        slot_of = {lora_id: slot for slot, lora_id in enumerate(lora_index_to_id) if lora_id is not None}
        tokens, prompts = slots_of(mapping.index_mapping, slot_of), slots_of(mapping.prompt_mapping, slot_of)
        padded = np.arange(len(prompts)) + np.where(prompts == -1, max_loras - 1, prompts) * len(prompts)
        embeddings = np.maximum(tokens, 0).astype(np.int64) * vocab_size
        self._send(
            [
                (self._token_lora_indices, tokens),
                (self._sampler_indices, prompts),
                (self._sampler_indices_padded, padded),
                (self._embeddings_indices, embeddings),
            ]
        )
        self.indices_len[:] = [len(tokens), len(prompts), len(prompts), len(tokens)]
        self._prepare(self.token_mapping_meta, tokens)
        self._prepare(self.prompt_mapping_meta, prompts)

    def _prepare(self, meta: Any, slots: np.ndarray) -> None:
        """Fills the kernels' tables. The two flags stay on the host, where the kernels' launchers read them."""
        tables = row_tables(slots, self.max_loras)
        meta.no_lora_flag_cpu[0] = tables.num_active == 0
        captured = [count for count in meta.captured_lora_counts if count >= tables.num_active]
        meta.num_active_loras_cpu[0] = min(captured) if captured and tables.num_active else tables.num_active
        rows = [
            (meta.active_lora_ids, tables.active),
            (meta.num_tokens_per_lora, tables.counts),
            (meta.lora_token_start_loc, tables.starts),
        ]
        if tables.num_active:
            rows += [
                (meta.token_lora_mapping, tables.slots),
                (meta.token_indices_sorted_by_lora_ids, tables.order),
            ]
        self._send(rows)

    @staticmethod
    def _send(rows: list[tuple[torch.Tensor, np.ndarray]]) -> None:
        """Copies each array to the beginning of its tensor: one block to the device, then parts of it within."""
        target = rows[0][0]
        parts = to_device([values for _, values in rows], target.device, target.dtype)
        for (tensor, values), part in zip(rows, parts, strict=True):
            tensor[: len(values)].copy_(part)
