"""Which environment variables and keys hold secrets. Nothing prints or writes their values."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

# Names (not values) of variables that came from an `env_file`, separated by commas. Processes that
# this one starts inherit it.
LISTED = "VERIFIERS_RL_SECRET_NAMES"

_SECRET_NAME = re.compile(
    r"(TOKENS?|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(_|$)"
    r"|(^|_)(API|ACCESS|PRIVATE)?(KEYS?|PATS?|PASS|AUTH)(_|$)|._PWD$"
)
_PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]+@")
# Narrower: a TOML has many keys that end in "token" or "key" and are no secrets.
_SECRET_KEY = re.compile(
    r"(^|_)(api|access|auth|bearer|hub|hf|secret|private|wandb|openai)_?(key|token)s?$"
    r"|(^|_)(passwords?|passwd|passphrase|secrets?|credentials?|authorization)$|^token$"
)
# Alone or as a word of a text, such as "Bearer sk-..."; not as a part of a path.
_SECRET_VALUE = re.compile(
    r"(?<![\w/.-])(sk|hf|ghp|gho|github_pat|glpat|xox[abp])[-_][\w-]{16,}(?![\w/-])"
)

# NAME = "VALUE", NAME: "VALUE", ["NAME"] = "VALUE" and NAME("VALUE") in a program. If the value is
# long, also "NAME", "VALUE", and NAME=VALUE in a shell. In a notebook, quotes have a backslash.
_NAMED_TEXT = re.compile(
    r"""(?<!\w)(\w+)[\\"'\]]*\s*([:=(,])\s*(?=\\?["']([^\\"'\n]{8,})|([\w+/=-]{20,200})(?!\S))"""
)
_RANDOM_TEXT = re.compile(r"(?=(\D*\d){3})[\w+/=-]{20,}")  # as keys are, and few words


def without_secrets(text: str) -> str:
    """Return a program, or what git says of one, with *** for each text that has the name of a
    secret in one place of it, for what has the form of one, and for this process's secrets.
    """
    for name, value in os.environ.items():
        if len(value) >= 8 and is_secret(name, value):
            text = text.replace(value, "***")
    for name, sign, quoted, bare in _NAMED_TEXT.findall(text):
        is_key = is_secret(name) and _RANDOM_TEXT.fullmatch(quoted or bare)
        if is_key or (sign != "," and is_secret_key(name, quoted)):
            text = text.replace(quoted or bare, "***")
    return _SECRET_VALUE.sub("***", _PASSWORD_IN_URL.sub("://***@", text))


def listed() -> list[str]:
    """Return the names of the variables that came from an `env_file`."""
    return [name for name in os.environ.get(LISTED, "").split(",") if name]


def is_secret(variable: str, value: str = "") -> bool:
    """Return whether an environment variable holds a secret that programs must not know. It came
    from an `env_file`, its name says so, or its value is a URL with a password.
    """
    by_name = _SECRET_NAME.search(variable.upper()) or variable in listed()
    return bool(by_name) or _PASSWORD_IN_URL.search(value) is not None


def is_secret_key(key: str, value: object) -> bool:
    """Return whether a key of a TOML has a secret as its value, by the name of the key or by the
    form of the value or of an item of it. A table is one by its name alone.
    """
    if not value or isinstance(value, bool):
        return False
    if _SECRET_KEY.search(key.lower().replace("-", "_")):
        return True
    if isinstance(value, list):
        return any(is_secret_key(key, item) for item in value)
    if not isinstance(value, str):
        return False
    return bool(_SECRET_VALUE.search(value) or _PASSWORD_IN_URL.search(value))


_set_here: set[str] = set()  # variables that `set_secrets` has set in this process


def set_secrets(variables: Mapping[str, str]) -> None:
    """Put variables of an `env_file` into the environment of this process and those that it starts.
    A variable that is there already keeps its value.
    """
    for name, value in variables.items():
        if name not in os.environ:
            os.environ[name] = value
            _set_here.add(name)
    os.environ[LISTED] = ",".join(dict.fromkeys([*listed(), *variables]))


def environment_without_secrets() -> dict[str, str]:
    """Return this process's environment without what `set_secrets` has set."""
    return {name: value for name, value in os.environ.items() if name not in _set_here}
