"""Merges Prometheus texts of several processes into one, with a label that says where each sample comes from. Pure.

Leaves out how the texts are fetched. A text that does not parse is left out whole and counted, so that one bad replica
cannot hide the others.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from typing_extensions import override


@dataclass(frozen=True)
class MergedMetrics:
    """The merged text, and the sources whose text did not parse."""

    text: bytes
    unreadable: tuple[str, ...]


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    @override
    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def merge_metrics(
    texts: Mapping[str, str], label: str = "replica", more: Mapping[str, Mapping[str, str]] | None = None
) -> MergedMetrics:
    """One Prometheus text from several.

    Args:
        texts: exposition text by source; the source's name becomes the label's value.
        label: a sample that has this label already keeps its own.
        more: other labels, by source.
    """
    more = more or {}
    families: dict[str, Metric] = {}
    unreadable: list[str] = []
    for source, text in texts.items():
        try:
            parsed = list(text_string_to_metric_families(text))
        except (ValueError, KeyError, IndexError):
            unreadable.append(source)
            continue
        for family in parsed:
            if family.name.endswith(
                "_created"
            ):  # when a counter began: a series for each series, and nobody's question
                continue
            _add(
                families.setdefault(family.name, Metric(family.name, family.documentation, family.type)),
                family,
                {label: source, **more.get(source, {})},
            )
    return MergedMetrics(generate_latest(_Families(families.values())), tuple(unreadable))


def _add(merged: Metric, family: Metric, labels: Mapping[str, str]) -> None:
    for sample in family.samples:
        merged.samples.append(sample._replace(labels={**labels, **sample.labels}))
