"""`vf-rl view RUN...`: a page about runs, on this machine. `vf-rl report RUN... -o page.html`: the
same page as one file, with a sample of the rollouts.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from verifiers_rl.cli.errors import fail


def look_at_runs(arguments: list[str]) -> int:
    """Run one of the two commands. Returns the exit status.

    Args:
        arguments: `view` or `report`, and what follows.
    """
    parser = argparse.ArgumentParser(prog="vf-rl")
    commands = parser.add_subparsers(required=True)
    for name, run, about in (
        ("view", _view, "Serve a page about runs on this machine."),
        ("report", _report, "Write the page about runs as one file."),
    ):
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(run=run)
        runs = "a run's folder, or a folder of runs"
        command.add_argument("runs", nargs="+", metavar="RUN", help=runs)
        if run is _view:
            command.add_argument("--port", type=int, default=0, help="default: a free one")
        else:
            command.add_argument("-o", "--output", type=Path, required=True, help="*.html")
            command.add_argument("--max-mb", type=float, default=2.0, help="its size; default: 2")
    options = parser.parse_args(arguments)
    return int(options.run(options))


def _view(options: argparse.Namespace) -> int:
    # pyarrow's own allocators keep tens of MB that are needed for a moment.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    from verifiers_rl.view.runs import Runs, ViewError

    try:
        from verifiers_rl.view import server
    except ImportError as error:
        fail(
            f"the page needs starlette and uvicorn ({error}): vLLM brings them, or "
            "`uv pip install 'verifiers-rl[view]'`. `vf-rl report RUN -o page.html` needs neither"
        )
    try:
        runs = Runs(options.runs)
        found = runs.find()
        listener = server.listen(options.port)
    except ViewError as error:
        fail(error)
    except (OSError, OverflowError) as error:
        fail(f"cannot listen on port {options.port}: {error}; choose another --port, or leave it")
    token = server.new_token()
    port = listener.getsockname()[1]
    print(f"{len(found)} run{'s' * (len(found) != 1)}: http://{server.HOST}:{port}/?token={token}")
    print("Only who has this address can read the page. Ctrl-C ends it.", flush=True)
    try:
        server.make_server(server.make_app(runs, token)).run(sockets=[listener])
    except KeyboardInterrupt:  # Ctrl-C is how it ends
        print()
    finally:
        listener.close()
    return 0


def _report(options: argparse.Namespace) -> int:
    from verifiers_rl.view.one_file import write_page
    from verifiers_rl.view.runs import Runs, ViewError

    try:
        lines = write_page(Runs(options.runs), options.output, int(options.max_mb * 1e6))
    except ViewError as error:
        fail(error)
    except OSError as error:
        fail(f"{options.output}: {error.strerror}; choose another -o")
    print("\n".join(lines))
    return 0
