from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from verifiers_rl.report.metrics import (
    StepWindow,
    device_metrics,
    model_flops,
    peak_flops,
)

SMALL = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.mark.parametrize("changes", [{"modules_to_save": ["lm_head"]}, {"experts": 4}])
def test_operations_of_a_step_are_those_that_torch_counts(changes):
    torch.manual_seed(0)
    if "experts" in changes:
        config = Qwen3MoeConfig(
            **SMALL, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=1
        )
        model = Qwen3MoeForCausalLM(config)
    else:
        config = LoraConfig(r=4, target_modules=["q_proj"], **changes)
        model = get_peft_model(Qwen3ForCausalLM(Qwen3Config(**SMALL)), config).get_base_model()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # torch counts no grouped products
    ids = torch.randint(32, (64, 1))  # next to nothing of it in attention's scores
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    ours = model_flops(model, 64, num_loss_tokens=64)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.02)
    # The head, 64 to 32, is for loss tokens.
    assert ours - model_flops(model, 64, num_loss_tokens=32) == 6 * 32 * (64 * 32)


def test_mfu_is_the_share_of_the_peak_that_the_model_used(monkeypatch):
    assert peak_flops("NVIDIA H100 PCIe") == 756e12 and peak_flops("NVIDIA RTX A1000") is None
    assert peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    for name, value in {
        "get_device_name": "NVIDIA H100 80GB HBM3",
        "max_memory_allocated": 3_000_000_000,
        "reset_peak_memory_stats": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    metrics = device_metrics(torch.device("cuda"), num_flops=1_978_000_000_000_000, seconds=4.0)
    assert metrics == {"peak_memory_gb": 3.0, "mfu": pytest.approx(0.5)}  # of 989 TFLOP/s


def test_ten_batches_of_one_reward_a_group_draw_one_warning(caplog):
    window, state, warned = StepWindow(), SimpleNamespace(is_world_process_zero=True), []
    # The ninth of these differs, which starts the count anew.
    for step in range(1, 40):
        caplog.clear()
        window.steps.append({"uniform_group_share": 0.9 if step == 9 else 1.0, "reward": 0.25})
        window.on_step_end(None, state, None)
        warned += [step for text in caplog.messages if "mean is 0.25" in text]
    assert warned == [19]


@pytest.mark.parametrize(
    "mismatch_kl, staleness, num_warnings", [(0.064, 0.0, 1), (0.01, 0.0, 0), (0.064, 0.5, 0)]
)
def test_a_first_step_with_tokens_of_another_model_draws_a_warning(
    mismatch_kl, staleness, num_warnings, caplog
):
    window, state = StepWindow(), SimpleNamespace(is_world_process_zero=True)
    for kl, age in ((mismatch_kl, staleness), (0.5, 0.0)):
        window.steps.append({"mismatch_kl": kl, "staleness": age})
        window.on_step_end(None, state, None)
    num_said = caplog.text.count("mismatch_kl is 0.064 in the first step")
    assert num_said == len(caplog.messages) == num_warnings
