"""What `/status` says: the topology, rule and roles in force, by every Front and every engine, and what each refused. Pure.

`orthrus-serve switch` waits by it. Guards: a replica that did not answer is there, and says so; nobody is taken for switched
who did not say it. Leaves out how they are asked (`status.py`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, get_args

from orthrus_serve.types import ReplicaId, RequestKind

KINDS: tuple[RequestKind, ...] = get_args(RequestKind)
Serving = Callable[[RequestKind, Sequence[ReplicaId]], Sequence[ReplicaId]]


def live_status(
    own: Mapping[str, Any], front_answers: Collection[Any], engine_answers: Collection[Any], serving: Serving
) -> dict[str, Any]:
    """The page as one JSON-able mapping.

    Args:
        own: `Front.info()` of the Front that answers; its `replicas` are the engine replicas that Serve calls running, and its
            `quarantined` those that it sends nothing.
        front_answers: `Front.info()` of all, or the exception of one that did not answer.
        engine_answers: `EngineReplica.info()` of all, or exceptions.
        serving: which replicas serve a kind, as the Front that answers routes.
    """
    fronts = [answer for answer in front_answers if isinstance(answer, Mapping)]
    engines = {str(answer["replica"]): answer for answer in engine_answers if isinstance(answer, Mapping)}
    running = [ReplicaId(replica) for replica in own["replicas"]]
    well = [replica for replica in running if replica not in own["quarantined"]] or running
    kinds = {replica: [kind for kind in KINDS if replica in serving(kind, well)] for replica in running}
    return {
        **{key: own[key] for key in ("topology", "rule", "dedicated", "disagg_pd")},
        "fronts": [{key: value for key, value in front.items() if key != "replicas"} for front in fronts],
        "num_fronts_silent": len(front_answers) - len(fronts),
        "engines": [
            {
                "replica": replica,
                "listed": replica in running,
                "quarantined": own["quarantined"].get(replica),
                "kinds": kinds.get(ReplicaId(replica), []),
                **_engine(engines.get(replica)),
            }
            for replica in sorted({*running, *engines})
        ],
    }


def arms_status(
    own: Mapping[str, Any],
    front_answers: Collection[Any],
    engine_answers: Mapping[str, Collection[Any]],
    serving: Mapping[str, Serving],
) -> dict[str, Any]:
    """The page of an application with arms: under `arms`, for each of them what `live_status` says of an application without.

    Args: as those of `live_status`; the last two by arm.
    """
    fronts = [answer for answer in front_answers if isinstance(answer, Mapping)]
    return {
        **{key: own[key] for key in ("weights", "mirror")},
        "fronts": [{key: value for key, value in front.items() if key != "arms"} for front in fronts],
        "num_fronts_silent": len(front_answers) - len(fronts),
        "arms": {
            arm: live_status(
                own["arms"][arm],
                [answer["arms"][arm] if isinstance(answer, Mapping) else answer for answer in front_answers],
                engine_answers[arm],
                serving[arm],
            )
            for arm in own["arms"]
        },
    }


def _engine(answer: Mapping[str, Any] | None) -> dict[str, Any]:
    if answer is None:
        return {"answered": False}
    settings, report = answer["settings"], answer["report"]
    return {
        "answered": True,
        "topology": answer["topology"],
        "policy": report.get("policy"),
        "settings": settings["applied"],
        "refused": settings["refused"],
        "open": answer["open"],
        "in_engine": answer["in_engine"],
        "kept": answer["kept"],
        "remaining_tokens": answer["remaining_tokens"],
        "totals": report.get("totals", {}),
    }
