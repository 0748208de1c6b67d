"""The run of a TOML as a script. `vf-train @ rl.toml` does the same; here you can pass what a TOML
cannot name: callbacks, an optimizer, an environment that you made, parts of your own.

    vf-rl examples/train.py examples/alphabet_sort/rl.toml

`vf-rl` also starts a server, on the device of the machine. [inference.args] has no effect on it;
with such flags start `vf-vllm --model MODEL`, and this script with `python`.
"""

import argparse
from pathlib import Path

from verifiers_rl import RLConfig, RLTrainer
from verifiers_rl.cli.config import load_run_config


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).with_name("rl.toml")
    parser.add_argument("toml", type=Path, nargs="?", default=here, help="default: rl.toml here")
    config = load_run_config(parser.parse_args().toml)
    args = RLConfig(**{"use_cpu": config.trainer.gpus == 0, **config.trainer.args})
    # env: an object of yours is as good, such as MyTaskset(MyConfig(id="my_env")).
    # More arguments: loss_fn, advantage_fn, and those of transformers.Trainer, such as callbacks.
    trainer = RLTrainer(model=config.model, env=config.load_envs(), args=args)
    trainer.train()


if __name__ == "__main__":  # a process that runs the environment imports the lines above
    main()
