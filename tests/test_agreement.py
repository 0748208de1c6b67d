from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers import make_tiny_model, make_tiny_moe
from tests.reference import reference_policy
from verifiers_rl import RLConfig
from verifiers_rl.inference.client import InferenceServerError
from verifiers_rl.router_replay import replay_experts
from verifiers_rl.sync.agreement import (
    NUM_TOKENS,
    PROMPT,
    check_agreement,
    logprobs_of_samples,
    prompt_of,
)
from verifiers_rl.types import Sample


class StubServer:
    """Answers /v1/completions from a model of its own; logprobs are those of float64 loops."""

    base_url = "http://gpu-box:8000"

    def __init__(self, model, dtype="float32", noise=0.0):
        self.model, self.dtype, self.noise = model, dtype, noise
        self.bodies = []

    def status(self):
        return {"dtype": self.dtype}

    def post(self, path, body, timeout_s):
        assert path == "/v1/completions"
        self.bodies.append(body)
        generator = torch.Generator().manual_seed(0)
        ids, logprobs = list(body["prompt"]), []
        for _ in range(body["max_tokens"]):
            policy = reference_policy(self.model, [*ids, 0], body["temperature"])[-2]
            ids.append(int(torch.multinomial(policy.exp(), 1, generator=generator)))
            noise = self.noise * torch.randn(1, generator=generator).item()
            logprobs.append(policy[ids[-1]].item() + noise)
        new = ids[len(body["prompt"]) :]
        reply = {"choices": [{"token_ids": new, "logprobs": {"token_logprobs": logprobs}}]}
        request = SimpleNamespace(answer=lambda: reply)
        return SimpleNamespace(begin=lambda: request)


def args_with(**options):
    return RLConfig(use_cpu=True, **{"max_seq_len": 64, **options})


def test_the_server_that_has_the_trained_model_agrees(tokenizer, caplog):
    model = make_tiny_model()
    server = StubServer(make_tiny_model().double())
    model.train()
    check_agreement(model, server, "policy", tokenizer, args_with(temperature=0.7))
    (body,) = server.bodies
    assert body["model"] == "policy" and body["temperature"] == 0.7
    assert tokenizer.decode(body["prompt"]) == PROMPT and body["max_tokens"] == NUM_TOKENS
    assert model.training and not caplog.records


def test_a_prompt_and_its_reply_fit_the_longest_sequence(tokenizer):
    server = StubServer(make_tiny_model().double())
    args = args_with(max_seq_len=10)
    check_agreement(make_tiny_model(), server, "policy", tokenizer, args)
    assert (len(server.bodies[0]["prompt"]), server.bodies[0]["max_tokens"]) == (5, 5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_server_with_other_weights_of_the_same_shapes_is_refused(tokenizer, dtype):
    other = make_tiny_model(seed=1).double()
    other.lm_head.weight.data.mul_(20)  # of new models all logprobs are nearly the same
    message = (
        r"gpu-box:8000 samples from a different model than the one being trained: [\d.]+ nats "
        r"apart .*" + dtype
    )
    with pytest.raises(InferenceServerError, match=message):
        check_agreement(
            make_tiny_model(), StubServer(other, dtype), "policy", tokenizer, args_with()
        )


def test_rounding_is_no_other_model(tokenizer):
    args = args_with()
    for noise in (0.02, 0.2):
        server = StubServer(make_tiny_model().double(), "bfloat16", noise)
        check_agreement(make_tiny_model(), server, "policy", tokenizer, args)
        exact = StubServer(make_tiny_model().double(), "float32", noise)
        with pytest.raises(InferenceServerError):
            check_agreement(make_tiny_model(), exact, "policy", tokenizer, args)


def test_logprobs_that_are_nan_are_another_model(tokenizer):
    model = make_tiny_model()
    model.lm_head.weight.data[0, 0] = torch.nan
    server = StubServer(make_tiny_model().double(), "bfloat16")
    with pytest.raises(InferenceServerError, match="nan nats apart"):
        check_agreement(model, server, "policy", tokenizer, args_with())


def test_a_tokenizer_without_letters_has_a_prompt_too():
    class Digits:
        all_special_ids = (0,)

        def __len__(self):
            return 11

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [int(letter) + 1 for letter in text if letter.isdigit()]}

    assert prompt_of(Digits()) == [1, 2, 3, 4]


IDS = [3, 14, 15, 92, 65, 35]
LOSS = [0, 0, 1, 1, 0, 1]


def sample_of(logprobs=(0.0,) * 6, **optional):
    return Sample(IDS, LOSS, logprobs, np.where(LOSS, 0, -1), **optional)


def log_softmax64(row):
    row = row.astype(np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def test_logprobs_of_samples_are_taken_at_the_temperature_over_the_mask():
    model = make_tiny_model()
    logits = model(input_ids=torch.tensor([IDS])).logits[0].detach().numpy() / 0.7
    expected = [log_softmax64(logits[at - 1])[IDS[at]] for at in (2, 3, 5)]
    args = args_with(temperature=0.7)
    (found,) = logprobs_of_samples(model, [sample_of()], args)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    mask = np.full((6, 3), -1, np.int32)
    mask[2, :2], mask[5] = [IDS[2], 8], [1, IDS[5], 2]
    expected[0] = log_softmax64(logits[1, [IDS[2], 8]])[0]
    expected[2] = log_softmax64(logits[4, [1, IDS[5], 2]])[1]
    (found,) = logprobs_of_samples(model, [sample_of(extras={"allowed_tokens": mask})], args)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert model.training


def test_logprobs_of_samples_use_the_experts_of_the_server_and_no_others():
    model = make_tiny_moe()
    args = args_with(router_replay=True)
    (own,) = logprobs_of_samples(model, [sample_of()], args)
    chosen = np.tile(np.array([0, 1], np.int16), (len(IDS), 2, 1))
    (replayed,) = logprobs_of_samples(model, [sample_of(extras={"routed_experts": chosen})], args)
    assert np.abs(own - replayed).max() > 1e-3
    replay_experts(model, torch.tensor([0, 1]).expand(1, 40, 2, 2))  # of the last microbatch
    (again,) = logprobs_of_samples(model, [sample_of()], args)
    np.testing.assert_array_equal(own, again)


def test_logprobs_of_samples_round_as_the_trainer_does():
    model = make_tiny_model()
    (exact,) = logprobs_of_samples(model, [sample_of()], args_with())
    half = args_with(bf16=True)
    (rounded,) = logprobs_of_samples(model, [sample_of()], half)
    half.head_dtype = "float32"
    (with_head,) = logprobs_of_samples(model, [sample_of()], half)
    assert np.abs(exact - rounded).max() > 1e-4
    assert 0 < np.abs(rounded - with_head).max() < 0.1
