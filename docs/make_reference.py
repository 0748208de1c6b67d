"""Write reference.md from the fields of `RLConfig` and from the description of vf-rl's TOML.

    python docs/make_reference.py       # or: make reference

`tests/test_docs.py` fails if the page is stale.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import re
import typing
from dataclasses import MISSING, Field, fields
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import verifiers_rl  # noqa: F401 (before transformers: see its torchvision_operators.py)

# isort: split
import transformers
from pydantic import AfterValidator, GetPydanticSchema
from pydantic.fields import FieldInfo
from transformers import TrainingArguments

from verifiers_rl import RLConfig, config
from verifiers_rl.cli import config as cli_config
from verifiers_rl.cli import flat
from verifiers_rl.distill import Distillation, Teacher
from verifiers_rl.sft import SFTConfig
from verifiers_rl.sft import main as cli_sft

PAGE = Path(__file__).parent / "reference.md"
HEAD = """# Reference

All options of a run. `docs/make_reference.py` writes this page from the code; do not edit it.

- In a script, an option is an argument: `RLConfig(batch_size=128)`.
- In a TOML, it is a key under `[trainer.args]`: `batch_size = 128`.
- On a command line, it is `--trainer.args.batch_size 128` for `vf-rl` and `vf-train`.
  [configuration.md](configuration.md) has the rules.

An unknown name, a value of the wrong type or out of range, and two options that contradict each
other are one error line each, with the value and the fix. "left out" stands for the default `None`:
TOML has no such value.
"""
SFT = """
## Supervised finetuning

`SFTConfig` and `vf-sft` have these options of their own, or with other defaults. The rest is as in
the tables above. [sft.md](sft.md) says what they do together.

"""
SFT_DATA = """
`vf-sft` has a table of its own beside those of `vf-rl`, and no `[env]`, `[inference]`
or `[cluster]`:

"""
SFT_REFUSED = """
These options are refused there, because they have no effect:

"""
INHERITED = """
## Inherited from transformers.TrainingArguments

These keep their meaning and their defaults. The documentation of transformers describes them. The
list is that of transformers {version}; other versions have a few options more or less.
"""
REFUSED = """
## Refused

`RLTrainer` cannot honour these options of `TrainingArguments`. Setting one is an error that says
what to use.
"""
TOML = """
## The TOML of vf-rl and vf-train

"""
FLAT = """
## The flat layout

