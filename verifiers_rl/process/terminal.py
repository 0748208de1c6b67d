"""Showing something to people never ends a run. See also `data.printable`."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


def print_all_characters() -> None:
    """Let `print` escape the characters that the encoding of the terminal lacks, such as those
    beyond Latin-1, where it would raise UnicodeEncodeError. Each line is there at once, in a file
    and a pipe, too.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook has another stream, in UTF-8
            stream.reconfigure(errors="backslashreplace", line_buffering=True)


@contextmanager
def showing(what: str) -> Iterator[None]:
    """Enter this to show something during training. A terminal that is gone, or a full disk that
    has the output, costs only what is shown.
    """
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: the stream is closed
        logger.warning("%s cannot be shown: %s", what, error)
