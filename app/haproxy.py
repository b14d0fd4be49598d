"""Ray Serve's own HAProxy, which comes with ray[serve], instead of its Python proxy."""

from __future__ import annotations

import socket


def haproxy(scratch: str) -> dict[str, str]:
    """The environment that makes `serve run` put HAProxy in front of the replicas.

    Its files live in the directory `scratch`. For a stream of tokens it costs a fraction of what Ray
    Serve's Python proxy does (`python -m bench compare` measures through it).
    """
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        # Replicas and engines leave together: half a minute of draining would only delay Ctrl-C.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        # The defaults are fixed paths and ports, on which two servers of one machine would collide.
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{scratch}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{scratch}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": scratch,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{scratch}/server-state",
    }


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
