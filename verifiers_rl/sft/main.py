"""`vf-sft @ sft.toml`: supervised finetuning on a dataset. The model that it saves is the `model`
of a run of `vf-rl`.

It takes several files and keys of the command line, as `vf-rl` does. The TOML is as that of vf-rl,
without [env] and [inference], and with a table of its own:

model = "Qwen/Qwen3-0.6B"

[data]
train = "data.jsonl"             # .jsonl or .parquet, or a name on the hub, or a list of such; a
                                 # path is relative to this file
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

import os
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from verifiers_rl.cli.config import RunConfig, TomlError
from verifiers_rl.cli.train import main as main_of
from verifiers_rl.sft.conversations import is_file

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
    MODULE = "verifiers_rl.sft.main"
    TRAINER, CONFIG = "verifiers_rl.sft:SFTTrainer", "verifiers_rl.sft.config:SFTConfig"
    TABLES = ("model", "import_from", "data", "trainer")
    NEEDS_ENV = False

    data: DataTable = field(default_factory=DataTable)

    def check_own(self) -> None:
        """Fill in `data`.

        Raises:
            TomlError: a key of [data] is unknown or has a wrong value, or `train` is missing.
        """
        self.data = data = self.read_table(("data",), DataTable)
        for name in ("train", "eval"):
            paths = [
                str(self.beside(one, "data", name)) if is_file(one) else one
                for one in getattr(data, name)
            ]
            setattr(data, name, paths)
        if not data.train:
            raise TomlError(
                f"{self.source('data')}: [data] train is missing; set it to a .jsonl file, or to "
                "a name on the hub"
            )
        if data.eval_split and not data.eval:
            data.eval = data.train
        if data.subset and all(map(is_file, [*data.train, *data.eval])):
            raise self.error(
                ("data", "subset"), "without effect, because files have no subsets; remove it"
            )
        if data.eval and self.trainer_args.get("eval_strategy", "no") == "no":
            raise TomlError(
                f"{self.source('data')}: [data] has held-out rows, and there are no evaluations: "
                'set eval_strategy = "steps" and eval_steps in [trainer.args]'
            )
        self.tree["data"] = vars(data)

    def prepare(self) -> None:
        """Show this process its GPUs, before torch sees them.

        Raises:
            TomlError: a file of the data is not there, or there are fewer GPUs.
        """
        for name in ("train", "eval"):
            for path in filter(is_file, getattr(self.data, name)):
                if not os.path.isfile(path):
                    raise TomlError(
                        f"{self.place('data', name)} {name}: there is no file {path}; correct the "
                        "path, which is relative to what names it"
                    )
        if "LOCAL_RANK" in os.environ:
            return
        from verifiers_rl.cli.plan import assign_gpus

        os.environ["CUDA_VISIBLE_DEVICES"] = assign_gpus(self, [])["trainer"]

    def make_trainer(self, args: Any) -> Any:
        """Read the data and make the trainer."""
        from verifiers_rl.sft.conversations import read_dataset

        data, train = self.data, []
        held_out: Any = [] if data.eval else None
        if args.process_index == 0:  # which has the data
            train = read_dataset(data.train, data.split, data.subset)
            if data.eval:
                held_out = read_dataset(data.eval, data.eval_split, data.subset)
        return self.trainer_class()(self.model, args, train, held_out)


def main() -> None:
    main_of("vf-sft", SFTRunConfig)


if __name__ == "__main__":
    main()
