"""The trainer's half of docs/models.md: tiny models of the families that people train. The server's
half is `make models`.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.families import FAMILIES, write_family
from tests.family_steps import (
    chunked_head,
    load,
    loads_as_saved,
    one_step,
    shared_rows,
    text_names,
    what_travels,
)
from verifiers_rl.sync.sources import what_to_send

# Families whose samples would see each other in one row. transformers tells gpt-oss's masks nothing
# of positions; the others have layers that read a row from left to right.
NEMOTRON = {"nemotron_h", "nemotron_h_dense"}
PADDED = {"qwen3_5", "qwen3_5_moe", "gpt_oss", "gpt_oss_mxfp4"} | NEMOTRON

# Families whose modules have other names than their checkpoints. vLLM knows both.
RENAMED = {"gemma3", "mistral3"} | NEMOTRON


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_family(request.param, folder)
    return request.param, folder


def test_logprobs_of_each_family_are_those_of_whole_logits(checkpoint):
    name, folder = checkpoint
    model = load(folder)
    assert chunked_head(model) < 2e-5
    reason = shared_rows(model)
    assert (reason is not None) == (name in PADDED), reason


def test_each_family_sends_its_text_as_its_checkpoint_names_it(checkpoint):
    name, folder = checkpoint
    names = text_names(folder)
    adapted = load(folder, use_lora=True)
    if name != "gpt_oss_mxfp4":
        assert what_travels(folder, load(folder)) == names
        assert what_travels(folder, adapted) == names
    adapter = what_travels(folder, adapted, "adapter")
    layers = {one.removeprefix("base_model.model.").rpartition(".lora_")[0] for one in adapter}
    if name not in RENAMED:
        assert {f"{layer}.weight" for layer in layers} <= names


@pytest.mark.parametrize("use_lora", [False, True], ids=["full", "lora"])
def test_each_family_is_trained_saved_and_loaded(checkpoint, tmp_path, use_lora):
    name, folder = checkpoint
    trainer = one_step(folder, tmp_path, use_lora)
    assert loads_as_saved(trainer, folder, tmp_path) < 2e-5
    if use_lora and name in ("mistral3", "gpt_oss_mxfp4"):  # which AutoPeftModel cannot load
        trained, given = (
            {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
            for model in (trainer.model, load(tmp_path, use_lora=True))
        )
        torch.testing.assert_close(given, trained, rtol=0, atol=0)


def test_a_checkpoint_in_fp8_is_trained_as_plain_weights(tmp_path):
    write_family("qwen3", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors, plain = load_file(path), {}
    for name in [name for name in tensors if "_proj." in name]:
        scale = tensors[name].float().abs().max() / 448
        quantised = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        plain[name], tensors[name] = quantised.float() * scale, quantised
        tensors[f"{name}_scale_inv"] = scale.reshape(1, 1)  # of a block of 128 x 128
    save_file(tensors, path, {"format": "pt"})
    config = AutoConfig.from_pretrained(tmp_path)
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert not hasattr(model.config, "quantization_config")
    sources, _ = what_to_send(model, "merged")
    assert sources.keys() == {name for name in tensors if not name.endswith("scale_inv")}
    for name, weight in plain.items():
        assert (sources[name].make() - weight).abs().max() < 0.01 * weight.abs().max(), name
