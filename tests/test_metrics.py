import math
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.helpers import make_tiny_model
from verifiers_rl.losses import LossInputs
from verifiers_rl.report.metrics import (
    EarlyWarnings,
    StepWindow,
    TokenMeans,
    device_metrics,
    model_flops,
    peak_flops,
)
from verifiers_rl.report.trackers import print_rollouts
from verifiers_rl.types import Rollout

SMALL = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def test_means_are_taken_over_loss_tokens_of_all_microbatches():
    means = TokenMeans()
    for logprobs, counts in (([-1.0], True), ([-2.0, -2.0, -2.0], True), ([9.0], False)):
        n = len(logprobs)
        inputs = LossInputs(
            trainer_logprobs=torch.tensor(logprobs),
            inference_logprobs=torch.full((n,), -2.0),
            advantages=torch.full((n,), -0.5),
            weights=torch.ones(n),
            sequence_ids=torch.zeros(n, dtype=torch.int64),
            entropy=torch.full((n,), 3.0),
        )
        microbatch = SimpleNamespace(has_loss=counts, sample_ids=[])
        means.add(inputs, {"mine": torch.arange(n).float()}, microbatch)
    result = means.reduce(num_loss_tokens=4, world_size=1)
    ratio = math.e
    assert math.isclose(result["importance_ratio"], (ratio + 3) / 4, rel_tol=1e-6)
    assert math.isclose(result["importance_ratio_max"], ratio, rel_tol=1e-6)
    assert math.isclose(result["mismatch_kl"], (ratio - 1 - 1) / 4, rel_tol=1e-6)
    assert (result["mine"], result["clamped_share"]) == (0.75, 0.0)
    assert (result["entropy"], result["advantage_abs"]) == (3.0, 0.5)


def test_ratios_beyond_the_clamp_are_counted():
    means = TokenMeans()
    inputs = LossInputs(
        trainer_logprobs=torch.tensor([0.0, -1.0, -1.0, -700.0]),
        inference_logprobs=torch.tensor([-700.0, -1.0, -math.inf, 0.0]),
        advantages=torch.ones(4),
        weights=torch.ones(4),
        sequence_ids=torch.zeros(4, dtype=torch.int64),
        entropy=torch.zeros(4),
    )
    means.add(inputs, {}, SimpleNamespace(has_loss=True, sample_ids=[]))
    assert means.reduce(num_loss_tokens=4, world_size=1)["clamped_share"] == 0.75


def test_the_peak_of_a_gpu_is_known_by_its_name():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("Some GPU 9000") is None and peak_flops("NVIDIA RTX A1000") is None


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")  # of peft
def test_operations_of_a_step_by_hand():
    model = make_tiny_model()  # q, k, v, o: 32 to 32, 16, 16, 32; gate, up, down: 32 to 64
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 64 + 2 * 32 + 2 * 8  # two norms, those of q and k
    head = 32 * 261
    products = 5 * (2 * layer + 32) + 2 * head  # of 5 tokens 2 carry loss
    assert model_flops(model, 5, num_loss_tokens=2) == 6 * products
    model.requires_grad_(False)
    assert model_flops(model, 5, num_loss_tokens=2) == 4 * products
    tied = make_tiny_model(tie_word_embeddings=True)
    assert model_flops(tied, 5, num_loss_tokens=2) == 6 * products
    lora = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    untied, tied = (
        get_peft_model(make_tiny_model(tied), lora).get_base_model() for tied in (False, True)
    )
    assert model_flops(tied, 5, num_loss_tokens=2) == model_flops(untied, 5, num_loss_tokens=2)


