"""Which servers that quantise can take the weights of a push; decided before vLLM starts."""

import json
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


def test_fp8_of_plain_weights_gets_vllms_name_and_a_warning(fit, capsys):
    problem, args = fit(quantization="fp8")
    assert problem is None and args.quantization == "fp8_per_tensor"
    said = capsys.readouterr().err
    assert said.startswith("vf-vllm: WARNING: --quantization fp8: the server rounds weights")
    assert "mismatch_kl" in said and "the importance ratio corrects" in said
    problem, args = fit(quantization="fp8_per_block")
    assert problem is None and args.quantization == "fp8_per_block"
    assert "--quantization fp8_per_block: " in capsys.readouterr().err
    problem, args = fit(quantization="online", quantization_config={"linear": "fp8_per_block"})
    assert problem is None and args.quantization == "online"
    assert "--quantization online: the server rounds" in capsys.readouterr().err


def test_a_quantization_config_alone_is_refused_because_vllm_passes_it_over(fit, capsys):
    problem, _ = fit(quantization_config={"linear": "fp8_per_block"})
    assert problem == (
        "--quantization-config: has no effect on plain weights alone; add --quantization online"
    )
    assert capsys.readouterr().err == ""


def test_nothing_is_said_without_quantization(fit, capsys):
    problem, args = fit()
    assert problem is None and args.quantization is None
    assert capsys.readouterr().err == ""


def test_a_kind_that_vllm_cannot_make_of_a_push_is_refused(fit):
    problem, _ = fit(quantization="awq")
    said = "--quantization awq: needs a checkpoint that is quantised, and such a server takes no "
    assert problem.startswith(said + "full weights; choose one of fp8_per_")
    assert problem.endswith("online, or train an adapter (--enable-lora)")
    problem, args = fit(quantization="awq", enable_lora=True)
    assert problem is None and args.quantization == "awq"


def test_experts_in_fp8_need_eager_mode_or_an_adapter(fit):
    for config in ({"num_experts": 8}, {"text_config": {"num_local_experts": 8}}):
        problem, _ = fit(config=config, quantization="fp8")
        assert problem.startswith("--quantization fp8: with experts, CUDA graphs would go on")
        for flag in ("enforce_eager", "enable_lora"):
            assert fit(config=config, quantization="fp8", **{flag: True})[0] is None


def test_vllms_cpu_build_is_refused(fit):
    problem, _ = fit(on_gpu=False, quantization="fp8")
    assert problem == (
        "--quantization fp8: vLLM's CPU build cannot quantise the weights of a push; leave it out, "
        "or use a GPU"
    )


def test_a_checkpoint_that_is_quantised_keeps_its_flags(fit, capsys):
    config = {"quantization_config": {"quant_method": "fp8"}}
    for on_gpu in (True, False):
        problem, args = fit(on_gpu, config, quantization="fp8")
        assert problem is None and args.quantization == "fp8"
    assert capsys.readouterr().err == ""


def test_the_installed_vllm_makes_fp8_of_plain_weights():
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    assert {"fp8_per_tensor", "fp8_per_block", "online"} <= {*ONLINE_QUANT_SHORTHAND_NAMES}
