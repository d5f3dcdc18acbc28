"""What one client may use: requests and tokens a minute, and tokens in flight, for each key. Pure; the clock is an argument.

Token buckets that hold a minute's worth. A request takes its estimate when it is admitted; what it really used is settled when
it ends. Guards: one key never touches another's; what is in flight is released exactly once; memory is bounded. Leaves out who
a key is, and what is refused for want of capacity (`admission.py`).
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LimitName = Literal["requests_per_minute", "tokens_per_minute", "in_flight_tokens"]

MINUTE_S = 60.0
# A client without an entry starts with full buckets; so may one that was forgotten.
MAX_KEYS = 10_000


@dataclass(frozen=True)
class KeyLimits:
    """The limits of a key; None is none."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_in_flight_tokens: float | None = None

    def share(self, num_fronts: int) -> "KeyLimits":
        """What one of several Fronts may give, so that all together give no more."""

        def part(limit: float | None) -> float | None:
            return None if limit is None else limit / num_fronts

        return KeyLimits(part(self.requests_per_minute), part(self.tokens_per_minute), part(self.max_in_flight_tokens))


@dataclass
class Bucket:
    """Fills evenly to `per_minute` in a minute. May be in debt, which is then waited off."""

    per_minute: float
    level: float
    seen_s: float

    def fill(self, now_s: float) -> None:
        """Up to now."""
        self.level = min(self.most, self.level + max(0.0, now_s - self.seen_s) * self.per_minute / MINUTE_S)
        self.seen_s = max(self.seen_s, now_s)

    @property
    def most(self) -> float:
        """What it holds when full: at least one request, however small the share."""
        return max(1.0, self.per_minute)

    def wait_s(self, amount: float) -> float:
        """Until `amount` can be taken. More than it ever holds can be taken when it is full, and leaves a debt."""
        return max(0.0, min(amount, self.most) - self.level) * MINUTE_S / self.per_minute


@dataclass(frozen=True)
class LimitState:
    """For the `x-ratelimit-*` headers: the limit, what is left of it, and when it is full again."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True)
class OverLimit:
    """Which limit a request is over. `wait_s` None: it can never pass."""

    limit: LimitName
    wait_s: float | None


@dataclass
class _Account:
    limits: KeyLimits
    requests: Bucket | None
    tokens: Bucket | None
    num_in_flight: int = 0


@dataclass
class Taken:
    """What a request took; to be settled once."""

    key: str
    num_tokens: int
    is_settled: bool = False


class KeyAccounts:
    """All keys of one Front. One event loop owns it."""

    def __init__(self, limits: KeyLimits, by_key: Mapping[str, KeyLimits] | None = None, num_fronts: int = 1) -> None:
        """`by_key` has the keys that are not as the others; limits are those of all Fronts together."""
        self._limits = limits
        self._by_key = dict(by_key or {})
        self._num_fronts = num_fronts
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def take(self, key: str, num_tokens: int, now_s: float) -> Taken | OverLimit:
        """One request with `num_tokens`: all of it, or nothing and the limit that it is over."""
        account = self._account(key, now_s)
        over = self._over(account, num_tokens)
        if over is not None:
            return over
        if account.requests is not None:
            account.requests.level -= 1
        if account.tokens is not None:
            account.tokens.level -= num_tokens
        account.num_in_flight += num_tokens
        return Taken(key, num_tokens)

    def settle(self, taken: Taken, num_used: int | None = None) -> None:
        """The request is over. What it used in truth is charged in place of the estimate; None leaves that as it is."""
        account = self._accounts.get(taken.key)
        if taken.is_settled or account is None:
            return
        taken.is_settled = True
        account.num_in_flight = max(0, account.num_in_flight - taken.num_tokens)
        if account.tokens is not None and num_used is not None:
            account.tokens.level = min(account.tokens.most, account.tokens.level + taken.num_tokens - num_used)

    def give_back(self, taken: Taken) -> None:
        """The request was refused after all, for another reason: as if it had never been."""
        account = self._accounts.get(taken.key)
        if account is not None and not taken.is_settled and account.requests is not None:
            account.requests.level = min(account.requests.most, account.requests.level + 1)
        self.settle(taken, 0)

    def state(self, key: str, now_s: float) -> dict[str, LimitState]:
        """What is left of the limits by minute, by what they limit (`requests`, `tokens`)."""
        account = self._account(key, now_s)
        buckets = {"requests": account.requests, "tokens": account.tokens}
        return {
            name: LimitState(
                limit=int(bucket.per_minute * self._num_fronts + 0.5),
                remaining=max(0, math.floor(bucket.level * self._num_fronts)),
                reset_s=max(0.0, bucket.most - bucket.level) * MINUTE_S / bucket.per_minute,
            )
            for name, bucket in buckets.items()
            if bucket is not None
        }

    def _over(self, account: _Account, num_tokens: int) -> OverLimit | None:
        limits = account.limits
        if limits.tokens_per_minute is not None and num_tokens > limits.tokens_per_minute:
            return OverLimit("tokens_per_minute", None)
        if limits.max_in_flight_tokens is not None and num_tokens > limits.max_in_flight_tokens:
            return OverLimit("in_flight_tokens", None)
        waits: dict[LimitName, float] = {}
        if account.requests is not None:
            waits["requests_per_minute"] = account.requests.wait_s(1)
        if account.tokens is not None:
            waits["tokens_per_minute"] = account.tokens.wait_s(num_tokens)
        most = limits.share(self._num_fronts).max_in_flight_tokens
        if most is not None and account.num_in_flight and account.num_in_flight + num_tokens > most:
            waits["in_flight_tokens"] = 1.0  # until one of its own ends, whenever that is
        name = max(waits, key=lambda name: waits[name], default=None)
        return None if name is None or waits[name] <= 0 else OverLimit(name, waits[name])

    def _account(self, key: str, now_s: float) -> _Account:
        account = self._accounts.get(key)
        if account is None:
            limits = self._by_key.get(key, self._limits)
            share = limits.share(self._num_fronts)
            if len(self._accounts) >= MAX_KEYS:
                self._forget_one()
            account = self._accounts[key] = _Account(
                limits, _bucket(share.requests_per_minute, now_s), _bucket(share.tokens_per_minute, now_s)
            )
        self._accounts.move_to_end(key)
        for bucket in (account.requests, account.tokens):
            if bucket is not None:
                bucket.fill(now_s)
        return account

    def _forget_one(self) -> None:
        # The one unseen for longest that has nothing in flight; where all have, that one.
        idle = (key for key, account in self._accounts.items() if not account.num_in_flight)
        del self._accounts[next(idle, next(iter(self._accounts)))]


def _bucket(per_minute: float | None, now_s: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, max(1.0, per_minute), now_s)
