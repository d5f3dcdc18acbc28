"""The page `/ab`: what each arm did in the last hour, by slices of time, over all Fronts. `orthrus-serve ab report` reads it.

Leaves out what the numbers say (`policy/ab_report.py`).
"""

import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from orthrus_serve.errors import RequestError
from orthrus_serve.policy.slices import coarsened, merge_told, to_page
from orthrus_serve.serving.error_shape import JSON_HEADERS
from orthrus_serve.serving.live_arms import LiveArms
from orthrus_serve.serving.status import ASK_TIMEOUT_S, Page

NO_ARMS = RequestError(404, "This application has no arms to compare (args.arms).", code="no_arms")


class AbPage:
    """Answers for all Fronts; each of them answers `told` for itself."""

    def __init__(self, arms: LiveArms, fronts: Callable[[str, float], Awaitable[list[Any]]]) -> None:
        """`fronts` asks all Fronts to `tell_slices`."""
        self._arms = arms
        self._fronts = fronts

    def told(self) -> dict[str, Any]:
        """The slices of this Front; see `slices.merge_told`."""
        return self._arms.slices.told(time.monotonic())

    async def page(self) -> Page:
        """The page.

        Raises:
            RequestError: 404 without arms.
        """
        if not self._arms.are_named:
            raise NO_ARMS
        answers = await self._fronts("tell_slices", ASK_TIMEOUT_S)
        told = [answer for answer in answers if isinstance(answer, Mapping)]
        live = self._arms.describe()
        body = {
            "arms": {
                arm.name: {
                    **{key: value for key, value in arm.routing.describe().items() if key in ("topology", "rule")},
                    "weight": live["weights"][arm.name],
                    "num_replicas": len(arm.state.replicas),
                    "num_gpus": len(arm.state.replicas) * arm.num_gpus_per_replica,
                }
                for arm in self._arms
            },
            "mirror": live["mirror"],
            "num_fronts": len(told),
            "num_fronts_silent": len(answers) - len(told),
            **to_page(coarsened(merge_told(told))),
        }
        return 200, list(JSON_HEADERS), json.dumps(body).encode()
