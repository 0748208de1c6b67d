"""The task of rl.toml, as a script that imports RLTrainer. Make the model first:

    python examples/warm_start.py examples/reverse_text/reverse_text.py \\
        examples/reverse_text/outputs/warm_start
    vf-rl examples/reverse_text/train.py

`vf-rl` also starts a server; `python` in its place waits for one that you start.
"""

from pathlib import Path
from typing import Any

from reverse_text import ReverseTextConfig, ReverseTextTaskset

from verifiers_rl import RLConfig, RLTrainer

HERE = Path(__file__).parent


def make_taskset() -> ReverseTextTaskset:
    """Make the taskset for training; evaluations use its `eval_taskset`."""

    def make(**options: Any) -> ReverseTextTaskset:
        # An empty instruction: the tiny model knows one task only.
        config = ReverseTextConfig(id="reverse_text", instruction="", **options)
        return ReverseTextTaskset(config)

    taskset = make()
    taskset.eval_taskset = make(held_out=True, num_tasks=256)
    return taskset


def main() -> None:
    args = RLConfig(
        run_name="reverse_text",
        output_dir=str(HERE / "outputs" / "train"),
        max_steps=200,
        batch_size=128,
        micro_batch_size=128,
        max_seq_len=64,
        max_tokens=16,
        temperature=1.0,
        learning_rate=1e-3,
        logging_steps=10,
        save_strategy="no",
        overwrite_output_dir=True,
    )
    model = str(HERE / "outputs" / "warm_start")
    trainer = RLTrainer(model=model, env=make_taskset(), args=args)
    print(trainer.evaluate())
    trainer.train()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
