"""What RLTrainer is called with; nothing is loaded for it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import HfArgumentParser, TrainingArguments

from tests.helpers import StubSink, StubSource, load_example, make_tiny_model
from verifiers_rl import LossOutputs, RLConfig, RLTrainer
from verifiers_rl.config import ConfigError
from verifiers_rl.wiring import check_variables


@pytest.fixture
def args(tmp_path):
    return RLConfig(output_dir=str(tmp_path), use_cpu=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"train_dataset": []},
            "train_dataset has no effect in RLTrainer: data and rewards",
        ),
        (
            {"eval_dataset": []},
            r"eval_dataset has no effect .* env_from\(prompts, reward, eval",
        ),
        ({"compute_metrics": print}, "compute_metrics has no effect"),
        ({"tokenizer": None}, "no argument 'tokenizer': .*from_trl.md"),
        (
            {"reward_funcs": print},
            r"no argument 'reward_funcs': data and rewards belong to env: RLTrainer\(model, env_",
        ),
        ({"num_generations": 8}, "no argument 'num_generations': .* see docs/from_trl.md"),
        ({"processing_class": "./model"}, "processing_class='./model': expected a tokenizer"),
        ({"loss_fn": "ppo"}, r"loss_fn='ppo' is no function; .* RLConfig\(loss=\.\.\.\)"),
        ({"advantage_fn": "std"}, r"advantage_fn='std' is no function; .* RLConfig\(advantage="),
        ({"model": "./nowhere"}, "model './nowhere': no such folder"),
        ({"env": None}, "env is None: pass an environment, or an orchestrator"),
        ({"orchestrator": StubSource()}, "env: without effect beside orchestrator"),
        (
            {"env": None, "orchestrator": StubSource(), "advantage_fn": len},
            "advantage_fn: without effect beside orchestrator",
        ),
        (
            {"env": None, "orchestrator": StubSource(), "example_order": len},
            "example_order: without effect beside orchestrator",
        ),
        ({"example_order": "easy"}, "example_order='easy' is no function$"),
        ({"weight_sync": StubSource()}, "weight_sync: StubSource has no policy_version, model"),
        ({"orchestrator": StubSink()}, "orchestrator: StubSink has no num_pending, start, submit"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_at_once(args, options, message):
    with pytest.raises(ConfigError, match=message):
        RLTrainer(
            **{"model": "a/model-that-is-not-looked-for", "env": "an env", "args": args, **options}
        )


def test_variables_that_change_the_numbers_of_a_step_are_refused(args, monkeypatch):
    for name, harmless, value, options in (
        ("ACCELERATE_MIXED_PRECISION", "no", "bf16", {"bf16": True}),
        ("ACCELERATE_MIXED_PRECISION", "no", "fp16", {"bf16": True}),
        ("ACCELERATE_DYNAMO_BACKEND", "NO", "INDUCTOR", None),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "0", "1", None),
        ("DNNL_DEFAULT_FPMATH_MODE", "STRICT", "BF16", {"bf16": True}),
    ):
        monkeypatch.setenv(name, harmless)
        check_variables(args)
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f"{name}={value} in the environment.*; unset it"):
            check_variables(args)
        if options:
            check_variables(SimpleNamespace(tf32=None, **options))
        monkeypatch.delenv(name)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ConfigError, match="ACCELERATE_MIXED_PRECISION=bf16 in the environment"):
        RLTrainer("a/model", "an env", args)


def test_what_a_user_of_trl_types_first_is_answered(args):
    message = r"belong to env: RLTrainer\(model, env_from\(prompts, reward.* docs/from_trl\.md"
    for given in (
        {"reward_funcs": print, "train_dataset": []},
        {"train_dataset": [], "args": TrainingArguments()},
        {"reward_funcs": [print], "args": args, "train_dataset": []},
    ):
        with pytest.raises(ConfigError, match=message):
            RLTrainer("a/model-that-is-not-looked-for", **given)
    with pytest.raises(ConfigError, match="args: expected an RLConfig, got NoneType"):
        RLTrainer("a/model-that-is-not-looked-for", "an env")
    with pytest.raises(ConfigError, match="env is None: pass an environment"):
        RLTrainer("a/model-that-is-not-looked-for", args=args)


def test_arguments_of_another_trainer_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="expected an RLConfig, got TrainingArguments"):
        RLTrainer("model", None, TrainingArguments(str(tmp_path), use_cpu=True))


def test_a_tracker_that_is_none_is_found_before_anything_is_loaded(tmp_path):
    args = RLConfig(output_dir=str(tmp_path), use_cpu=True, report_to="wandbb")
    with pytest.raises(ConfigError, match=r"report_to=.*wandbb is not supported, only"):
        RLTrainer("a/model", "an env", args)


def test_numbers_of_numpy_and_json_of_a_command_line_are_taken(tmp_path):
    args = RLConfig(output_dir=str(tmp_path), batch_size=np.int64(16), learning_rate=np.float32(1))
    assert type(args.batch_size) is int and type(args.learning_rate) is float
    words = ["--output_dir", str(tmp_path), "--loss", "ppo", "--loss_args", '{"eps_low": 0.1}']
    (args,) = HfArgumentParser((RLConfig,)).parse_args_into_dataclasses(words)
    assert args.loss_args == {"eps_low": 0.1}
    with pytest.raises(ConfigError, match="loss_args='eps_low': not valid JSON"):
        RLConfig(output_dir=str(tmp_path), loss_args="eps_low")


# --- The result of a run as the model of the next -------------------------------------------------


def make_trainer(model, folder, tokenizer=None, loss_fn=None, **options):
    args = RLConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=2,
        batch_size=8,
        rollouts_per_example=4,
        max_seq_len=16,
        disable_tqdm=True,
        save_strategy="no",
        **options,
    )
    parts = {"orchestrator": StubSource(), "weight_sync": StubSink()}
    return RLTrainer(model, None, args, tokenizer, loss_fn, **parts)


def test_the_adapter_of_a_run_is_trained_on_and_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_tiny_model().save_pretrained("base")
    load_example("warm_start").make_tokenizer().save_pretrained("base")
    first = make_trainer("./base", tmp_path / "first", use_lora=True, lora_rank=4)
    first.train()
    trained = {name: p.clone() for name, p in first.model.named_parameters() if p.requires_grad}
    monkeypatch.chdir("/")
    second = make_trainer(str(tmp_path / "first"), tmp_path / "second", use_lora=True)
    assert isinstance(second.model, PeftModel)
    own = {name: p for name, p in second.model.named_parameters() if p.requires_grad}
    assert own.keys() == trained.keys()
    assert all(torch.equal(own[name], trained[name]) for name in own)
    second.train()
    assert not all(torch.equal(own[name], trained[name]) for name in own)
    AutoPeftModelForCausalLM.from_pretrained(tmp_path / "second")


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda inputs: inputs.trainer_logprobs.sum(), "returned Tensor; expected LossOutputs"),
        (
            lambda inputs: LossOutputs(inputs.trainer_logprobs),
            r"a loss of shape \(\d+,\); expected a",
        ),
        (lambda inputs: LossOutputs(inputs.advantages.sum()), "a loss without gradient"),
        (
            lambda inputs: LossOutputs((inputs.trainer_logprobs - inputs.reference_logprobs).sum()),
            r"met a None: unsupported .* write @needs\(\"reference_logprobs\"\) above it",
        ),
        (
            lambda inputs: LossOutputs(inputs.reference_logprobs.exp().sum()),
            r"met a None: 'NoneType' .* write @needs\(\"reference_logprobs\"\) above it",
        ),
        (
            lambda inputs: LossOutputs(inputs.trainer_logprobs.sum(), {"x": 1.0}),
            "the metric 'x' of float; expected one number a token",
        ),
    ],
)
def test_a_loss_that_breaks_its_contract_is_told_so(tmp_path, loss_fn, message):
    tokenizer = load_example("warm_start").make_tokenizer()
    trainer = make_trainer(make_tiny_model(), tmp_path, tokenizer, loss_fn, use_lora=False)
    with pytest.raises((TypeError, ValueError), match=message):
        trainer.train()
