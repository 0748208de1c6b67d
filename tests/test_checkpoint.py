"""Flags that follow from the served checkpoint, and which servers that quantise can take the
weights of a push; decided before vLLM starts.
"""

import json
import re
from argparse import Namespace

import pytest

from verifiers_rl.inference.flags import fit_to_checkpoint

DELTA_NET = {"model_type": "qwen3_5_text", "linear_conv_kernel_dim": 4}
QWEN3_5 = {"model_type": "qwen3_5", "text_config": DELTA_NET, "vision_config": {}}
PLAIN = {"model_type": "qwen3"}
IN_FP8 = PLAIN | {"quantization_config": {"quant_method": "fp8"}}


@pytest.fixture
def fitted(tmp_path, monkeypatch):
    """These flags behind fit_to_checkpoint, and what it says of them."""

    def fit(config, *argv, on_gpu=True, **given):
        monkeypatch.setattr("torch.cuda.is_available", lambda: on_gpu)
        (tmp_path / "config.json").write_text(json.dumps(config))
        flags = {"language_model_only": False, "limit_mm_per_prompt": {}, "dtype": "auto"}
        flags |= {"enable_lora": False, "quantization": None, "quantization_config": None}
        flags |= {"enforce_eager": False, "model": str(tmp_path), "revision": None}
        args = Namespace(**flags | given)
        return args, fit_to_checkpoint(args, argv)

    return fit


def test_a_vision_tower_is_left_out_unless_it_is_asked_for(fitted):
    args, problem = fitted(QWEN3_5)
    assert args.language_model_only and problem is None
    assert not fitted(QWEN3_5, "--no-language-model-only")[0].language_model_only
    given = {"limit_mm_per_prompt": {"image": 1}}
    assert not fitted(QWEN3_5, **given)[0].language_model_only
    assert not fitted(PLAIN)[0].language_model_only


@pytest.mark.parametrize(
    "config, flags, name, warns",
    [
        (PLAIN, {}, None, False),
        (PLAIN, {"quantization": "fp8"}, "fp8_per_tensor", True),
        (PLAIN, {"quantization": "fp8_per_block"}, "fp8_per_block", True),
        (
            PLAIN,
            {"quantization": "online", "quantization_config": {"linear": "fp8_per_block"}},
            "online",
            True,
        ),
        (PLAIN, {"quantization": "awq", "enable_lora": True}, "awq", True),
        # A checkpoint that is quantised keeps its flags.
        (IN_FP8, {"quantization": "fp8"}, "fp8", False),
        (IN_FP8, {"quantization": "fp8", "on_gpu": False}, "fp8", False),
    ],
)
def test_what_can_take_a_push_gets_vllms_name_and_a_warning(
    fitted, capsys, config, flags, name, warns
):
    args, problem = fitted(config, **flags)
    assert problem is None and args.quantization == name
    said = capsys.readouterr().err
    assert ("the server rounds weights" in said and "mismatch_kl" in said) == warns


def test_the_installed_vllm_makes_fp8_of_plain_weights():
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    assert {"fp8_per_tensor", "fp8_per_block", "online"} <= {*ONLINE_QUANT_SHORTHAND_NAMES}


@pytest.mark.parametrize("config", [DELTA_NET, QWEN3_5])
def test_linear_attention_is_computed_in_bfloat16_on_a_cpu(fitted, config):
    assert fitted(config, on_gpu=False)[0].dtype == "bfloat16"
    assert fitted(config)[0].dtype == "auto"


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4}
DELTA_EXPERTS = {"text_config": DELTA_NET | {"num_local_experts": 4}}
ON_CPU, LORA, FP8 = {"on_gpu": False}, {"enable_lora": True}, {"quantization": "fp8"}
OF_DTYPE = "--dtype float32: on a CPU"
OF_LORA = "--enable-lora: on a CPU.*lora_sync='merged'"
OF_GRAPHS = "--quantization fp8: with experts, CUDA graphs would go on"


@pytest.mark.parametrize(
    "config, flags, problem",
    [
        (DELTA_NET, ON_CPU | {"dtype": "float32"}, OF_DTYPE),
        (QWEN3_5, ON_CPU | {"dtype": "float32"}, OF_DTYPE),
        (QWEN3_5, ON_CPU | {"dtype": "bfloat16"}, None),
        (QWEN3_5, {"dtype": "float32"}, None),
        (PLAIN, ON_CPU | {"dtype": "float32"}, None),
        (EXPERTS, ON_CPU | LORA, OF_LORA),
        (DELTA_EXPERTS, ON_CPU | LORA, OF_LORA),
        (DELTA_EXPERTS, ON_CPU, None),
        (PLAIN, ON_CPU | LORA, None),
        (EXPERTS, LORA, None),
        # CUDA graphs go on reading what a push has replaced.
        (EXPERTS, FP8, OF_GRAPHS),
        (DELTA_EXPERTS, FP8, OF_GRAPHS),
        (EXPERTS, FP8 | {"enforce_eager": True}, None),
        (EXPERTS, FP8 | LORA, None),
        # Which cannot be made of a push.
        (PLAIN, ON_CPU | FP8, "--quantization fp8: .* or use a GPU"),
        (PLAIN, {"quantization": "awq"}, "--quantization awq: .* or train an adapter"),
        (
            PLAIN,
            {"quantization_config": {"linear": "fp8_per_block"}},
            "--quantization-config: .* add --quantization online",
        ),
    ],
)
def test_flags_that_cannot_work_are_refused_with_the_fix(fitted, config, flags, problem):
    _, said = fitted(config, **flags)
    assert re.match(problem, said) if problem else said is None
