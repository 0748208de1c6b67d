"""The end of an error about an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


def did_you_mean(
    name: str, known: Iterable[str], otherwise: str = "", shown: Callable[[str], str] = repr
) -> str:
    """Return "did you mean 'x'?" with the known name that is nearest to this one.

    Args:
        name: what was given.
        known: the names that exist.
        otherwise: is returned if none of them is near.
        shown: how the error shows a name.
    """
    near = difflib.get_close_matches(name, list(known), 1, cutoff=0.7)
    return f"did you mean {shown(near[0])}?" if near else otherwise
