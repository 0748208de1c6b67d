"""Your loss. In a TOML: `loss = "my_loss:my_loss"`; in a script: `RLTrainer(loss_fn=my_loss)`.

docs/losses.md says which inputs there are, and who divides by what.
"""

from verifiers_rl import LossInputs, LossOutputs


def my_loss(inputs: LossInputs, max_ratio: float = 2.0) -> LossOutputs:
    """Policy gradient with a capped importance ratio.

    L = - sum_t w_t * stop_gradient(min(r_t, max_ratio)) * A_t * logprob_t, r_t = trainer's
    probability of the token over the server's. A loss returns a sum; the trainer divides it.

    Args:
        inputs: the loss tokens of one microbatch; its tensors are (N,).
        max_ratio: `loss_args = { max_ratio = 4.0 }` in a TOML changes it.
    """
    ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).detach().exp()
    weight = inputs.weights * ratio.clamp(max=max_ratio)
    per_token = -weight * inputs.advantages * inputs.trainer_logprobs
    # What is in the second argument is logged: its mean over the tokens, and for no gradient.
    return LossOutputs(per_token.sum(), {"capped_share": (ratio > max_ratio).float()})
