"""The same run as rl.toml, as a script that imports RLTrainer. Start a server first:

    vf-vllm --model examples/reverse_text/outputs/warm_start --dtype float32 --enforce-eager \\
        --max-model-len 64 --enable-lora --max-lora-rank 16
    python examples/reverse_text/train.py

With several GPUs: `accelerate launch examples/reverse_text/train.py`.
"""

from pathlib import Path

from reverse_text import load_environment

from verifiers_rl import RLConfig, RLTrainer

HERE = Path(__file__).parent


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
    )
    model = str(HERE / "outputs" / "warm_start")
    trainer = RLTrainer(model=model, env=load_environment(instruction=""), args=args)
    print(trainer.evaluate())
    trainer.train()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