The keys that prime-rl's and hosted training's users have, and what they set here.
[configuration.md](configuration.md#two-layouts) shows both layouts beside each other. `model`,
`[env]`, `[[env]]`, `[[teacher]]`, `env_file` and `import_from` are the same in both. A default that
a file leaves out is ours.

"""
# Values of which each rule refuses at least one, so that it says what it wants.
PROBES = ("", "?", "a/b:c:", -3, ["?"])


def sections() -> dict[str, list[str]]:
    """Return the names of `RLConfig`'s own fields, by the section comments of config.py."""
    lines = inspect.getsource(RLConfig).splitlines()
    (tree,) = ast.parse("\n".join(lines)).body
    starts = {
        number: found.group(1)
        for number, line in enumerate(lines, 1)
        if (found := re.match(r"    # --- (.+?) -+$", line))
    }
    found: dict[str, list[str]] = {title: [] for title in starts.values()}
    for node in tree.body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            title = starts[max(number for number in starts if number < node.lineno)]
            found[title].append(node.target.id)
    return {title: names for title, names in found.items() if names}


def helps(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a config class."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    return {
        ast.unparse(one.target): ast.literal_eval(below.value)
        for one, below in itertools.pairwise(tree.body)  # type: ignore[attr-defined]
        if isinstance(one, ast.AnnAssign) and isinstance(below, ast.Expr)
    }


def type_of(kind: Any) -> str:
    """Describe the values that a field takes: by its rules, else by its type."""
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Annotated:
        text, bounds = type_of(inner[0]), []
        for rule in inner[1:]:
            if isinstance(rule, GetPydanticSchema):  # of `checked_as`
                optional = ", or left out" if NoneType in typing.get_args(inner[0]) else ""
                text = (
                    type_of(rule.__get_pydantic_core_schema__(None, lambda checked: checked))
                    + optional
                )
            elif isinstance(rule, AfterValidator):
                text = _rule_text(rule) + (", or left out" if "left out" in text else "")
            for bound in getattr(rule, "metadata", ()):
                for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
                    if hasattr(bound, name):
                        bounds.append(f"{sign} {getattr(bound, name)}")
        return f"{text} {' and '.join(bounds)}".strip()
    if typing.get_origin(kind) in (typing.Union, UnionType):
        parts = [type_of(part) for part in inner if part is not NoneType]
        if any(isinstance(part, type) and issubclass(part, Enum) for part in inner):
            parts = [type_of(next(part for part in inner if part is not str))]
        text = " or ".join(parts)
        return f"{text}, or left out" if NoneType in inner else text
    if typing.get_origin(kind) is typing.Literal:
        return f"{'one of ' * (len(inner) > 1)}{', '.join(map(str, inner))}"
    match typing.get_origin(kind) or kind:
        case builtins.list:
            return "a list of strings"
        case builtins.dict:
            return "a table (a dict in Python)"
    plain = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    return plain.get(kind) or "the name of a schedule"


def _rule_text(rule: AfterValidator) -> str:
    """Return what a rule says about a value that it refuses."""
    for probe in PROBES:
        try:
            typing.cast(Any, rule.func)(probe)
        except ValueError as error:
            return str(error).removeprefix("must ").removeprefix("be ").removeprefix("name ")
        except (TypeError, AttributeError):
            continue  # a rule for values of another type
    raise ValueError(f"no value in PROBES is refused by {rule}")


def default_of(option: Field[Any] | FieldInfo) -> str:
    if isinstance(option, FieldInfo):
        value = option.get_default(call_default_factory=True)
    elif option.default_factory is not MISSING:
        value = option.default_factory()
    else:
        value = option.default
    if value is None:
        return "left out"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if hasattr(value, "value"):  # of an enum
        value = value.value
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines) + "\n"


def own_options() -> str:
    declared = typing.get_type_hints(RLConfig, include_extras=True)
    options = {option.name: option for option in fields(RLConfig)}
    text, described = "", helps(RLConfig)
    for title, names in sections().items():
        rows = [
            (
                f"`{name}`",
                type_of(declared[name]),
                default_of(options[name]),
                described[name],
            )
            for name in names
        ]
        text += f"\n## {title}\n\n" + table(("option", "values", "default", "what it does"), rows)
    return text


def sft_options() -> str:
    """Return tables of the options of `SFTConfig`, of [data], and of what is refused there."""
    declared = typing.get_type_hints(SFTConfig, include_extras=True)
    options = {option.name: option for option in fields(SFTConfig)}
    rows = [
        (f"`{name}`", type_of(declared[name]), default_of(options[name]), text)
        for name, text in helps(SFTConfig).items()
    ]
    text = SFT + table(("option", "values", "default", "what it does"), rows)
    _, _, description = inspect.cleandoc(cli_sft.__doc__ or "").partition("[data]\n")
    data = f"[data]\n{description.partition('[trainer]')[0].strip()}"
    text += f"{SFT_DATA}```toml\n{data}\n```\n"
    own = {k: v for k, v in SFTConfig.UNUSED.items() if k not in RLConfig.UNUSED}
    return text + SFT_REFUSED + table(("option", "why"), [(f"`{k}`", v) for k, v in own.items()])


def inherited_options() -> str:
    own = {name for names in sections().values() for name in names}
    rows = [
        (f"`{option.name}`", default_of(option))
        for option in fields(TrainingArguments)
        if option.init and option.name not in own | config._UNUSED_BASE_OPTIONS.keys()
    ]
    head = INHERITED.format(version=transformers.__version__)
    return head + "\n" + table(("option", "default"), sorted(rows))


