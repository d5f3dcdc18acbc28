"""A real vector index over real vectors: faiss, exact (flat) or approximate (HNSW), inner product of unit vectors.

The only module that knows faiss. One thread per search: retrieval must not take the cores from the client's event loop.
"""

from typing import Any, Literal, Protocol, cast

import faiss
import numpy as np
from numpy.typing import NDArray

IndexKind = Literal["flat", "hnsw"]
HNSW_NEIGHBOURS = 32


class _Index(Protocol):
    d: int

    def add(self, vectors: NDArray[np.float32]) -> None: ...

    def search(self, vectors: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]: ...


class VectorIndex:
    """An index over `vectors` (passages × dimensions, any length: they are normalised here)."""

    def __init__(self, vectors: NDArray[np.float32], kind: IndexKind) -> None:
        library = cast(Any, faiss)
        library.omp_set_num_threads(1)
        dimensions = int(vectors.shape[1])
        made = (
            library.IndexFlatIP(dimensions)
            if kind == "flat"
            else library.IndexHNSWFlat(dimensions, HNSW_NEIGHBOURS, library.METRIC_INNER_PRODUCT)
        )
        self._index = cast(_Index, made)
        self._index.add(unit(vectors))

    def nearest(self, vector: NDArray[np.float32], k: int) -> list[int]:
        """The places of the `k` nearest passages, nearest first."""
        _, places = self._index.search(unit(vector[np.newaxis]), k)
        return [place for place in places[0].tolist() if place >= 0]


def unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each row divided by its length; rows of zeros stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / np.maximum(lengths, 1e-12), dtype=np.float32)
