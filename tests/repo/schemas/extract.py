"""Makes the vendored schemas anew from what was published: the kinds that the manifests use, and all that these refer to.

Reads the packages named in `README.md`, unpacked or installed by whoever runs this; the test-suite does not run it. Drops
descriptions. Leaves out RayService, whose schema is written by hand (`README.md` says why).

    python tests/repo/schemas/extract.py kubernetes FOLDER/v1.33.0-local-strict/_definitions.json
    python tests/repo/schemas/extract.py podmonitor     # where cloudcoil-models-prometheus-operator is installed
"""

import gzip
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOTS = (
    "io.k8s.api.core.v1.Namespace",
    "io.k8s.api.core.v1.PersistentVolumeClaim",
    "io.k8s.api.core.v1.PodTemplateSpec",
    "io.k8s.api.core.v1.ResourceRequirements",
    "io.k8s.api.core.v1.Service",
    "io.k8s.api.batch.v1.Job",
    "io.k8s.api.networking.v1.NetworkPolicy",
    "io.k8s.api.policy.v1.PodDisruptionBudget",
)
WORDS_ONLY = ("description", "title", "x-kubernetes-group-version-kind", "x-kubernetes-patch-strategy", "default")


def without_words(node: Any, is_schema: bool = True) -> Any:
    """The same schema without what only describes it."""
    if isinstance(node, list):
        return [without_words(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    kept = {key: inner for key, inner in node.items() if not (is_schema and key in WORDS_ONLY)}
    # Below `properties` the keys are names of fields, which may well be `description`.
    return {key: without_words(inner, key not in ("properties", "$defs")) for key, inner in kept.items()}


def closed_over(definitions: dict[str, Any], roots: tuple[str, ...]) -> dict[str, Any]:
    """`roots` and every definition that they refer to."""
    found: dict[str, Any] = {}
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = definitions[name]
            waiting += re.findall(r'#/\$defs/([^"]+)"', json.dumps(definitions[name]))
    return dict(sorted(found.items()))


def strict(node: Any) -> Any:
    """The same schema, in which an object with named fields has no others: a server would drop a misspelt one in silence."""
    if isinstance(node, list):
        return [strict(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    closed = {key: strict(inner) for key, inner in node.items()}
    if closed.get("type") == "object" and "properties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def write(name: str, schema: Any) -> None:
    """Puts a schema beside this file, always as the same bytes."""
    text = json.dumps(schema, sort_keys=True, separators=(",", ":"))
    (HERE / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def main(what: str, *paths: str) -> None:
    """`kubernetes DEFINITIONS` or `podmonitor`."""
    if what == "kubernetes":
        definitions = without_words(json.loads(Path(paths[0]).read_text(encoding="utf-8")))["$defs"]
        # References are within the one file that is left.
        text = json.dumps(closed_over(definitions, ROOTS)).replace("/api/_definitions.json#", "#")
        write("kubernetes", {"$defs": json.loads(text)})
    else:
        models = importlib.import_module("cloudcoil.models.prometheus_operator.v1")
        write("podmonitor", strict(without_words(models.PodMonitor.model_json_schema(by_alias=True))))


if __name__ == "__main__":
    main(*sys.argv[1:])
