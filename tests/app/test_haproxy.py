"""HAProxy's environment: nothing in it may be another server's."""

from __future__ import annotations

from app.haproxy import haproxy


def test_two_servers_of_one_machine_share_neither_port_nor_file() -> None:
    ours, theirs = (
        {value for name, value in haproxy(directory).items() if "_PORT" in name or directory in value}
        for directory in ("/tmp/ours", "/tmp/theirs")
    )
    assert len(ours) == len(theirs) == 12
    assert not ours & theirs
