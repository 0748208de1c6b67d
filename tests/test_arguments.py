"""What RLTrainer is called with; nothing is loaded for it."""

from types import SimpleNamespace

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import TrainingArguments

from tests.helpers import StubSink, StubSource, make_tiny_model, weights_of
from verifiers_rl import LossOutputs, RLConfig, RLTrainer
from verifiers_rl.config import ConfigError
from verifiers_rl.wiring import check_variables

OWN_BATCHES = {"env": None, "orchestrator": StubSource()}
DATA = r"belong to env: RLTrainer\(model, env_from\(prompts, reward.* docs/from_trl\.md"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"eval_dataset": []}, f"eval_dataset has no effect .* {DATA}"),
        ({"reward_funcs": print, "train_dataset": []}, DATA),
        ({"reward_funcs": print}, f"no argument 'reward_funcs': .* {DATA}"),
        ({"compute_metrics": print}, "compute_metrics has no effect"),
        ({"tokenizer": None}, "no argument 'tokenizer': .*from_trl.md"),
        ({"num_generations": 8}, "no argument 'num_generations': .* see docs/from_trl.md"),
        ({"processing_class": "./model"}, "processing_class='./model': expected a tokenizer"),
        ({"loss_fn": "ppo"}, r"loss_fn='ppo' is no function; .* RLConfig\(loss=\.\.\.\)"),
        ({"advantage_fn": "std"}, r"advantage_fn='std' is no function; .* RLConfig\(advantage="),
        ({"example_order": "easy"}, "example_order='easy' is no function$"),
        ({"model": "./nowhere"}, "model './nowhere': no such folder"),
        ({"env": None}, "env is None: pass an environment, or an orchestrator"),
        ({"orchestrator": StubSource()}, "env: without effect beside orchestrator"),
        ({**OWN_BATCHES, "advantage_fn": len}, "advantage_fn: without effect beside orchestrator"),
        ({**OWN_BATCHES, "example_order": len}, "example_order: without effect beside orchestrat"),
        ({"weight_sync": StubSource()}, "weight_sync: StubSource has no policy_version, sleeps"),
        ({"orchestrator": StubSink()}, "orchestrator: StubSink has no num_pending, start, submit"),
        ({"report_to": "wandbb"}, r"report_to=.*wandbb is not supported, only"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_at_once(options, message):
    given = {"model": "a/model-that-is-not-looked-for", "env": "an env", **options}
    report_to = given.pop("report_to", "none")
    args = RLConfig(use_cpu=True, report_to=report_to)
    with pytest.raises(ConfigError, match=message):
        RLTrainer(args=args, **given)


def test_arguments_of_another_trainer_are_refused(tmp_path):
    for args in (TrainingArguments(str(tmp_path), use_cpu=True), None):
        with pytest.raises(ConfigError, match=f"expected an RLConfig, got {type(args).__name__}"):
            RLTrainer("a/model", "an env", args)


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


# --- The result of a run as the model of the next -------------------------------------------------


def test_the_adapter_of_a_run_is_trained_on_and_found_from_anywhere(
    make_trainer, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    make_tiny_model().save_pretrained("base")
    tokenizer.save_pretrained("base")
    first = make_trainer("./base", use_lora=True, lora_rank=4)
    first.train()
    monkeypatch.chdir("/")
    folder = str(tmp_path / "second")
    second = make_trainer(str(tmp_path / "run"), use_lora=True, output_dir=folder)
    assert isinstance(second.model, PeftModel)
    before = weights_of(second.model)
    torch.testing.assert_close(before, weights_of(first.model), rtol=0, atol=0)
    second.train()
    moved = {n for n, p in weights_of(second.model).items() if not torch.equal(p, before[n])}
    assert moved == {name for name, p in second.model.named_parameters() if p.requires_grad}
    AutoPeftModelForCausalLM.from_pretrained(folder)


REFERENCE = r"met a None: .* write @needs\(\"reference_logprobs\"\) above it"


@pytest.mark.parametrize(
    "loss_fn, message",
    [
        (lambda inputs: inputs.trainer_logprobs.sum(), "returned Tensor; expected LossOutputs"),
        (
            lambda inputs: LossOutputs(inputs.trainer_logprobs),
            r"a loss of shape \(\d+,\); expected",
        ),
        (lambda inputs: LossOutputs(inputs.advantages.sum()), "a loss without gradient"),
        (lambda inputs: LossOutputs(inputs.weights - inputs.reference_logprobs), REFERENCE),
        (lambda inputs: LossOutputs(inputs.reference_logprobs.exp().sum()), REFERENCE),
        (
            lambda inputs: LossOutputs(inputs.trainer_logprobs.sum(), {"x": 1.0}),
            "the metric 'x' of float; expected one number a token",
        ),
    ],
)
def test_a_loss_that_breaks_its_contract_is_told_so(make_trainer, loss_fn, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make_trainer(loss_fn=loss_fn).train()
