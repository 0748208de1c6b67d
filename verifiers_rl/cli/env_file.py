"""Files of secrets for environments: lines of NAME=VALUE. No value is printed or written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dotenv.parser import parse_stream

from verifiers_rl.cli.layers import TomlError


def read_env_files(files: Iterable[Path]) -> dict[str, str]:
    """Return the variables of all files; a later file wins.

    Raises:
        TomlError: a file cannot be read, or a line is not NAME=VALUE. The line itself is not shown.
    """
    variables: dict[str, str] = {}
    for path in files:
        where = f"env_file={str(path)!r}"
        try:
            with path.open(encoding="utf-8-sig") as lines:
                found = list(parse_stream(lines))
        except (OSError, UnicodeDecodeError) as error:
            raise TomlError(f"{where}: {getattr(error, 'strerror', error)}; correct it") from error
        for one in found:
            if one.error or (one.key is not None and one.value is None):
                line = one.original.line + one.original.string.rstrip().count("\n")
                raise TomlError(f"{where}, line {line}: must be NAME=VALUE, or begin with #")
            if one.key is not None:
                variables[one.key] = one.value or ""
    return variables
