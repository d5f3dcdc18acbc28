"""The page of a card: what one process says the other reads, and what is torn, stale or left behind harms nobody."""

import multiprocessing
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orthrus_serve.engine import card_page
from orthrus_serve.engine.card_page import PREFIX, SLOT_BYTES, CardPage, make_page, sweep_pages


@pytest.fixture
def page(tmp_path: Path) -> str:
    return make_page(str(tmp_path))


def write_for_ever(path: str, ready: "multiprocessing.synchronize.Event") -> None:
    with CardPage(path, 1) as mine:
        step = 0
        while True:
            step += 1
            mine.publish(step * 1_000_003)
            ready.set()


def test_each_reads_what_the_other_has_left(page):
    with CardPage(page, 0) as left, CardPage(page, 1) as right:
        assert (left.other_tokens(), right.other_tokens()) == (0, 0)
        left.publish(700)
        right.publish(2**40)
        assert (left.other_tokens(), right.other_tokens()) == (2**40, 700)
        left.publish(0)
        assert right.other_tokens() == 0


def test_another_process_is_read_while_it_writes_and_no_torn_value_is_ever_seen(page):
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    writer = spawn.Process(target=write_for_ever, args=(page, ready))
    writer.start()
    try:
        assert ready.wait(60)
        seen: list[int] = []
        with CardPage(page, 0, stale_s=300) as mine:
            ends_s = time.monotonic() + 60
            while len(set(seen[-200_000:])) < 50 and time.monotonic() < ends_s:
                seen += [mine.other_tokens() for _ in range(1000)]
    finally:
        writer.kill()
        writer.join()
    assert all(tokens % 1_000_003 == 0 for tokens in seen)
    assert seen == sorted(seen)
    assert len(set(seen)) >= 50


def test_a_torn_slot_reads_as_what_was_there_before(page):
    with CardPage(page, 0) as mine, CardPage(page, 1) as other:
        other.publish(500)
        assert mine.other_tokens() == 500
        raw = bytearray(Path(page).read_bytes())
        struct.pack_into("<Q", raw, SLOT_BYTES + 8, 123_456)  # new tokens beside the old number, time and check sum
        with open(page, "r+b") as file:
            file.write(raw)
        assert mine.other_tokens() == 500
        other.publish(600)
        assert mine.other_tokens() == 600


def test_noise_in_a_slot_reads_as_idle(page):
    with open(page, "r+b") as file:
        file.write(os.urandom(2 * SLOT_BYTES))
    with CardPage(page, 0) as mine:
        assert mine.other_tokens() == 0


def test_a_slot_that_is_not_renewed_counts_as_idle(page):
    with CardPage(page, 0, stale_s=0.2) as mine, CardPage(page, 1) as other:
        other.publish(500)
        assert mine.other_tokens() == 500
        time.sleep(0.3)
        assert mine.other_tokens() == 0
        other.publish(400)
        assert mine.other_tokens() == 400


def test_the_page_outlives_its_name(page):
    with CardPage(page, 0) as mine, CardPage(page, 1) as other:
        Path(page).unlink()
        other.publish(9)
        assert mine.other_tokens() == 9


def test_pages_of_the_dead_are_swept_and_those_of_the_living_stay(tmp_path, page):
    made = "from orthrus_serve.engine.card_page import make_page; import sys; print(make_page(sys.argv[1]))"
    root = str(Path(card_page.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", made, str(tmp_path)], check=True, capture_output=True, text=True, cwd=root
    )
    dead = Path(done.stdout.strip())
    unrelated = tmp_path / f"{PREFIX}notes"
    unrelated.write_text("x")
    assert dead.exists()
    assert sweep_pages(str(tmp_path)) == 1
    assert sorted(tmp_path.iterdir()) == sorted([Path(page), unrelated])


def test_there_are_two_slots(page):
    with pytest.raises(ValueError, match="slot 2"):
        CardPage(page, 2)
