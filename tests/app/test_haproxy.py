"""HAProxy's environment: nothing in it may be another server's."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from app.haproxy import haproxy


def own(directory: str) -> set[str]:
    """The ports and paths of a server whose files lie in `directory`."""
    return {
        value for name, value in haproxy(directory).items() if name.endswith("_PORT") or directory in value
    }


def test_two_servers_of_one_machine_share_neither_port_nor_file() -> None:
    ours = own("/tmp/ours")
    with ExitStack() as listening:
        for port in filter(str.isdigit, ours):
            listener = listening.enter_context(socket.socket())
            listener.bind(("127.0.0.1", int(port)))
            listener.listen()
        theirs = own("/tmp/theirs")
    assert len(ours) == len(theirs) == 12
    assert not ours & theirs
