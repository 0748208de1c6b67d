from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers import make_tiny_model, make_tiny_moe
from tests.reference import reference_policy
from verifiers_rl import RLConfig
from verifiers_rl.inference import InferenceServerError
from verifiers_rl.router_replay import replay_experts
from verifiers_rl.sync.agreement import (
    NUM_TOKENS,
    PROMPT,
    check_agreement,
    logprobs_of_sample,
    prompt_of,
)
from verifiers_rl.types import Sample


class StubServer:
    """Answers /v1/completions with any tokens, and their logprobs in float64 by its own model."""

    base_url = "http://gpu-box:8000"

    def __init__(self, model, dtype, noise, quantization):
        self.model, self.noise = model, noise
        self.kind = {"dtype": dtype, "quantization": quantization}

    def status(self):
        return self.kind

    def post(self, path, body, timeout_s):
        assert path == "/v1/completions"
        self.body, prompt = body, body["prompt"]
        generator = torch.Generator().manual_seed(0)
        new = torch.randint(256, (body["max_tokens"],), generator=generator)
        policy = reference_policy(self.model, [*prompt, *new.tolist()], body["temperature"])
        logprobs = policy[len(prompt) - 1 : -1].gather(1, new[:, None])[:, 0]
        logprobs += self.noise * torch.randn(len(new), generator=generator)
        choice = {"token_ids": new.tolist(), "logprobs": {"token_logprobs": logprobs.tolist()}}
        reply = {"choices": [choice]}
        request = SimpleNamespace(answer=lambda: reply)
        return SimpleNamespace(begin=lambda: request)


def args_with(**options):
    return RLConfig(use_cpu=True, **{"max_seq_len": 64, **options})


def compare(
    tokenizer, model=None, of_server=None, dtype="float32", noise=0.0, quantization=None, **options
):
    """Compare a trainer's model with a server's; return what the server was asked."""
    server = StubServer((of_server or make_tiny_model()).double(), dtype, noise, quantization)
    check_agreement(model or make_tiny_model(), server, "policy", tokenizer, args_with(**options))
    return server.body


def test_the_server_that_has_the_trained_model_agrees(tokenizer):
    model = make_tiny_model()
    model.train()
    body = compare(tokenizer, model, temperature=0.7)
    assert body["model"] == "policy" and body["temperature"] == 0.7
    assert tokenizer.decode(body["prompt"]) == PROMPT and body["max_tokens"] == NUM_TOKENS
    assert model.training
    body = compare(tokenizer, max_seq_len=10)
    assert (len(body["prompt"]), body["max_tokens"]) == (5, 5)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8_per_tensor"])
def test_a_server_with_other_weights_of_the_same_shapes_is_refused(tokenizer, kind):
    other = make_tiny_model(seed=1)
    other.lm_head.weight.data.mul_(20)  # of new models all logprobs are nearly the same
    message = r"gpu-box:8000 samples from a different model .*: [\d.]+ nats apart .*" + kind
    dtype, quantization = ("bfloat16", kind) if "fp8" in kind else (kind, None)
    with pytest.raises(InferenceServerError, match=message):
        compare(tokenizer, None, other, dtype, quantization=quantization)


BFLOAT16, FP8 = {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "fp8_per_tensor"}


# A noise of 0.8 is 0.6 nats on average, as far off as servers in fp8 were.
@pytest.mark.parametrize(
    "noise, kind, exacter", [(0.02, BFLOAT16, {}), (0.2, BFLOAT16, {}), (0.8, FP8, BFLOAT16)]
)
def test_rounding_is_no_other_model(tokenizer, noise, kind, exacter):
    compare(tokenizer, noise=noise, **kind)
    with pytest.raises(InferenceServerError):
        compare(tokenizer, noise=noise, **exacter)


def test_logprobs_that_are_nan_are_another_model(tokenizer):
    model = make_tiny_model()
    model.lm_head.weight.data[0, 0] = torch.nan
    with pytest.raises(InferenceServerError, match="nan nats apart"):
        compare(tokenizer, model, dtype="bfloat16")


def test_a_tokenizer_without_the_prompts_letters_has_a_prompt_too(tokenizer, monkeypatch):
    monkeypatch.setattr("verifiers_rl.sync.agreement.PROMPT", "")
    assert prompt_of(tokenizer) == [0, 1, 2, 3]


IDS = [3, 14, 15, 92, 65, 35]
LOSS = [0, 0, 1, 1, 0, 1]


def logprobs_of(model, args, **extras):
    sample = Sample(IDS, LOSS, [0.0] * 6, np.where(LOSS, 0, -1), extras=extras)
    return logprobs_of_sample(model, sample, args)


def test_logprobs_of_a_sample_are_taken_at_the_temperature_over_the_mask():
    model, args = make_tiny_model(), args_with(temperature=0.7)
    policy = reference_policy(model, IDS, 0.7).detach()
    expected = [policy[at - 1, IDS[at]] for at in (2, 3, 5)]
    np.testing.assert_allclose(logprobs_of(model, args), expected, atol=1e-5)
    mask = np.full((6, 3), -1, np.int32)
    mask[2, :2], mask[5] = [IDS[2], 8], [1, IDS[5], 2]
    expected[0] = policy[1, mask[2, :2]].log_softmax(-1)[0]
    expected[2] = policy[4, mask[5]].log_softmax(-1)[1]
    found = logprobs_of(model, args, allowed_tokens=mask)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_logprobs_of_a_sample_use_the_experts_of_the_server_and_no_others():
    model, args = make_tiny_moe(), args_with(router_replay=True)
    own = logprobs_of(model, args)
    chosen = np.tile(np.array([0, 1], np.int16), (len(IDS), 2, 1))
    assert np.abs(own - logprobs_of(model, args, routed_experts=chosen)).max() > 1e-3
    replay_experts(model, torch.tensor([0, 1]).expand(1, 40, 2, 2))  # of the last microbatch
    np.testing.assert_array_equal(own, logprobs_of(model, args))


def test_logprobs_of_a_sample_round_as_the_trainer_does():
    model, half = make_tiny_model(), args_with(bf16=True)
    exact, rounded = logprobs_of(model, args_with()), logprobs_of(model, half)
    half.head_dtype = "float32"
    assert np.abs(exact - rounded).max() > 1e-4
    assert 0 < np.abs(rounded - logprobs_of(model, half)).max() < 0.1
