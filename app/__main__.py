"""`python -m app`: `serve run` with fast streaming, and a word when it is ready.

Plain `serve run serve_config.yaml` deploys the very same application; this adds Ray Serve's HAProxy
front end, which streams to many clients several times faster than the default Python proxy.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml
from pydantic import ValidationError
from rich.console import Console

from app.config import Settings
from app.haproxy import haproxy
from app.sampling_defaults import sampling_defaults
from app.serve_log import ServeLog
from app.tokenizer import Tokenizer
from model.files import find_model
from policies import load_policy

READY_TIMEOUT = 300.0

T = TypeVar("T")


def main() -> int:
    """Start the server, wait until it answers, and stay until it ends or Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m app", description="Serve until Ctrl-C.")
    parser.add_argument("--config", type=Path, default=Path("serve_config.yaml"), help="default: %(default)s")
    parser.add_argument(
        "--python-proxy", action="store_true", help="keep Ray Serve's Python proxy instead of HAProxy"
    )
    parser.add_argument("--verbose", action="store_true", help="show all that Ray prints")
    args = parser.parse_args()
    try:
        config = yaml.safe_load(args.config.read_text())
        application = config["applications"][0]
        settings = _checked(_section(application, "args", {}))
        http: dict[str, Any] = _section(config, "http_options", {})
        prefix = _section(application, "route_prefix", "/").rstrip("/")
    except OSError as error:
        parser.error(f"cannot use {args.config}: {error}")
    except (ValueError, KeyError, IndexError, TypeError, yaml.YAMLError) as error:
        parser.error(f"{args.config} is not usable: {_reason(error)}")
    host, port = http.get("host", "127.0.0.1"), http.get("port", 8000)
    if taken := _taken(host, port):
        parser.error(f"cannot listen on {host}:{port} ({taken}); change http_options in {args.config}")
    url = f"http://{host}:{port}{prefix}"

    console = Console()
    show = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    try:
        log = ServeLog(Path(settings.run_dir) / "serve.log", show, everything=args.verbose)
    except OSError as error:
        parser.error(f"cannot write to run_dir {settings.run_dir}: {error}")
    try:
        files = find_model(settings.model)
        Tokenizer.load(files, Path(settings.run_dir))
        sampling_defaults(files)
    except (OSError, ValueError) as error:
        parser.error(f"cannot use the model: {error}")
    with tempfile.TemporaryDirectory(prefix="slotserve-") as scratch:
        environment = {
            **os.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        if not args.python_proxy:
            environment |= haproxy(scratch)
        command = [str(Path(sys.executable).with_name("serve")), "run", str(args.config)]
        with _started(command, environment, log) as (server, asked):
            with console.status("Starting Ray, loading the model ..."):
                ready = _wait(server, url)
            if ready:
                greeting = _greeting(url, bool(settings.api_keys()), log)
                console.print(greeting, highlight=False, soft_wrap=True)
            elif server.poll() is None:
                console.print(f"[red]Not ready after {READY_TIMEOUT:.0f} s.")
                server.send_signal(signal.SIGINT)
            code = server.wait()
            if not asked and (code or not ready):
                show(log.tail())
                console.print(
                    f"[red]Ray Serve has ended.[/] All that was printed: {log.path}", soft_wrap=True
                )
            return code if ready else code or 1


@contextmanager
def _started(
    command: Sequence[str], environment: Mapping[str, str], log: ServeLog
) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """The server and, as they come, the signals that asked it to end. It ends with the block."""
    # A shell starts what is in the background with a deaf ear to Ctrl-C, the signal Ray Serve leaves on.
    hear = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    # In a process group of its own it hears Ctrl-C through us alone: a second one breaks off its leaving.
    server = subprocess.Popen(
        command,
        env=environment,
        preexec_fn=hear,
        process_group=0,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        asked = _stop_with_us(server)
        assert server.stdout is not None
        log.read(server.stdout)
        yield server, asked
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGINT)
            server.wait()
        log.join(timeout=1)


def _section(parent: dict[str, Any], name: str, default: T) -> T:
    """A part of the file, `default` without it. Raises ValueError where it is of another type, or empty."""
    value = parent.get(name, default)
    if value is None:
        raise ValueError(f"{name} is empty: put something there or remove the line")
    if not isinstance(value, type(default)):
        raise ValueError(f"{name} cannot be {value!r}")
    return value


def _checked(args: dict[str, Any]) -> Settings:
    """Say what is wrong before Ray starts, in a sentence instead of a trace."""
    settings = Settings.model_validate(args)
    settings.api_keys()
    load_policy(settings.policy, **settings.policy_settings)
    find_model(settings.model)
    if settings.device != "auto" or settings.dtype != "auto":
        # Here, not above: torch takes seconds to load, and the defaults fit every machine.
        from model.loader import choose_backend

        config = settings.engine_config()
        choose_backend(config.device, config.dtype)
    return settings


def _taken(host: str, port: object) -> str | None:
    """Why nobody can listen there, if so: another server would answer in this one's name."""
    if not isinstance(port, int) or not 0 < port < 65536:
        return "not a port number from 1 to 65535"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
    return f"{type(error).__name__}: {error}" if isinstance(error, (KeyError, TypeError)) else str(error)


def _wait(server: subprocess.Popen[bytes], url: str) -> bool:
    deadline = time.monotonic() + READY_TIMEOUT
    while time.monotonic() < deadline and server.poll() is None:
        try:
            # Until the application is deployed the proxy lets the question wait.
            if httpx.get(f"{url}/health", timeout=30).is_success:
                return True
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    return False


def _stop_with_us(server: subprocess.Popen[bytes]) -> list[int]:
    """Ctrl-C, SIGTERM and the end of the terminal end the server as Ctrl-C does; else it would stay, an
    orphan. Returns the list that such signals are added to."""
    asked: list[int] = []

    def stop(number: int, _: object) -> None:
        # Who asks twice cannot wait; but a terminal that closes says so twice by itself.
        if not (asked and number == signal.SIGHUP):
            server.send_signal(signal.SIGTERM if asked else signal.SIGINT)
        asked.append(number)

    heard = [signal.SIGINT, signal.SIGTERM]
    # nohup has it ignored.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        heard.append(signal.SIGHUP)
    for each in heard:
        signal.signal(each, stop)
    return asked


def _greeting(url: str, keys: bool, log: ServeLog) -> str:
    key = "-H 'Authorization: Bearer YOUR_KEY' " if keys else ""
    ray = Path(sys.executable).with_name("ray")
    return f"""
[bold green]slotserve is ready.[/] Ask it something:

  curl -N {url}/v1/chat/completions {key}-H 'Content-Type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "What is continuous batching?"}}],
         "max_tokens": 64, "stream": true}}'

Watch the batch:   {url}/
Ray dashboard:     {log.dashboard or "off"} (its token: {ray} get-auth-token)
All of Ray's log:  {log.path}
Ctrl-C stops it.
"""


if __name__ == "__main__":
    sys.exit(main())
