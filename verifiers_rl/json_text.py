"""Values as JSON that every reader can read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def without_nan(value: Any) -> Any:
    """Return a value that JSON has a form for: NaN and infinities become None, numbers of numpy
    those of Python, and an object of another class its description.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str | int | None):
        return value
    if isinstance(value, Mapping):
        return {str(key): without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    return without_nan(value.item()) if isinstance(value, np.generic) else str(value)


def as_json(value: Any) -> bytes:
    """Return a value as JSON in UTF-8, on one line. Half a surrogate pair, which has no form in
    UTF-8, becomes `?`.
    """
    return json.dumps(without_nan(value), ensure_ascii=False, allow_nan=False).encode(
        errors="replace"
    )
