import re
from functools import partial

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests.families import write_family
from tests.helpers import TARGETS, make_tiny_llama, make_tiny_model, make_tiny_moe, weights_of
from verifiers_rl import RLTrainer
from verifiers_rl.config import ConfigError, RLConfig
from verifiers_rl.models import (
    check_policy,
    default_target_modules,
    load_policy,
)

DELTA_NET = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"}


def default_layers(model):
    """The default without the blocks' numbers and the names of attention and MLP."""
    return {re.sub(r"^model\.layers\.\d+\.\w+\.", "", n) for n in default_target_modules(model)}


def options(**given):
    return RLConfig(use_cpu=True, **given)


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "experts"])
def qwen3_5(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_5")
    write_family("qwen3_5_moe" if request.param else "qwen3_5", folder)
    return AutoModelForCausalLM.from_pretrained(folder), request.param


@pytest.mark.parametrize(
    "make, adapted",
    [(make_tiny_model, TARGETS), (make_tiny_llama, TARGETS), (make_tiny_moe, TARGETS[:4])],
)
def test_the_default_adapts_the_same_seven_layers_of_most_models(make, adapted):
    """And leaves experts that are one tensor alone."""
    assert default_layers(make()) == {*adapted}


def test_in_a_model_of_more_layers_the_default_has_the_shortest_names():
    config = make_tiny_model().config
    config.num_hidden_layers, config.layer_types = 3, ["full_attention"] * 3
    policy = load_policy(type(make_tiny_model())(config), options())
    assert policy.peft_config["default"].target_modules == {*TARGETS}


def test_the_default_adapts_the_delta_nets_of_qwen3_5_and_neither_head_router_nor_experts(qwen3_5):
    model, has_experts = qwen3_5
    shared = "shared_expert." * has_experts
    expected = DELTA_NET | {*TARGETS[:4]} | {f"{shared}{name}" for name in TARGETS[4:]}
    assert default_layers(model) == expected


def test_a_model_without_known_layers_asks_for_their_names():
    model = torch.nn.Linear(2, 2)
    model.config = make_tiny_model().config
    with pytest.raises(ConfigError, match=r"lora_target_modules: Linear has no.*use_lora=False"):
        default_target_modules(model)


def test_all_linear_is_pefts(qwen3_5):
    model, has_experts = qwen3_5
    policy = load_policy(model, options(lora_target_modules="all-linear"))
    targets = policy.peft_config["default"].target_modules
    assert ("shared_expert_gate" in targets) == has_experts and "lm_head" not in targets
    assert targets > DELTA_NET
    policy.unload()


def test_an_adapter_beside_one_that_the_model_has_is_refused():
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    model = get_peft_model(make_tiny_model(), lora)
    with pytest.raises(ConfigError, match=r"peft_config: the model has an adapter already; merge"):
        load_policy(model, RLConfig(use_cpu=True), LoraConfig(target_modules=["v_proj"]))


@pytest.mark.parametrize("use_lora", [False, True])
def test_an_optimizer_without_the_weights_that_are_trained_is_refused(make_trainer, use_lora):
    model = make_tiny_model()  # in whose place an adapter is trained
    optimizers = torch.optim.SGD(model.parameters(), lr=0.5), None
    make = partial(make_trainer, model, kind=partial(RLTrainer, optimizers=optimizers))
    before = weights_of(model)
    if use_lora:
        with pytest.raises(ConfigError, match="optimizers: it lacks trained weights, such as"):
            make(use_lora=True)
        return
    make(max_steps=1).train()
    assert not all(torch.equal(before[name], weight) for name, weight in model.named_parameters())


def test_only_a_trainable_adapter_that_is_called_default_is_trained(tmp_path):
    def adapted(name="default"):
        return get_peft_model(make_tiny_model(), lora, adapter_name=name)

    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    adapted().save_pretrained(tmp_path)
    frozen = PeftModel.from_pretrained(make_tiny_model(), tmp_path)
    with pytest.raises(ConfigError, match=r"frozen.*is_trainable=True"):
        check_policy(load_policy(frozen, options()), options())
    (by_transformers := make_tiny_model()).load_adapter(str(tmp_path))
    (second := adapted()).add_adapter("second", lora)
    load_policy(second, options())  # not the active one
    second.set_adapter("second")
    for model in (adapted("policy"), second, by_transformers):
        with pytest.raises(ConfigError, match="a PeftModel's and be called 'default'"):
            load_policy(model, options())
