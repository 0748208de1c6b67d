"""Which servers that quantise can take the weights of a push; decided before vLLM starts."""

import json
import re
from argparse import Namespace

import pytest
import torch

from verifiers_rl.inference.checkpoint import fit_to_checkpoint


@pytest.fixture
def fit(tmp_path, monkeypatch):
    """What fit_to_checkpoint says of these flags, and the flags behind it."""

    def run(on_gpu=True, config=(), **given):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **dict(config)}))
        flags = {"limit_mm_per_prompt": {}, "dtype": "auto", "enable_lora": False}
        flags |= {"quantization": None, "quantization_config": None, "enforce_eager": False}
        args = Namespace(model=str(tmp_path), revision=None, **{**flags, **given})
        return fit_to_checkpoint(args, []), args

    return run


IN_FP8 = {"quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    ("config", "flags", "name", "warns"),
    [
        ({}, {}, None, False),
        ({}, {"quantization": "fp8"}, "fp8_per_tensor", True),
        ({}, {"quantization": "fp8_per_block"}, "fp8_per_block", True),
        (
            {},
            {"quantization": "online", "quantization_config": {"linear": "fp8_per_block"}},
            "online",
            True,
        ),
        ({}, {"quantization": "awq", "enable_lora": True}, "awq", True),
        # A checkpoint that is quantised keeps its flags.
        (IN_FP8, {"quantization": "fp8"}, "fp8", False),
        (IN_FP8, {"quantization": "fp8", "on_gpu": False}, "fp8", False),
    ],
)
def test_what_can_take_a_push_gets_vllms_name_and_a_warning(
    fit, capsys, config, flags, name, warns
):
    problem, args = fit(config=config, **flags)
    assert problem is None and args.quantization == name
    said = capsys.readouterr().err
    assert ("the server rounds weights" in said and "mismatch_kl" in said) == warns


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            {"quantization_config": {"linear": "fp8_per_block"}},
            "--quantization-config: .* add --quantization online",
        ),
        ({"quantization": "awq"}, "--quantization awq: .* or train an adapter"),
        ({"on_gpu": False, "quantization": "fp8"}, "--quantization fp8: .* or use a GPU"),
    ],
)
def test_a_kind_that_cannot_be_made_of_a_push_is_refused_with_the_fix(fit, flags, problem):
    assert re.match(problem, fit(**flags)[0])


def test_the_installed_vllm_makes_fp8_of_plain_weights():
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    assert {"fp8_per_tensor", "fp8_per_block", "online"} <= {*ONLINE_QUANT_SHORTHAND_NAMES}


def test_experts_in_fp8_need_eager_mode_or_an_adapter(fit):
    for config in ({"num_experts": 8}, {"text_config": {"num_local_experts": 8}}):
        problem, _ = fit(config=config, quantization="fp8")
        assert problem.startswith("--quantization fp8: with experts, CUDA graphs would go on")
        for flag in ("enforce_eager", "enable_lora"):
            assert fit(config=config, quantization="fp8", **{flag: True})[0] is None
