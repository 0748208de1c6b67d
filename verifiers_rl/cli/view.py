"""`vf-rl view RUN...`: a page about runs, on this machine. With `-o page.html`: the same page as
one file, with a sample of the rollouts.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from verifiers_rl.cli.errors import fail
from verifiers_rl.cli.layers import load_leaf


def main(arguments: list[str]) -> int:
    """Serve or write the page. Returns the exit status.

    Args:
        arguments: what follows `view`.
    """
    parser = argparse.ArgumentParser(
        prog="vf-rl view", description="Serve a page about runs on this machine, or write it."
    )
    runs = "a run's folder, or a folder of runs"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=runs)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--port", type=int, default=0, help="default: a free one")
    either.add_argument("-o", "--output", type=Path, help="*.html: write the page as this file")
    parser.add_argument("--max-mb", type=float, default=2.0, help="its size; default: 2")
    options = parser.parse_args(arguments)
    # pyarrow's own allocators keep tens of MB that are needed for a moment.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    view = load_leaf("view.runs", "vf-rl view")
    try:
        (_serve if options.output is None else _write)(options, view.Runs(options.runs))
    except view.ViewError as error:
        fail(error)
    return 0


def _serve(options: argparse.Namespace, runs: Any) -> None:
    try:
        from verifiers_rl.view import server
    except ImportError as error:
        fail(
            f"the page needs starlette and uvicorn ({error}): vLLM brings them, or "
            "`uv pip install 'verifiers-rl[view]'`. `vf-rl view RUN -o page.html` needs neither"
        )
    found = runs.find()
    try:
        listener = server.listen(options.port)
    except (OSError, OverflowError) as error:
        fail(f"cannot listen on port {options.port}: {error}; choose another --port, or leave it")
    token = server.new_token()
    port = listener.getsockname()[1]
    print(f"{len(found)} run{'s' * (len(found) != 1)}: http://{server.HOST}:{port}/?token={token}")
    print("Only who has this address can read the page. Ctrl-C ends it.")
    try:
        server.make_server(server.make_app(runs, token)).run(sockets=[listener])
    except KeyboardInterrupt:  # Ctrl-C is how it ends
        print()
    finally:
        listener.close()


def _write(options: argparse.Namespace, runs: Any) -> None:
    from verifiers_rl.view.one_file import write_page

    try:
        lines = write_page(runs, options.output, int(options.max_mb * 1e6))
    except (OSError, ValueError) as error:  # "." is no name of a file
        fail(f"-o {options.output}: {error}")
    print("\n".join(lines))
