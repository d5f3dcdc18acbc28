"""A client beside those of a test, which must not notice them."""

import math
import threading
from typing import Any

import httpx

EMBED, COMPLETE = "/v1/embeddings", "/v1/completions"


def cosine(left: list[float], right: list[float]) -> float:
    """Cosine of two vectors."""
    return sum(a * b for a, b in zip(left, right, strict=True)) / math.hypot(*left) / math.hypot(*right)


class Neighbour:
    """A client that asks the same two questions over and over, and expects the same two answers."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._stop = threading.Event()
        self._expected = self._ask()
        self.num_asked = 0
        self.wrong: list[Any] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _ask(self) -> tuple[str, list[float]]:
        body = {"prompt": [9, 8, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        text = self._http.post(COMPLETE, json=body).json()["choices"][0]["text"]
        return text, self._http.post(EMBED, json={"input": [[4, 5, 6]]}).json()["data"][0]["embedding"]

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                text, vector = self._ask()
                if text != self._expected[0] or cosine(vector, self._expected[1]) < 0.99999:
                    self.wrong.append((text, vector))
            except Exception as error:  # noqa: BLE001 - whatever it is, the test tells
                self.wrong.append(error)
            self.num_asked += 1

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
