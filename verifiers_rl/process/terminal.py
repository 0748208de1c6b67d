"""What is shown to people: texts that do no harm, and showing them never ends a run."""

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


# With those that turn the direction of the text behind them.
_REMOVED = dict.fromkeys(
    {*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {*b"\n\t"}
)


MAX_MESSAGE = 2000  # characters of an error's own text that are shown


def printable(text: str) -> str:
    """Return a text of a model or a dataset without control characters, which could clear the
    terminal, set its title or write over other lines. Line breaks and tabs stay. Half a surrogate
    pair, which has no form in UTF-8, becomes `?`.
    """
    return text.translate(_REMOVED).encode(errors="replace").decode()


def describe_error(error: BaseException) -> str:
    """Describe in one line the exception and what caused it."""
    links = [error]
    while (cause := links[-1].__cause__) is not None and cause not in links:  # `raise e from e`
        links.append(cause)
    return printable(" <- ".join(map(_in_one_line, links)))


def _in_one_line(error: BaseException) -> str:
    try:
        text = str(error)[:MAX_MESSAGE]
    except Exception:  # its class has a __str__ of its own, which fails
        text = ""
    return f"{type(error).__name__}: {text}".removesuffix(": ").splitlines()[0]
