"""Files of secrets for environments: lines of NAME=VALUE. No value is printed or written."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from verifiers_rl.cli.layers import TomlError

_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")


def read_env_files(files: Iterable[Path]) -> dict[str, str]:
    """Return the variables of all files; a later file wins.

    Raises:
        TomlError: a file cannot be read, or a line is not NAME=VALUE. The line itself is not shown.
    """
    variables: dict[str, str] = {}
    for path in files:
        try:
            lines = path.read_text("utf-8-sig").splitlines()
        except OSError as error:
            raise TomlError(f"env_file={str(path)!r}: {error.strerror}; correct it") from error
        except UnicodeDecodeError as error:
            raise TomlError(f"env_file={str(path)!r}: it is no UTF-8 text") from error
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            found = _LINE.fullmatch(text)
            if found is None:
                raise TomlError(
                    f"env_file={str(path)!r}, line {number}: must be NAME=VALUE, or begin with #"
                )
            variables[found[1]] = _unquoted(found[2].strip())
    return variables


def _unquoted(value: str) -> str:
    """Return a value without the comment behind it and without quotes around it."""
    if quoted := re.fullmatch(r"""(["'])(.*?)\1\s*(#.*)?""", value):
        return quoted[2]
    return re.split(r"\s#", value, maxsplit=1)[0].rstrip()
