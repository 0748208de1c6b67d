"""`vf-sft @ sft.toml`: supervised finetuning on a dataset. The model that it saves is the `model`
of a run of `vf-rl`.

It takes several files and keys of the command line, as `vf-rl` does. The TOML is as that of vf-rl,
without [inference], and with a table of its own:

model = "Qwen/Qwen3-0.6B"

[data]
train = "data.jsonl"             # .jsonl, .json or .parquet, or a name on the hub, or a list of
                                 # such; a path is relative to this file
eval = "held_out.jsonl"          # rows whose loss is taken and that are not trained on
split = "train"                  # of the data in `train`, such as "train[:90%]"; a file has the
                                 # split train alone
eval_split = "train[90%:]"       # of the data in `eval`; without `eval`, of that in `train`
subset = "main"                  # of data on the hub that have several

[trainer]
gpus = 1                         # 0: CPU; above 1 one process for each
[trainer.args]                   # fields of SFTConfig
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from verifiers_rl.cli.config import (
    RunConfig,
    TomlError,
    folder_words,
)
from verifiers_rl.cli.train import main as main_of
from verifiers_rl.sft.conversations import DatasetError, is_file, parts_of_file

_Text = Annotated[str, Field(min_length=1)]
_Names = Annotated[
    list[_Text], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]


@dataclass
class DataTable:
    """[data]: where the rows are. Paths are absolute. `eval_split` is None where the TOML leaves it
    out: all rows of a file, and "test" on the hub.
    """

    train: _Names = field(default_factory=list)
    eval: _Names = field(default_factory=list)
    split: _Text = "train"
    eval_split: _Text | None = None
    subset: _Text | None = None


@dataclass
class SFTRunConfig(RunConfig):
    """A checked configuration of `vf-sft`."""

    PROGRAM = "vf-sft"
    TABLES = ("model", "env", "env_file", "import_from", "data", "trainer")
    NEEDS_ENV = False

    data: DataTable = field(default_factory=DataTable)

    def default_trainer_class(self) -> Any:
        from verifiers_rl.sft import SFTTrainer

        return SFTTrainer

    def default_config_class(self) -> Any:
        from verifiers_rl.sft.config import SFTConfig

        return SFTConfig

    def check_own(self) -> None:
        """Fill in `data`.

        Raises:
            TomlError: a key of [data] is unknown or has a wrong value, or `train` is missing.
        """
        self.data = self.read_table(("data",), DataTable)
        for name in ("train", "eval"):
            folder, names = self.folder_of("data", name), getattr(self.data, name)
            setattr(self.data, name, [_as_path(one, folder) for one in names])
        if not self.data.train:
            raise TomlError(
                f"{self.source('data')}: [data] train is missing; set it to a .jsonl file, or to "
                "a name on the hub"
            )
        data = self.data
        if data.eval_split and not data.eval:
            data.eval = data.train
        if data.subset and all(map(is_file, [*data.train, *data.eval])):
            raise self.error(
                ("data", "subset"), "without effect, because files have no subsets; remove it"
            )
        evaluates = self.trainer_args.get("eval_strategy", "no") != "no"
        for name, has_some in (("env", self.envs), ("data", self.data.eval)):
            if has_some and not evaluates:
                raise TomlError(
                    f"{self.source(name)}: [{name}] is there for evaluations, and there are none: "
                    'set eval_strategy = "steps" and eval_steps in [trainer.args]'
                )

    def check_files(self) -> None:
        """Raise TomlError if a file of the data is not there or lacks the split."""
        splits = {"train": self.data.split, "eval": self.data.eval_split}
        for name, split in splits.items():
            for path in filter(is_file, getattr(self.data, name)):
                if not Path(path).is_file():
                    raise TomlError(
                        f"{self.place('data', name)} {name}: there is no file {path}; correct the "
                        "path, which is relative to what names it"
                    )
                try:
                    parts_of_file(path, split, 100)
                except DatasetError as error:
                    raise TomlError(f"{self.source('data')}: [data] {error}") from error

    def resolved_tables(self) -> dict[str, Any]:
        table = {f.name: getattr(self.data, f.name) for f in fields(DataTable)}
        if not self.data.eval:
            table = {k: v for k, v in table.items() if not k.startswith("eval")}
        return {"data": table}

    def prepare(self) -> None:
        """Show this process its GPUs, before torch sees them."""
        self.check_files()
        if "LOCAL_RANK" in os.environ:
            return
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        ids = [str(i) for i in range(self.trainer_gpus)]
        if visible is not None:
            ids = [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
            if len(ids) < self.trainer_gpus:
                raise TomlError(
                    f"{self.source('trainer', 'gpus')}: trainer.gpus={self.trainer_gpus}, and "
                    f"{len(ids)} are visible; lower it, or set it to 0 to run on the CPU"
                )
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids[: self.trainer_gpus])

    def launch(self, options: argparse.Namespace) -> None:
        """Become torch's launcher of a rank for each GPU."""
        from verifiers_rl.cli.ending import SAVE_GRACE_S
        from verifiers_rl.cli.plan import launcher_command

        command = [sys.executable, *launcher_command(self.trainer_gpus)]
        command += ["-m", "verifiers_rl.sft.main"]
        # A launcher of several ranks kills them after this time, by default 30 s.
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(round(SAVE_GRACE_S)))
        sys.stdout.flush()
        os.execv(command[0], [*command, *self.words, *folder_words(options)])

    def make_trainer(self, args: Any) -> Any:
        """Read the data and make the trainer."""
        from verifiers_rl.sft.conversations import read_dataset

        data, train, held_out = self.data, None, None
        if args.process_index == 0:  # which has the data
            train = read_dataset(data.train, data.split, data.subset)
            if data.eval:
                held_out = read_dataset(data.eval, data.eval_split, data.subset)
        elif data.eval:
            held_out = []
        env = self.load_envs() if self.envs else None
        return self.trainer_class()(self.model, args, train, held_out, env=env)


def _as_path(name: str, folder: Path) -> str:
    """Return the absolute path of a file, which is relative to this folder; a name on the hub as it
    is.
    """
    path = os.path.normpath(folder / Path(name).expanduser())
    return path if is_file(name) else name


def main() -> None:
    main_of("vf-sft", SFTRunConfig)


if __name__ == "__main__":
    main()
