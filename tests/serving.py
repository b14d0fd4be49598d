"""The server that tests share; see bench/serving.py."""

from bench.serving import ROOT, Server, free_port, served, stop

__all__ = ["ROOT", "Server", "free_port", "served", "stop"]
