"""python -m bench <experiment> --out DIR: a table on screen, JSON and PNG in DIR.

Exit code: 0 when every bar is met, 1 when one is missed, 2 when the experiment could not run.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from pathlib import Path

from bench.report import BenchError


def experiments() -> dict[str, str]:
    """Name -> one line, for every module here that has `add_arguments` and `run`. Imports none."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        tree = ast.parse(path.read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if {"add_arguments", "run"} <= functions:
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def main(argv: list[str]) -> int:
    known = experiments()
    width = max(map(len, known), default=0)
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="One command per experiment; a table on screen, JSON and PNG in DIR.",
        epilog="experiments:\n" + "\n".join(f"  {name:{width}}  {line}" for name, line in known.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiment", help="one of those below; `<experiment> --help` lists its options")
    if not argv or argv[0].startswith("-"):
        parser.parse_args(argv or ["--help"])
    name, *rest = argv
    if name not in known:
        print(f"error: unknown experiment {name!r}; choose from {', '.join(known)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"bench.{name}")
    options = argparse.ArgumentParser(prog=f"python -m bench {name}", description=module.__doc__)
    options.add_argument("--out", type=Path, default=Path("out") / name, metavar="DIR")
    module.add_arguments(options)
    try:
        return int(module.run(options.parse_args(rest)))
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; results so far are kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