def refused_options() -> str:
    known = {option.name for option in fields(TrainingArguments)}
    rows = [(f"`{k}`", v) for k, v in config._UNUSED_BASE_OPTIONS.items() if k in known]
    return REFUSED + "\n" + table(("option", "instead"), rows)


def toml_keys() -> str:
    """Return the TOML as cli/config.py describes it, and a table of its keys."""
    first, _, description = inspect.cleandoc(cli_config.__doc__ or "").partition("\n\n")
    defaults = _toml_defaults()
    rows = []
    for (where, name), help in _described_keys(description).items():
        key = " ".join([f"`[{where}]`"] * bool(where) + [f"`{name}`"] * bool(name))
        rows.append((key, defaults.get((where, name), ""), help))
    block = f"{first}\n\n```toml\n{description.strip()}\n```\n\n"
    return TOML + block + table(("key", "default", "what it is"), rows)


def _toml_defaults() -> dict[tuple[str, str], str]:
    env = cli_config.EnvTable.model_fields
    learning = {option.name: option for option in fields(Distillation)}
    teacher = {option.name: option for option in fields(Teacher)}
    return {
        ("", "model"): "required",
        ("", "env_file"): "none",
        ("", "import_from"): "none",
        ("env.taskset", "id"): "required",
        ("env", "id"): "required",
        ("[env]", "name"): "its `id`",
        ("[env]", "weight"): default_of(env["weight"]),
        ("[env]", "sampling"): default_of(env["sampling"]),
        ("[env]", "only"): "for both",
        ("[env]", "eval_examples"): "`eval_examples` of the run",
        ("[env]", "algorithm"): '`"rl"`',
        ("[env]", "teacher"): "none",
        ("[env]", "distill_coef"): default_of(learning["distill_coef"]),
        ("[teacher]", "name"): "required",
        ("[teacher]", "model"): "required",
        ("[teacher]", "gpus"): "`1`; 0 where all is on the CPU",
        ("[teacher]", "key_variable"): "none",
        ("[teacher]", "timeout_s"): f"{default_of(teacher['timeout_s'])}; with gpus, "
        "`vllm_server_timeout`",
        ("[teacher]", "max_concurrent"): default_of(teacher["max_concurrent"]),
        # See cli/gpus.py.
        **dict.fromkeys((("inference", "gpus"), ("trainer", "gpus")), "`1` where there is a GPU"),
        ("trainer", "class"): '`"verifiers_rl:RLTrainer"`',
    }


def _described_keys(description: str) -> dict[tuple[str, str], str]:
    """Return the comment of each (table, key), and of each table under an empty key."""
    where, last = "", ("", "")
    found: dict[tuple[str, str], str] = {}
    for line in description.splitlines():
        code, _, comment = (part.strip() for part in line.partition("#"))
        inside = re.match(r"(\w+) = .+?  +(.+)", comment)  # a key that is a comment itself
        if header := re.match(r"\[(\[?[\w.]+\]?)\]", code):
            where = header.group(1)
            last = (where, "")
        elif key := re.match(r"(\w+) *=", code):
            last = (where, key.group(1))
        elif "[[env]]" in comment:
            where, last = "[env]", ("[env]", "")
        elif inside:
            last, comment = (where, inside.group(1)), inside.group(2)
        found[last] = f"{found.get(last, '')} {comment}".strip()
    return {key: comment for key, comment in found.items() if comment or key[1]}


def flat_keys() -> str:
    """Return a table of the flat layout's keys and what they set."""
    rows = [(_flat(key), f"`[trainer.args]` `{option}`") for key, option in flat.MOVED.items()]
    rows += [(_flat(key), meaning) for key, meaning in flat.MEANINGS.items()]
    return FLAT + table(("flat key", "what it sets or means here"), rows)


def _flat(key: str) -> str:
    where, _, name = key.rpartition(".")
    if any(other.startswith(f"{key}.") for other in flat.MOVED):
        return f"`[{key}]`"
    return f"`[{where}]` `{name}`" if where else f"`{name}`"


def page() -> str:
    toml = sft_options() + toml_keys() + flat_keys()
    return HEAD + own_options() + toml + refused_options() + inherited_options()


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
