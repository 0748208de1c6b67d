"""Showing something to people never ends a run. See also `data.printable`."""

from __future__ import annotations

import atexit
import io
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

logger = logging.getLogger(__name__)


def print_all_characters() -> None:
    """Let `print` escape the characters that the encoding of the terminal lacks, such as those
    beyond Latin-1, where it would raise UnicodeEncodeError. Each line is there at once, in a file
    and a pipe, too.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook has another stream, in UTF-8
            stream.reconfigure(errors="backslashreplace", line_buffering=True)


def end_without_noise(status: int) -> NoReturn:
    """End as Python would, but without what compiled modules print when they are unloaded, and
    without waiting for threads: triton's modules print 30 lines about its leaks.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def show(display: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Call what shows something. A terminal that is gone, or a full disk that has the output, costs
    only what is shown.
    """
    try:
        display(*args, **options)
    except (OSError, ValueError) as error:  # ValueError: the stream is closed
        logger.warning(f"a line, a table or the progress bar cannot be shown: {error}")
