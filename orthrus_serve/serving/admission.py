"""The door of a Front: reads goals, priority and key off a request's headers, lets it in or refuses it, and learns how it went.

Adapter to `policy/admission.py` and `policy/key_limits.py`. Guards: what was taken from a key is settled once, however the
request ends; headers that are read here go no further (the Front forwards a fixed few). Without the section `admission` there
is no door. Leaves out the decisions, and which replica it becomes.
"""

import hashlib
import math
import time
from collections.abc import Iterable, Sequence

from orthrus_serve.config.clients import AdmissionSpec, GoalSpec, KeyLimitSpec
from orthrus_serve.errors import RequestError
from orthrus_serve.policy.admission import Admission, Asked, Goals, Measure, Predicted, Refused
from orthrus_serve.policy.charge import ChargeEstimator, RequestShape
from orthrus_serve.policy.key_limits import KeyAccounts, KeyLimits, OverLimit, Taken
from orthrus_serve.policy.service_rate import PoolRates
from orthrus_serve.serving.asgi_io import header
from orthrus_serve.serving.charging import ReplyMeter
from orthrus_serve.serving.engine_reports import ReplicaReport
from orthrus_serve.serving.key_guard import given_key
from orthrus_serve.serving.metrics_export import FrontMetrics
from orthrus_serve.serving.router_state import RouterState
from orthrus_serve.serving.tunnel import Header, Message, TunnelRequest
from orthrus_serve.types import Priority, ReplicaId, RequestKind

MAX_GOAL_MS = 86_400_000.0
# As much of a body as is read to know it again.
FINGERPRINT_BYTES = 65_536
_PRIORITIES: dict[bytes, Priority] = {b"high": "high", b"normal": "normal", b"low": "low"}


class TurnedAwayError(RequestError):
    """A request that was not let in. `headers` say when to come back, and what is left of the key's limits."""

    def __init__(self, status: int, message: str, code: str, headers: Sequence[Header]) -> None:
        super().__init__(status, message, code=code)
        self.headers = headers


class Visit:
    """One request that was let in, until it ends. Sees every message of its answer."""

    def __init__(self, door: "Door", asked: Asked, predicted: Predicted, taken: Taken) -> None:
        self._door = door
        self._asked, self._predicted, self._taken = asked, predicted, taken
        self._began_s = time.monotonic()
        self._meter = ReplyMeter()
        self._status: int | None = None
        self._first_s: float | None = None
        self._num_bodies = 0
        self._is_ended = False

    def saw(self, message: Message) -> Message:
        """Takes in a message on its way to the client; returns it with the headers that tell of limits."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return {**message, "headers": [*message["headers"], *self._door.limit_headers(self._taken.key)]}
        if message["body"]:
            self._meter.see(message["body"])
            self._num_bodies += 1
            if self._first_s is None:
                self._first_s = time.monotonic()
        self._is_ended = not message.get("more_body", False)
        return message

    def leave(self) -> None:
        """The request is over, however it went."""
        now_s = time.monotonic()
        is_whole = self._status == 200 and self._is_ended and not self._meter.has_error
        usage = self._meter.usage()
        used = sum(usage.values()) if is_whole and "prompt_tokens" in usage else None
        self._door.settle(self._taken, used)
        if self._status is not None and self._status != 200:
            return  # it says nothing about how long requests take
        took: dict[Measure, float | None] = {"ttft": None, "e2e": now_s - self._began_s}
        if (
            self._num_bodies > 1 and self._first_s is not None
        ):  # of an answer that comes at once, nobody sees a first token
            took["ttft"] = self._first_s - self._began_s
        for measure, took_s in took.items():
            if took_s is not None:
                self._door.learn(self._asked, self._predicted, measure, took_s, is_whole or measure == "ttft")


def key_accounts(spec: AdmissionSpec, num_fronts: int) -> KeyAccounts:
    """What each key has used at one Front of so many: one for all its doors, since a key's limits are not of an arm."""
    return KeyAccounts(_limits(spec.each_key), {key: _limits(limits) for key, limits in spec.keys.items()}, num_fronts)