@pytest.mark.parametrize("changes", [{}, {"modules_to_save": ["lm_head"]}, {"experts": 4}])
def test_operations_of_a_step_are_those_that_torch_counts(changes):
    torch.manual_seed(0)
    if num_experts := changes.get("experts"):
        config = Qwen3MoeConfig(
            **SMALL, moe_intermediate_size=64, num_experts=num_experts, num_experts_per_tok=1
        )
        model = Qwen3MoeForCausalLM(config)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SMALL))
    if "modules_to_save" in changes:
        config = LoraConfig(r=4, target_modules=["q_proj"], **changes)
        model = get_peft_model(model, config).get_base_model()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # torch counts no grouped products
    ids = torch.randint(32, (64, 1))  # next to nothing of it in attention's scores
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    ours = model_flops(model, 64, num_loss_tokens=64)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_mfu_is_the_share_of_the_peak_that_the_model_used(monkeypatch):
    for name, value in {
        "get_device_name": "NVIDIA H100 80GB HBM3",
        "max_memory_allocated": 3_000_000_000,
        "reset_peak_memory_stats": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    metrics = device_metrics(torch.device("cuda"), num_flops=1_978_000_000_000_000, seconds=4.0)
    assert metrics == {"peak_memory_gb": 3.0, "mfu": pytest.approx(0.5)}  # of 989 TFLOP/s
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Unknown")
    assert device_metrics(torch.device("cuda"), 1, 1.0) == {"peak_memory_gb": 3.0}


def test_the_peak_memory_of_a_process_is_logged():
    before = device_metrics(torch.device("cpu"), 0, 1.0)["peak_memory_gb"]
    block = torch.ones(50_000_000)  # 0.2 GB, which may have been used before
    after = device_metrics(torch.device("cpu"), 0, 1.0)["peak_memory_gb"]
    assert before <= after and after > block.nbytes / 1e9


def test_the_table_shows_text_as_it_is_from_lowest_to_highest_reward(capsys):
    rollouts = [
        Rollout(i, f"prompt {i}", f"[bold]answer {i}", reward=i / 4, advantage=i / 4 - 0.5)
        for i in range(5)
    ]
    print_rollouts(rollouts, step=7, num_rows=3)
    shown = capsys.readouterr().out
    assert "step 7" in shown
    places = [shown.index(f"[bold]answer {i}") for i in (0, 2, 4)]
    assert places == sorted(places) and "answer 1" not in shown
    assert "-0.500" in shown and "+0.500" in shown and "1.000" in shown


def warnings_of(steps, caplog):
    """Messages of EarlyWarnings for these steps, each with its metrics."""
    window, messages = StepWindow(), []
    callback = EarlyWarnings(window)
    state = SimpleNamespace(is_world_process_zero=True)
    callback.on_train_begin(None, state, None)
    for step, metrics in steps:
        caplog.clear()
        window.add(metrics)
        callback.on_step_end(None, state, None)
        messages += [(step, message) for message in caplog.messages]
    return messages


def uniform(step, share=1.0):
    return step, {"uniform_group_share": share, "reward": 0.25}


def test_ten_batches_of_one_reward_a_group_draw_one_warning(caplog):
    ((step, message),) = warnings_of([uniform(step) for step in range(1, 31)], caplog)
    assert step == 10
    assert "in the last 10 batches no group had two different rewards" in message
    assert "mean is 0.25" in message
    steps = [uniform(step, share=0.9 if step == 9 else 1.0) for step in range(1, 20)]
    assert warnings_of(steps[:-1], caplog) == []  # it starts the count anew
    assert [step for step, _ in warnings_of(steps, caplog)] == [19]


@pytest.mark.parametrize(
    ("mismatch_kl", "staleness", "num_warnings"),
    [(0.064, 0.0, 1), (0.01, 0.0, 0), (0.064, 0.5, 0)],
)
def test_a_first_step_with_tokens_of_another_model_draws_a_warning(
    mismatch_kl, staleness, num_warnings, caplog
):
    logs = {"mismatch_kl": mismatch_kl, "staleness": staleness}
    later = {"mismatch_kl": 0.5, "staleness": 0.0}
    messages = warnings_of([(1, logs), (2, later)], caplog)
    assert [step for step, _ in messages] == [1] * num_warnings
    assert all("mismatch_kl is 0.064 in the first step" in message for _, message in messages)
