"""Ray Serve's own HAProxy, which comes with ray[serve], instead of its Python proxy."""

from __future__ import annotations

import random
import socket

REPLICA_PORTS = range(20_480, 32_256)
"""Where a server's replicas may begin to listen: between the ports of Ray's workers and those that clients
are given."""
MOST_REPLICAS = 512


def haproxy(scratch: str) -> dict[str, str]:
    """The environment that makes `serve run` put HAProxy in front of the replicas.

    Its files live in the directory `scratch`. Its ports are free ones, chosen anew at every call.
    """
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        # Tokens are small: a hop between threads costs a replica more than what it does with one.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        # Ten times a second is the default, and costs most when nothing happens.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
        # Replicas and engines leave together: half a minute of draining would only delay Ctrl-C.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        # The defaults are fixed paths and ports. On ports that share gladly (SO_REUSEPORT) two servers of
        # one machine would answer each other's requests.
        **_replica_ports(),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{scratch}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{scratch}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": scratch,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{scratch}/server-state",
    }


def _replica_ports() -> dict[str, str]:
    """Ranges for the replicas' own listeners, which take them from the beginning."""
    # Anywhere, not at round numbers: servers that start together see each other's ports still free.
    free = filter(_is_free, random.sample(REPLICA_PORTS, len(REPLICA_PORTS)))
    ports = {}
    for protocol, first in zip(("HTTP", "GRPC"), free, strict=False):
        ports[f"RAY_SERVE_DIRECT_INGRESS_MIN_{protocol}_PORT"] = str(first)
        ports[f"RAY_SERVE_DIRECT_INGRESS_MAX_{protocol}_PORT"] = str(first + MOST_REPLICAS - 1)
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