class Door:
    """Admission of one Front to one pool. Its event loop owns it; loads are read from the router's thread, number by number."""

    def __init__(
        self,
        spec: AdmissionSpec,
        accounts: KeyAccounts,
        load: RouterState,
        estimator: ChargeEstimator,
        metrics: FrontMetrics,
    ) -> None:
        self._goals: dict[RequestKind, GoalSpec] = {"generate": spec.generate, "embed": spec.embed}
        self._accounts = accounts
        room = spec.headroom
        self._admission = Admission({"high": room.high, "normal": room.normal, "low": room.low})
        self._rates = PoolRates()
        self._load = load
        self._estimator = estimator
        self._metrics = metrics

    def enter(self, request: TunnelRequest, shape: RequestShape, headers: Sequence[Header]) -> Visit:
        """Lets a request in, until `Visit.leave`. Whoever is let in must be routed before anything is awaited, so that the
        next one sees its load.

        Raises:
            TurnedAwayError: 429 over the key's own limit, 503 when its goal would not be met.
            RequestError: 400, a header that cannot be read.
        """
        now_s = time.monotonic()
        key = _key_of(headers)
        asked = self._asked(shape, request, headers, key)
        taken = self._accounts.take(key, asked.num_tokens, now_s)
        if isinstance(taken, OverLimit):
            raise self._over(shape.kind, key, taken)
        decided = self._decide(asked, now_s)
        if isinstance(decided, Refused):
            self._accounts.give_back(taken)
            raise self._refused(shape.kind, key, decided)
        return Visit(self, asked, decided, taken)

    def take_report(self, report: ReplicaReport) -> None:
        """An engine's own counts."""
        self._rates.see(ReplicaId(report.replica), report.done)
        self._rates.keep_only({*self._load.replicas, ReplicaId(report.replica)})

    def settle(self, taken: Taken, num_used: int | None) -> None:
        """The request of `taken` is over."""
        self._accounts.settle(taken, num_used)

    def learn(self, asked: Asked, predicted: Predicted, measure: Measure, took_s: float, has_come: bool) -> None:
        """How long a request took. One that was given up counts once it took longer than was predicted: to leave out those
        who lost patience would be to learn from the quick ones only."""
        predicted_s, goal_s = predicted.of(measure), asked.goals.of(measure)
        if predicted_s is not None and (has_come or took_s > predicted_s):
            self._admission.learn(asked.kind, measure, predicted_s, took_s, time.monotonic())
        if goal_s is not None and (has_come or took_s > goal_s):
            self._metrics.goal(asked.kind, measure, "met" if took_s <= goal_s else "missed")

    def limit_headers(self, key: str) -> list[Header]:
        """What is left of a key's limits, in OpenAI's headers."""
        found: list[Header] = []
        for name, state in self._accounts.state(key, time.monotonic()).items():
            values = {"limit": str(state.limit), "remaining": str(state.remaining), "reset": _duration(state.reset_s)}
            found += [(f"x-ratelimit-{what}-{name}".encode(), value.encode()) for what, value in values.items()]
        return found

    def _asked(self, shape: RequestShape, request: TunnelRequest, headers: Sequence[Header], key: str) -> Asked:
        spec = self._goals[shape.kind]
        goals = Goals(
            _goal_s(headers, "x-slo-ttft-ms", spec.ttft_ms if shape.kind == "generate" else None),
            _goal_s(headers, "x-slo-e2e-ms", spec.e2e_ms),
        )
        return Asked(
            kind=shape.kind,
            num_tokens=self._estimator.estimate(shape),
            num_output=self._estimator.expected_output(shape),
            num_outputs=shape.num_outputs,
            goals=goals,
            priority=_priority(headers),
            fingerprint=hash((key, request.path, len(request.body), request.body[:FINGERPRINT_BYTES])),
        )

    def _decide(self, asked: Asked, now_s: float) -> Predicted | Refused:
        backlog = self._load.backlog(asked.kind, asked.num_tokens, self._rates)
        if backlog is None:
            return Predicted()  # nothing is known of any replica: the router waits for one, or refuses
        return self._admission.decide(asked, backlog, now_s)

    def _over(self, kind: RequestKind, key: str, over: OverLimit) -> TurnedAwayError:
        self._metrics.refused(kind, over.limit)
        what = over.limit.replace("_", " ")
        if over.wait_s is None:
            message = f"This request alone is larger than the limit of its key: {what}."
        else:
            message = f"Rate limit reached: {what}. Please try again in {_duration(over.wait_s)}."
        return self._turned_away(429, message, "rate_limit_exceeded", over.wait_s, key)

    def _refused(self, kind: RequestKind, key: str, refused: Refused) -> TurnedAwayError:
        self._metrics.refused(kind, refused.reason)
        if refused.retry_after_s is None:
            message = "This request would not meet its goal even if it were the only one."
        else:
            message = f"The server is overloaded. Please try again in {_duration(refused.retry_after_s)}."
        code = "goal_unreachable" if refused.retry_after_s is None else "overloaded"
        return self._turned_away(503, message, code, refused.retry_after_s, key)

    def _turned_away(self, status: int, message: str, code: str, wait_s: float | None, key: str) -> TurnedAwayError:
        retry: list[Header] = [(b"x-should-retry", b"false")]
        if wait_s is not None:
            wait_ms = max(1, math.ceil(wait_s * 1000))
            retry = [
                (b"retry-after", str(math.ceil(wait_ms / 1000)).encode()),
                (b"retry-after-ms", str(wait_ms).encode()),
            ]
        return TurnedAwayError(status, message, code, [*retry, *self.limit_headers(key)])


def _limits(spec: KeyLimitSpec) -> KeyLimits:
    return KeyLimits(spec.requests_per_minute, spec.tokens_per_minute, spec.max_in_flight_tokens)


def _key_of(headers: Iterable[Header]) -> str:
    """The SHA-256 of the client's key; empty for all without one, who share it."""
    given = given_key(headers)
    return hashlib.sha256(given).hexdigest() if given else ""


def _goal_s(headers: Iterable[Header], name: str, configured_ms: float | None) -> float | None:
    given = header(headers, name.encode())
    if given is None:
        return None if configured_ms is None else configured_ms / 1000
    try:
        goal_ms = float(given)
    except ValueError:
        goal_ms = math.nan
    if not 0 < goal_ms <= MAX_GOAL_MS:
        raise RequestError(
            400, f"{name} must be a number of milliseconds above 0 and up to {MAX_GOAL_MS:g}.", param=name
        )
    return goal_ms / 1000


def _priority(headers: Iterable[Header]) -> Priority:
    given = header(headers, b"x-priority")
    if given is None:
        return "normal"
    priority = _PRIORITIES.get(given.strip().lower())
    if priority is None:
        raise RequestError(400, "x-priority must be high, normal or low.", param="x-priority")
    return priority


def _duration(seconds: float) -> str:
    """As OpenAI writes it: `20ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{math.ceil(rest)}s" if minutes else f"{rest:.3g}s"
