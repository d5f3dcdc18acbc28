"""`orthrus-serve top`: rates from two scrapes, and what stands in the table."""

from typing import Any

import pytest

from orthrus_serve.ops.top import COLUMNS, ServerNotReadableError, cells, plain, top
from orthrus_serve.ops.top_rates import Row, parse_scrape, rate, rows, summary

METRICS = """\
# TYPE orthrus_engine_step_tokens_total counter
orthrus_engine_step_tokens_total{{part="decode",replica="r1",topology="orthrus"}} {decode}
orthrus_engine_step_tokens_total{{part="prefill",replica="r1",topology="orthrus"}} {prefill}
orthrus_engine_step_tokens_total{{part="embed",replica="r1",topology="orthrus"}} {embed}
# TYPE orthrus_engine_step_budget_tokens_total counter
orthrus_engine_step_budget_tokens_total{{replica="r1",topology="orthrus"}} {budget}
# TYPE orthrus_engine_held_requests gauge
orthrus_engine_held_requests{{kind="embed",replica="r1",topology="orthrus"}} 5
orthrus_engine_held_requests{{kind="generate",replica="r1",topology="orthrus"}} 3
# TYPE orthrus_engine_oldest_wait_seconds gauge
orthrus_engine_oldest_wait_seconds{{kind="embed",replica="r1",topology="orthrus"}} 1.25
# TYPE orthrus_engine_kv_cache_usage_ratio gauge
orthrus_engine_kv_cache_usage_ratio{{replica="r1",topology="orthrus"}} 0.5
# TYPE vllm:request_time_per_output_token_seconds histogram
vllm:request_time_per_output_token_seconds_bucket{{replica="r1",le="+Inf"}} {count}
vllm:request_time_per_output_token_seconds_sum{{replica="r1"}} {sum}
vllm:request_time_per_output_token_seconds_count{{replica="r1"}} {count}
# TYPE orthrus_requests_total counter
orthrus_requests_total{{kind="embed",outcome="ok",replica="f1"}} {ok}
orthrus_requests_total{{kind="embed",outcome="failed",replica="f1"}} 0
"""
BEFORE = parse_scrape(
    METRICS.format(decode=100, prefill=200, embed=300, budget=1000, count=2, sum=0.1, ok=10), at_s=10.0
)
AFTER = parse_scrape(
    METRICS.format(decode=140, prefill=260, embed=500, budget=1400, count=4, sum=0.2, ok=30), at_s=12.0
)


def engine(**fields: Any) -> dict[str, Any]:
    return {"replica": "r1", "answered": True, "listed": True, "quarantined": None, "policy": "orthrus",
            "kinds": ["generate", "embed"], **fields}  # fmt: skip


def test_each_kind_of_a_replica_has_its_part_of_the_batch() -> None:
    generate, embed = rows(BEFORE, AFTER, {"engines": [engine()]})
    assert (generate.kind, generate.rates, generate.share) == (
        "generate",
        {"decode": 20.0, "prefill": 30.0},
        pytest.approx(1 / 3),
    )
    assert (embed.kind, embed.rates, embed.share) == ("embed", {"embed": 100.0}, pytest.approx(2 / 3))
    assert (generate.held, embed.held, embed.oldest_s, generate.oldest_s) == (3, 5, 1.25, None)
    assert (generate.tpot_s, embed.tpot_s) == (pytest.approx(0.05), None)
    assert (generate.fill, generate.kv, embed.fill, embed.kv) == (0.75, 0.5, None, None)


def test_a_replica_that_began_anew_or_is_new_has_no_rate() -> None:
    assert rate(AFTER, BEFORE, "orthrus_requests_total", outcome="ok") is None
    generate, _ = rows(AFTER, BEFORE, {"engines": [engine()]})
    assert generate.rates == {"decode": None, "prefill": None}
    (of_new, _) = rows(BEFORE, AFTER, {"engines": [engine(replica="r2")]})
    assert (of_new.rates, of_new.held, of_new.fill) == ({"decode": None, "prefill": None}, None, None)


@pytest.mark.parametrize(
    ("fields", "state"),
    [({}, "orthrus"), ({"answered": False, "policy": None}, "silent"), ({"quarantined": "stalled"}, "quarantined"),
     ({"listed": False}, "leaving")],
)  # fmt: skip
def test_the_state_says_what_is_wrong_first(fields: dict[str, Any], state: str) -> None:
    assert rows(BEFORE, AFTER, {"engines": [engine(**fields)]})[0].state == state


def test_a_replica_with_a_role_has_one_row_with_everything() -> None:
    (only,) = rows(BEFORE, AFTER, {"engines": [engine(kinds=["embed"])]})
    assert (only.kind, only.fill, only.kv) == ("embed", 0.75, 0.5)


def test_replicas_of_arms_are_named_by_their_arm() -> None:
    found = rows(BEFORE, AFTER, {"arms": {"old": {"engines": [engine()]}, "new": {"engines": []}}})
    assert [cells(row)[0] for row in found] == ["old/r1", "old/r1"]


def test_requests_of_all_fronts_are_told_by_their_end() -> None:
    assert summary(BEFORE, AFTER).line == "requests a second: 10.0 ok"


def test_the_plain_table_has_a_line_for_each_row_and_a_dash_for_what_is_not_known() -> None:
    lines = plain([Row("", "r1", "embed", "orthrus", held=5, rates={"embed": 99.6})], summary(BEFORE, AFTER))
    assert lines[0].split()[:3] == list(COLUMNS[:3])
    assert lines[1].split() == ["r1", "embed", "5", "–", "–", "100", "embed", "–", "–", "–", "–", "orthrus"]
    assert lines[-1].startswith("requests a second")


def test_a_server_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(ServerNotReadableError, match="does not answer as a server of Orthrus does"):
        top("http://127.0.0.1:9", 0.0, once=True)
