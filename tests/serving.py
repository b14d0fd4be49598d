"""The server that tests share; see bench/serving.py."""

from bench.serving import Server, free_port, served, stop

__all__ = ["Server", "free_port", "served", "stop"]
