"""What counts as a token, an end and an error in a streamed answer."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from loadgen.answer import StreamReader, read_vectors, read_whole, short_reason
from loadgen.sse import Event, EventParser
from tests.unit.loadgen.builders import sse, text_event, usage_event

STREAM = b": hello\r\n\r\ndata: {}\r\n\r\nevent: error\ndata: a\ndata: b\n\nid: 4\n\ndata:[DONE]\n\n"
EVENTS = [Event(b"{}"), Event(b"a\nb", "error"), Event(b"[DONE]")]


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_are_the_same_wherever_the_network_cuts(cuts: list[int]) -> None:
    parser = EventParser()
    places = [0, *sorted(cuts), len(STREAM)]
    found = [event for begin, end in pairwise(places) for event in parser.feed(STREAM[begin:end])]
    assert found + parser.flush() == EVENTS


def test_an_event_without_a_blank_line_at_the_end_is_still_read() -> None:
    parser = EventParser()
    assert parser.feed(b"data: x") == []
    assert parser.flush() == [Event(b"x")]


def test_events_of_one_read_have_one_time_and_events_cut_in_two_that_of_their_end() -> None:
    reader = StreamReader()
    data = sse(text_event("a"), text_event("b"), text_event("c"))
    reader.feed(data[:-10], 1.0)
    reader.feed(data[-10:] + sse(text_event("", "stop"), usage_event(3, 3), "[DONE]"), 2.0)
    answer = reader.end(2.0)
    assert (answer.error, answer.text, answer.gaps_s) == (None, "abc", [0.0, 1.0])
    assert (answer.prompt_tokens, answer.output_tokens) == (3, 3)


def test_without_usage_tokens_are_counted_by_events_and_the_record_says_so() -> None:
    reader = StreamReader()
    reader.feed(sse(text_event("a"), text_event("b", "stop")), 1.0)
    answer = reader.end(1.0)
    assert (answer.error, answer.output_tokens, answer.output_counted_by) == (None, 2, "events")


def test_an_error_named_by_the_event_or_by_the_finish_reason_is_an_error() -> None:
    named = StreamReader()
    named.feed(sse(text_event("a")) + b'event: error\ndata: {"message":"gone"}\n\n', 1.0)
    assert named.end(1.0).error == "error in the stream: gone"
    finished = StreamReader()
    finished.feed(sse(text_event("a"), text_event("", "abort"), "[DONE]"), 1.0)
    assert finished.end(1.0).error == "finished with 'abort'"


def test_a_page_that_is_no_stream_is_an_error() -> None:
    reader = StreamReader()
    reader.feed(b"<html>login</html>", 1.0)
    assert (reader.end(1.0).error or "").startswith(("not a completion event", "stream ended early"))


def test_whole_answers_are_judged_like_streams() -> None:
    assert read_whole(b'{"choices":[{"text":"hi","finish_reason":"stop"}]}').error is None
    assert read_whole(b'{"choices":[{"text":"","finish_reason":"stop"}]}').error == "empty answer"
    assert read_whole(b'{"error":{"message":"no"}}').error == "error in a 200 answer: no"
    assert (read_whole(b"oops").error or "").startswith("not a completion")


def test_vectors_must_be_as_many_as_the_inputs_and_not_empty() -> None:
    body = b'{"data":[{"index":1,"embedding":"BBBB"},{"index":0,"embedding":"AAAA"}],"usage":{"prompt_tokens":9}}'
    vectors = read_vectors(body, 2)
    assert (vectors.error, vectors.data, vectors.prompt_tokens) == (None, ["AAAA", "BBBB"], 9)
    assert read_vectors(body, 3).error == "2 vectors for 3 inputs"
    assert (read_vectors(b'{"data":[{"embedding":[]}]}', 1).error or "").startswith("empty answer")


def test_an_error_body_is_told_in_one_short_line() -> None:
    assert short_reason(b'{"error":{"message":"too\\nlong"}}') == "too long"
    assert short_reason(b"plain  text") == "plain text"
