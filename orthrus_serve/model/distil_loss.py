"""The loss of the demo embedder and the choice of its batches. Pure: tensors and arrays in, tensors and arrays out.

A batch is n (query, passage) pairs. The student learns to find its passage (symmetric InfoNCE) and to rank all others as
the teacher does (KL of softmax similarities). A passage that the teacher holds closer to a query than that query's own
passage is likely an answer too, and is left out of the InfoNCE negatives.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

_MASKED = -1e4


@dataclass(frozen=True)
class LossParts:
    """Scalars: the sum that is minimised, its two parts, and the share of queries whose own passage comes first."""

    total: Tensor
    contrast: Tensor
    distil: Tensor
    accuracy: Tensor


def contrast_loss(similarity: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """InfoNCE along rows of `similarity` [n, n] (the diagonal is right), without the teacher's false negatives."""
    own = teacher.diagonal()[:, None]
    is_false = (teacher > own) & ~torch.eye(len(teacher), dtype=torch.bool, device=teacher.device)
    logits = (similarity / temperature).masked_fill(is_false, _MASKED)
    return cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def distil_loss(similarity: Tensor, teacher: Tensor, temperature: float, *, has_self: bool) -> Tensor:
    """KL from the teacher's distribution over columns to the student's; `has_self` leaves the diagonal out."""
    if has_self:
        diagonal = torch.eye(len(similarity), dtype=torch.bool, device=similarity.device)
        similarity, teacher = similarity.masked_fill(diagonal, _MASKED), teacher.masked_fill(diagonal, _MASKED)
    student = log_softmax(similarity / temperature, dim=-1)
    return kl_div(student, log_softmax(teacher / temperature, dim=-1), log_target=True, reduction="batchmean")


def batch_loss(
    queries: Tensor,
    passages: Tensor,
    teacher_queries: Tensor,
    teacher_passages: Tensor,
    *,
    temperature: float = 0.05,
    contrast_weight: float = 1.0,
) -> LossParts:
    """All vectors are unit rows [n, width]; row i of each belongs to pair i."""
    similarity, teacher = queries @ passages.T, teacher_queries @ teacher_passages.T
    contrast = (
        contrast_loss(similarity, teacher, temperature) + contrast_loss(similarity.T, teacher.T, temperature)
    ) / 2
    distil = (
        distil_loss(similarity, teacher, temperature, has_self=False)
        + distil_loss(similarity.T, teacher.T, temperature, has_self=False)
        + distil_loss(queries @ queries.T, teacher_queries @ teacher_queries.T, temperature, has_self=True)
        + distil_loss(passages @ passages.T, teacher_passages @ teacher_passages.T, temperature, has_self=True)
    ) / 4
    right = similarity.argmax(dim=1) == torch.arange(len(similarity), device=similarity.device)
    return LossParts(contrast_weight * contrast + distil, contrast.detach(), distil.detach(), right.float().mean())


def choose_passages(
    pools: list[NDArray[np.int64]],
    pool_shares: list[float],
    neighbours: NDArray[np.int64],
    size: int,
    cluster_share: float,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """At most `size` distinct passages: a part drawn one by one, a part as seeds with all their neighbours.

    `pools` are passage indices by source, drawn by `pool_shares`; `neighbours` [passages, k] are each passage's nearest
    others, which make the batch hard.
    """
    num_seeds = int(size * cluster_share) // (neighbours.shape[1] + 1)
    num_single = size - num_seeds * (neighbours.shape[1] + 1)
    drawn: list[NDArray[np.int64]] = []
    for count in (num_seeds, num_single):
        split = rng.multinomial(count, pool_shares)
        drawn.append(np.concatenate([rng.choice(pool, n) for pool, n in zip(pools, split, strict=True)]))
    seeds, single = drawn
    return np.unique(np.concatenate([seeds, neighbours[seeds].ravel(), single]))
