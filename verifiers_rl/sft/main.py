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
from typing import Any

from pydantic import Field, model_validator

from verifiers_rl.cli.config import Table, TrainConfig, wrong
from verifiers_rl.cli.plan import assign_gpus
from verifiers_rl.cli.train import main as main_of
from verifiers_rl.option_rules import Text, Texts
from verifiers_rl.sft.conversations import is_file, read_dataset


class DataTable(Table):
    """[data]: where the rows are. `eval_split` is None where the TOML leaves it out: all rows of a
    file, and "test" on the hub.
    """

    train: Texts = Field(default_factory=list)
    eval: Texts = Field(default_factory=list)
    split: Text = "train"
    eval_split: Text | None = None
    subset: Text | None = None

    @model_validator(mode="after")
    def check_together(self) -> DataTable:
        if not self.train:
            raise wrong("is missing; set it to a .jsonl file, or to a name on the hub", "train")
        if self.subset and all(map(is_file, [*self.train, *self.eval])):
            raise wrong("without effect, because files have no subsets; remove it", "subset")
        return self


class SFTRunConfig(TrainConfig):
    """The TOML of `vf-sft`. Paths in `data` are absolute."""

    PROGRAM = "vf-sft"
    MODULE = "verifiers_rl.sft.main"
    TRAINER, CONFIG = "verifiers_rl.sft:SFTTrainer", "verifiers_rl.sft.config:SFTConfig"

    data: DataTable = Field(default_factory=dict, validate_default=True)

    @model_validator(mode="after")
    def check_together(self) -> SFTRunConfig:
        data = self.data
        evaluates = self.trainer.args.get("eval_strategy", "no") != "no"
        if (data.eval or data.eval_split) and not evaluates:
            raise wrong(
                "has held-out rows, and there are no evaluations: set eval_strategy = "
                '"steps" and eval_steps in [trainer.args]',
                "data",
            )
        return self

    def resolve(self, checks_model: bool) -> None:
        """Make paths absolute, also those of the data."""
        super().resolve(checks_model)
        data, table = self.data, self.layers.tree["data"]
        for name in table.keys() & {"train", "eval"}:
            names = [
                str(self.layers.beside(one, ("data", name))) if is_file(one) else one
                for one in getattr(data, name)
            ]
            setattr(data, name, names)
            table[name] = names
        if data.eval_split and not data.eval:
            data.eval = data.train

    def prepare(self) -> None:
        """Show this process its GPUs, before torch sees them.

        Raises:
            TomlError: there are fewer.
        """
        if "LOCAL_RANK" not in os.environ:
            os.environ["CUDA_VISIBLE_DEVICES"] = assign_gpus(self, [])["trainer"]

    def make_trainer(self, args: Any) -> Any:
        """Read the data and make the trainer."""
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
