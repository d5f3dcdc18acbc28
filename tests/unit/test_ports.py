"""The ports of tests: none that the kernel gives away, none that is taken, none twice."""

import socket

import pytest

from tests import ports


@pytest.mark.parametrize(
    ("told", "end"), [("32768\t60999\n", 32_768), ("20300\t60999\n", 20_300), ("1024\t65535\n", 32_768), (None, 32_768)]
)
def test_no_port_is_one_that_a_connection_could_be_given(monkeypatch, tmp_path, told, end):
    monkeypatch.setattr(ports, "_EPHEMERAL", tmp_path / "ip_local_port_range")
    if told:
        (tmp_path / "ip_local_port_range").write_text(told, encoding="ascii")
    given = [ports.free_port() for _ in range(50)]
    assert all(20_000 <= port < end for port in given)
    assert len(set(given)) == 50


def test_a_port_that_is_taken_is_left_out(monkeypatch):
    taken, free = ports.free_port(), ports.free_port()
    monkeypatch.setattr(ports, "_given", set())
    drawn = iter([taken, free])
    monkeypatch.setattr(
        ports.random, "SystemRandom", lambda: type("Fixed", (), {"randrange": lambda *_: next(drawn)})()
    )
    with socket.create_server(("127.0.0.1", taken)):
        assert ports.free_port() == free
