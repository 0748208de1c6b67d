"""The choice of a step that fits into a GPU's memory, and what the step then takes."""

import pytest
import torch
from peft.helpers import disable_input_dtype_casting
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.step_memory import Counter
from tests.helpers import make_samples, make_tiny_llama
from tests.reference import (
    LOSS_OPTIONS,
    batch_gradients,
    check_against_reference,
    move_away,
    with_logprobs_near,
)
from verifiers_rl import forward


@pytest.fixture
def give(monkeypatch):
    """Let a trainer find memory on its device: for so many tokens with all that a forward keeps,
    beside what does not depend on tokens.
    """
    monkeypatch.setattr(forward, "HEAD_BYTES", 0)
    monkeypatch.setattr(forward, "FEW_TOKENS", 64)
    monkeypatch.setattr(forward, "MANY_TOKENS", 300)

    def give(trainer, num_tokens):
        base = trainer._base_of(trainer.model)
        with trainer.accelerator.autocast():
            of_token = (forward.saved_bytes(base, 128) - forward.saved_bytes(base, 64)) / 64
        trained = sum(p.numel() for p in base.parameters() if p.requires_grad)
        free = (of_token * num_tokens + forward.STATE_BYTES * trained) / forward.USED_SHARE
        monkeypatch.setattr(forward, "free_bytes", lambda device: round(free) + 1)
        return of_token

    return give


DEFAULT = {"micro_batch_size": None}  # 8 samples of 32 tokens, or 300 tokens, which are more


# With 2 layers, a token takes 2, 1.525 or 1.05 times what a forward keeps of it, with checkpoints
# of none, one or both.
@pytest.mark.parametrize(
    "options, room, tokens, checkpoints",
    [
        (DEFAULT, 1000, 300, 0),
        ({**DEFAULT, "max_seq_len": 64}, 2000, 512, 0),
        (DEFAULT, 200, 100, 0),
        (DEFAULT, 100, 65, 1),
        (DEFAULT, 70, 66, 2),
        (DEFAULT, 40, 38, 2),
        (DEFAULT, 10, 32, 2),  # a whole sample, which does not fit
        ({"micro_batch_size": 4}, 200, 128, 1),
        ({"max_tokens_per_microbatch": 50}, 200, 50, 0),
        ({**DEFAULT, "gradient_checkpointing": False}, 100, 50, 0),
        ({**DEFAULT, "gradient_checkpointing": True}, 70, 66, 0),  # train() has made those
    ],
)
def test_tokens_and_checkpoints_follow_from_free_memory(
    make_trainer, give, capsys, options, room, tokens, checkpoints
):
    trainer = make_trainer(**options)
    assert trainer.tried_support.token_budget is None  # on a CPU nothing is chosen
    give(trainer, room)
    del trainer.tried_support
    capsys.readouterr()
    assert trainer.tried_support.token_budget == tokens
    layers = trainer.model.model.layers
    assert ["forward" in vars(layer) for layer in layers] == [n < checkpoints for n in range(2)]
    (line,) = capsys.readouterr().out.splitlines()
    again = 2 if options.get("gradient_checkpointing") else checkpoints
    assert line.startswith(f"step: at most {tokens} tokens in a forward pass, {again} of 2 layers ")
    assert ("may not suffice" in line) == (room == 10)


def test_a_resumed_run_whose_optimizer_has_its_memory_takes_as_many_tokens(
    make_trainer, give, monkeypatch
):
    trainer = make_trainer(**DEFAULT)
    held = round(50 * give(trainer, 200))
    free = forward.free_bytes(None)
    monkeypatch.setattr(forward, "free_bytes", lambda device: free - held)
    parameter = next(trainer.model.parameters())
    trainer.create_optimizer().state[parameter] = {"exp_avg": torch.zeros(held, dtype=torch.uint8)}
    assert trainer.tried_support.token_budget == 100


def test_a_step_of_which_backward_needs_only_the_head_takes_all_tokens(make_trainer, monkeypatch):
    model = make_tiny_llama()
    model.model.requires_grad_(False)
    trainer = make_trainer(model, use_lora=False, **DEFAULT)
    monkeypatch.setattr(forward, "free_bytes", lambda device: 2**33)
    assert forward.saved_bytes(model, 64) == 0
    assert trainer.tried_support.token_budget == 32_768
    monkeypatch.setattr(forward, "decoder_blocks", lambda base: [])  # of an unknown model
    del trainer.tried_support
    assert trainer.tried_support.token_budget is None


@pytest.mark.parametrize("use_lora", [False, True])
def test_the_gradient_is_the_same_with_what_was_chosen(make_trainer, give, use_lora):
    samples = with_logprobs_near(make_tiny_llama(), make_samples(9, seed=3, longest=20), 1.0)
    trainer = make_trainer(
        make_tiny_llama(), use_lora=use_lora, lora_rank=4, temperature=1.0,
        loss="ppo", loss_args=LOSS_OPTIONS["ppo"], **DEFAULT,
    )  # fmt: skip
    give(trainer, 100)
    move_away(trainer)
    check_against_reference(trainer, make_tiny_llama, samples)
    assert (
        trainer.tried_support.token_budget == 65
        and trainer._window.steps[0]["num_microbatches"] > 1
    )


def make_deep_model():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=261, hidden_size=64, intermediate_size=192, num_hidden_layers=8, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


@pytest.mark.parametrize("room", [1000, 200])  # without and with checkpoints
@pytest.mark.parametrize("kind", ["adapter", "all weights", "adapter in bfloat16"])
def test_a_step_takes_about_what_was_expected(make_trainer, give, kind, room):
    """Bytes alive at a time, above what was there before, against the estimate."""
    model = make_deep_model()
    if "bfloat16" in kind:
        model = model.to(torch.bfloat16)
    trainer = make_trainer(
        model, use_lora="adapter" in kind, bf16="bfloat16" in kind, max_seq_len=256,
        max_tokens_per_microbatch=256,
    )  # fmt: skip
    with disable_input_dtype_casting(trainer.model, "bfloat16" in kind):
        of_token = give(trainer, room)
        assert trainer.tried_support.token_budget == 256
    num = sum("forward" in vars(layer) for layer in trainer._base_of(trainer.model).model.layers)
    assert (num > 0) == (room == 200)
    assert trainer.tried_support.shares_prefixes  # tried before bytes are counted
    samples = make_samples(1, prompt=200, longest=50)
    with Counter() as counter:
        batch_gradients(trainer, samples)
    num_tokens = trainer._window.steps[0]["num_tokens"]
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    expected = num_tokens * of_token * (1 + (2 - 0.95 * num) / 8)
    expected += 8 * trained  # the gradient, and what it is summed from
    assert 0.5 * expected < counter.peak < expected
