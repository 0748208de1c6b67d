"""The end of an error about an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection


def did_you_mean(
    name: str, known: Collection[str], otherwise: str = "", shown: Callable[[str], str] = repr
) -> str:
    """Return "did you mean 'x'?" with a known name that begins so, or with the nearest one.

    Args:
        name: what was given.
        known: the names that exist.
        otherwise: is returned if none of them is near.
        shown: how the error shows a name.
    """
    longer = [one for one in known if len(name) > 3 and one.startswith(name)]
    near = longer or difflib.get_close_matches(name, known, 1, cutoff=0.7)
    return f"did you mean {shown(near[0])}?" if near else otherwise
