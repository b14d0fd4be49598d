"""The server that tests share; see bench/serving.py."""

from app.haproxy import free_port
from bench.origin import REPO as ROOT
from bench.serving import Server, served, stop, write_config

__all__ = ["ROOT", "Server", "free_port", "served", "stop", "write_config"]
