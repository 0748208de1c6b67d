"""Train with a loss of your own: REINFORCE with the group baseline, without any importance ratio.

The script runs like examples/reverse_text/train.py, with the same model:

    vf-rl examples/custom_loss.py [--steps 100]
"""

import argparse
import sys
from pathlib import Path

from verifiers_rl import LossInputs, LossOutputs, RLConfig, RLTrainer

EXAMPLE = Path(__file__).parent / "reverse_text"
sys.path.insert(0, str(EXAMPLE))


def reinforce(inputs: LossInputs) -> LossOutputs:
    """L = - sum_t w_t * A_t * logprob_t (Williams, 1992).

    A loss returns a sum; the trainer divides it.
    """
    per_token = -inputs.weights * inputs.advantages * inputs.trainer_logprobs
    return LossOutputs(per_token.sum(), {"abs_loss": per_token.detach().abs()})


def main() -> None:
    from train import make_taskset

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--output-dir", default=str(EXAMPLE / "outputs" / "custom_loss"))
    options = parser.parse_args()
    args = RLConfig(
        output_dir=options.output_dir,
        vllm_server_port=options.port,
        max_steps=options.steps,
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
    model = str(EXAMPLE / "outputs" / "warm_start")
    trainer = RLTrainer(model, make_taskset(), args, loss_fn=reinforce)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    print(f"held-out reward {before['eval_reward']:.3f} -> {after['eval_reward']:.3f}")


if __name__ == "__main__":
    main()
