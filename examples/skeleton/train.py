"""The run of rl.toml as a script, with the loss of my_loss.py. README.md has the commands."""

from pathlib import Path
from typing import Any

from my_env import MyConfig, MyTaskset
from my_loss import my_loss

from verifiers_rl import RLConfig, RLTrainer

HERE = Path(__file__).parent


def make_taskset() -> MyTaskset:
    """Make the taskset for training; evaluations use its `eval_taskset`."""

    def make(**options: Any) -> MyTaskset:
        # An empty instruction: the tiny model knows one task only.
        return MyTaskset(MyConfig(id="my_env", instruction="", **options))

    taskset = make()
    taskset.eval_taskset = make(held_out=True, num_tasks=256)
    return taskset


def main() -> None:
    args = RLConfig(
        run_name="my_env",
        output_dir=str(HERE / "outputs" / "train"),
        max_steps=60,
        batch_size=128,
        micro_batch_size=128,
        max_seq_len=64,
        max_tokens=16,
        temperature=1.0,
        learning_rate=1e-3,
        warmup_steps=10,
        lr_scheduler_type="constant_with_warmup",
        logging_steps=10,
        save_strategy="no",
        overwrite_output_dir=True,
    )
    model = str(HERE / "outputs" / "warm_start")
    trainer = RLTrainer(model, make_taskset(), args, loss_fn=my_loss)
    print(trainer.evaluate())
    trainer.train()
    print(trainer.evaluate())


if __name__ == "__main__":  # a process that runs the environment imports the lines above
    main()
