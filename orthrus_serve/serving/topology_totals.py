"""Counts of an engine, told apart by the topology under which they were made. Pure.

The engine counts from its start on and knows no topology; after a live switch, what it counted before belongs to the one
before. Guards: the sum over topologies is always the engine's own count. Leaves out names and labels (`metrics_export.py`).
"""

from collections.abc import Mapping

from orthrus_serve.types import TopologyName


class TopologyTotals:
    """Cumulative counts by topology, from an engine's cumulative counts."""

    def __init__(self, topology: TopologyName) -> None:
        self.topology: TopologyName = topology
        self._last: dict[str, float] = {}
        self._by_topology: dict[TopologyName, dict[str, float]] = {}

    def see(self, totals: Mapping[str, float]) -> None:
        """Take in a report; what was counted since the last one belongs to the topology now in force."""
        counts = self._by_topology.setdefault(self.topology, {})
        for name, total in totals.items():
            counts[name] = counts.get(name, 0) + total - self._last.get(name, 0)
        self._last = dict(totals)

    def by_topology(self) -> Mapping[TopologyName, Mapping[str, float]]:
        """Every topology that was in force so far, and what was counted under it."""
        return self._by_topology
