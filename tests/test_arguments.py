"""What RLTrainer is called with; nothing is loaded for it."""

from types import SimpleNamespace

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import TrainingArguments

from tests.helpers import StubSource, weights_of, write_model
from verifiers_rl import LossOutputs, RLConfig, RLTrainer
from verifiers_rl.config import ConfigError
from verifiers_rl.wiring import check_variables

OWN_BATCHES = {"env": None, "orchestrator": StubSource()}
DATA = r"belong to env: RLTrainer\(model, env_from\(prompts, reward.* docs/from_trl\.md"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"eval_dataset": []}, f"eval_dataset has no effect .* {DATA}"),
        ({"num_generations": 8}, "no argument 'num_generations': .* see docs/from_trl.md"),
        (
            {"tokenizer": "a tokenizer"},
            "tokenizer has no effect in RLTrainer: pass processing_clas",
        ),
        ({"processing_class": "./model"}, "processing_class='./model': expected a tokenizer"),
        ({"loss_fn": "ppo"}, r"loss_fn='ppo' is no function; .* RLConfig\(loss=\.\.\.\)"),
        ({"model": "./nowhere"}, "model './nowhere': no such folder"),
        ({"env": None}, "env is None: pass an environment, or an orchestrator"),
        ({"orchestrator": StubSource()}, "env: without effect beside orchestrator"),
        ({**OWN_BATCHES, "example_order": len}, "example_order: without effect beside orchestrat"),
        ({"weight_sync": StubSource()}, "weight_sync: StubSource has no policy_version, sleeps"),
        ({"args": RLConfig(use_cpu=True, report_to="wandbb")}, "report_to=.*wandbb is not support"),
        ({"args": TrainingArguments(use_cpu=True)}, "expected an RLConfig, got TrainingArguments"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_at_once(options, message):
    given = {"model": "a/model-that-is-not-looked-for", "env": "an env"}
    given |= {"args": RLConfig(use_cpu=True, report_to="none")}
    with pytest.raises(ConfigError, match=message):
        RLTrainer(**given | options)


@pytest.mark.parametrize(
    "name, harmless, value, option",
    [
        ("ACCELERATE_MIXED_PRECISION", "no", "bf16", "bf16"),
        ("ACCELERATE_DYNAMO_BACKEND", "NO", "INDUCTOR", None),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "0", "1", "tf32"),
        ("DNNL_DEFAULT_FPMATH_MODE", "STRICT", "BF16", "bf16"),
    ],
)
def test_variables_that_change_the_numbers_of_a_step_are_refused(
    monkeypatch, name, harmless, value, option
):
    args = RLConfig(use_cpu=True)
    monkeypatch.setenv(name, harmless)
    check_variables(args)
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}={value} in the environment.*; unset it"):
        RLTrainer("a/model", "an env", args)
    if option:
        check_variables(SimpleNamespace(**{"bf16": False, "tf32": None, option: True}))


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_processes_that_would_each_train_alone_in_one_folder_are_refused(monkeypatch, name):
    for other in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(other, raising=False)
    args = RLConfig(use_cpu=True)
    monkeypatch.setenv("SLURM_NTASKS", "2")  # of a batch script, which runs once
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv(name, "1")
    check_variables(args)
    monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError, match=f"{name}=2: .* alone, .* by torchrun or acc"):
        RLTrainer("a/model", "an env", args)
    monkeypatch.setenv("WORLD_SIZE", "1")  # which says that it is alone
    check_variables(args)


# --- The result of a run as the model of the next -------------------------------------------------


def test_the_adapter_of_a_run_is_trained_on_and_found_from_anywhere(
    make_trainer, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_model("base")
    first = make_trainer("./base", use_lora=True, lora_rank=4)
    first.train()
    monkeypatch.chdir("/")
    folder = f"{tmp_path}/second"
    second = make_trainer(f"{tmp_path}/run", use_lora=True, output_dir=folder)
    before = weights_of(second.model)
    torch.testing.assert_close(before, weights_of(first.model), rtol=0, atol=0)
    second.train()
    for name, parameter in second.model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad
    AutoPeftModelForCausalLM.from_pretrained(folder)


REFERENCE = r"met \w+Error\(.*NoneType.* write @needs\(\"reference_logprobs\"\) above it"


@pytest.mark.parametrize(
    "loss, message",
    [
        (lambda inputs: LossOutputs(inputs.trainer_logprobs), r"a loss of shape \(\d+,\); exp"),
        (lambda inputs: LossOutputs(inputs.advantages.sum()), "a loss without gradient"),
        (lambda inputs: LossOutputs(inputs.weights - inputs.reference_logprobs), REFERENCE),
        (
            lambda inputs: LossOutputs(inputs.extras["reward"].sum()),
            r"met KeyError\('reward'\): .* write @needs\(\"reward\"\) above it",
        ),
        (
            lambda inputs: LossOutputs(inputs.trainer_logprobs.sum(), {"x": 1.0}),
            "the metric 'x' of float; expected one number a token",
        ),
        (
            lambda inputs: LossOutputs(inputs.trainer_logprobs.sum(), {"reward": inputs.weights}),
            r"the loss returns a metric \{'reward'\}, a name that the step's own have",
        ),
        (lambda inputs: inputs.trainer_logprobs.sum(), "returned Tensor; expected LossOutputs"),
    ],
)
def test_a_loss_that_breaks_its_contract_is_told_so(make_trainer, loss, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make_trainer(loss_fn=loss).train()


@pytest.mark.parametrize("options", [{"init_lora_weights": "pissa"}, {"bias": "all"}])
def test_an_adapter_that_changes_the_reference_is_refused_where_a_loss_has_one(
    make_trainer, options
):
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
    given = {"peft_config": config, "lora_sync": "merged", "use_lora": True}
    make_trainer(**given)
    (name,) = options
    with pytest.raises(ConfigError, match=f"peft_config.{name}=.*which are the reference"):
        make_trainer(kl_beta=0.1, **given)
