import json
from argparse import Namespace

import pytest
import torch

from verifiers_rl.inference.checkpoint import fit_to_checkpoint

DELTA_NET = {"model_type": "qwen3_5_text", "linear_conv_kernel_dim": 4}
QWEN3_5 = {"model_type": "qwen3_5", "text_config": DELTA_NET, "vision_config": {}}


def fitted(folder, config, *argv, **given):
    (folder / "config.json").write_text(json.dumps(config))
    flags = {"language_model_only": False, "limit_mm_per_prompt": {}, "dtype": "auto"}
    flags |= {"enable_lora": False, "quantization": None, "quantization_config": None}
    args = Namespace(model=str(folder), revision=None, **{**flags, **given})
    return args, fit_to_checkpoint(args, argv)


def test_a_vision_tower_is_left_out_unless_it_is_asked_for(tmp_path):
    args, problem = fitted(tmp_path, QWEN3_5)
    assert args.language_model_only and problem is None
    assert not fitted(tmp_path, QWEN3_5, "--no-language-model-only")[0].language_model_only
    given = {"limit_mm_per_prompt": {"image": 1}}
    assert not fitted(tmp_path, QWEN3_5, **given)[0].language_model_only
    assert not fitted(tmp_path, {"model_type": "qwen3"})[0].language_model_only


@pytest.mark.parametrize("config", [DELTA_NET, QWEN3_5])
def test_linear_attention_is_computed_in_bfloat16_on_a_cpu(tmp_path, monkeypatch, config):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fitted(tmp_path, config)[0].dtype == "bfloat16"
    assert fitted(tmp_path, config, dtype="bfloat16")[1] is None
    assert "--dtype float32: on a CPU" in fitted(tmp_path, config, dtype="float32")[1]
    assert fitted(tmp_path, {"model_type": "qwen3"}, dtype="float32")[1] is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert fitted(tmp_path, config, dtype="float32")[1] is None
    assert fitted(tmp_path, config)[0].dtype == "auto"


def test_an_adapter_beside_experts_is_refused_on_a_cpu(tmp_path, monkeypatch):
    experts = {"model_type": "qwen3_moe", "num_experts": 4}
    inside = {"model_type": "qwen3_5_moe", "text_config": DELTA_NET | {"num_experts": 4}}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for config in (experts, inside):
        problem = fitted(tmp_path, config, enable_lora=True)[1]
        assert problem.startswith("--enable-lora: on a CPU") and "lora_sync='merged'" in problem
        assert fitted(tmp_path, config)[1] is None
    assert fitted(tmp_path, {"model_type": "qwen3"}, enable_lora=True)[1] is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert fitted(tmp_path, experts, enable_lora=True)[1] is None
