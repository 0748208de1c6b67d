"""Supervised finetuning, before or in place of reinforcement learning.

trainer.py        `SFTTrainer`: `RLTrainer`'s own step on batches of a dataset
config.py         `SFTConfig`: its options
conversations.py  rows of a dataset to tokens and loss masks
main.py           `vf-sft @ sft.toml`
generate.py       `vf-rl generate @ config.toml`: rollouts as such rows
"""

from typing import TYPE_CHECKING

from verifiers_rl.lazy import load_on_first_use

if TYPE_CHECKING:
    from verifiers_rl.sft.config import SFTConfig as SFTConfig
    from verifiers_rl.sft.trainer import SFTTrainer as SFTTrainer

HOME = {"SFTConfig": "config", "SFTTrainer": "trainer"}
__getattr__, __dir__ = load_on_first_use(__name__, HOME)
