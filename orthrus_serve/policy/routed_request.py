"""What the request router knows of a request when it chooses a replica. Plain data.

Leaves out the body and everything HTTP. The Front passes all of it but the id as arguments of the handle call; Serve gives the
id.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orthrus_serve.types import Half, RequestKind


@dataclass(frozen=True)
class RoutedRequest:
    """One choice of a replica.

    Attributes:
        request_id: under which Serve reports the end of the request. All tries of one HTTP request share it.
        kind: None for a request without a forward pass (a list of models, say): any replica can answer it.
        charge: remaining tokens that the chosen replica is charged.
        expected_output: tokens expected of each of its outputs, part of `charge`; 0 for an embedding.
        avoid: ids of replicas that just failed this very request; chosen only if there is no other.
        only: the one replica that may be chosen (a probe), or None.
        call_id: by which the Front asks afterwards who was chosen; of this try alone. None: nobody will ask.
        stage: the part of a generation that two replicas share; None: all of it.
    """

    request_id: str
    kind: RequestKind | None = None
    charge: int = 1
    expected_output: int = 0
    avoid: tuple[str, ...] = ()
    only: str | None = None
    call_id: str | None = None
    stage: Half | None = None


def routed_request(request_id: str, arguments: Mapping[str, Any]) -> RoutedRequest:
    """Reads it off the arguments of a handle call; what is not there has its default."""
    names = ("kind", "charge", "expected_output", "avoid", "only", "call_id", "stage")
    return RoutedRequest(request_id, **{name: arguments[name] for name in names if name in arguments})
