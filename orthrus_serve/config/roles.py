"""The two roles that a topology may give its replicas: their ratio, and what moves KV between them. Pure."""

from typing import Any

from pydantic import Field

from orthrus_serve.config.section import Section
from orthrus_serve.types import RouterRule, TopologyName

# Topologies that give each replica one of two roles, and so need two replicas: what the two do.
ROLES: dict[TopologyName, str] = {
    "dedicated": "one that embeds and one that generates",
    "disagg_pd": "one that prefills and embeds, and one that decodes",
}


class SplitSpec(Section):
    """Embedding to generating replicas of topology `dedicated`, as a ratio: with another number of replicas it is kept as
    nearly as whole replicas can, and never to none."""

    embed: int = Field(ge=1)
    generate: int = Field(ge=1)


class PrefillSplitSpec(Section):
    """Prefilling (and embedding) to decoding replicas of topology `disagg_pd`, as a ratio like that of `dedicated`."""

    prefill: int = Field(ge=1)
    decode: int = Field(ge=1)


class RoutingSpec(Section):
    """What may change live of how one pool is routed. None leaves a setting as `args` have it; `rule` None is the topology's
    own when the topology is another than that of `args`."""

    topology: TopologyName | None = None
    rule: RouterRule | None = None
    dedicated: SplitSpec | None = None
    disagg_pd: PrefillSplitSpec | None = None

    @property
    def ratio(self) -> tuple[int, int] | None:
        """How many replicas have the first role of `topology` for how many that have the second; None where it has no roles,
        or leaves the ratio open."""
        if self.topology == "dedicated" and self.dedicated is not None:
            return self.dedicated.embed, self.dedicated.generate
        if self.topology == "disagg_pd" and self.disagg_pd is not None:
            return self.disagg_pd.prefill, self.disagg_pd.decode
        return None


def connector_problem(topology: TopologyName | None, kv_connector: str | None, vllm: dict[str, Any]) -> str | None:
    """What is wrong with the KV connector of engines that serve that topology, as `KEY: sentence`; None when nothing is."""
    if kv_connector is None:
        if topology != "disagg_pd":
            return None
        return "kv_connector: topology disagg_pd moves KV between engines; name what moves it: nixl"
    for key in ("tensor_parallel_size", "pipeline_parallel_size"):
        if vllm.get(key, 1) != 1:
            return f"kv_connector: is not supported with vllm.{key} above 1 yet"
    return None
