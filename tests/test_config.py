import copy
import inspect
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from tests.helpers import check_lines
from verifiers_rl.config import ConfigError, RLConfig


def make(**options):
    return RLConfig(**{"use_cpu": True, **options})


def test_what_is_left_out_follows_from_the_rest():
    args = make(run_name=None, vllm_server_host="::1")
    assert args.output_dir == "outputs/rl" and args.bf16 is False
    assert args.vllm_server_host == "::1"


@pytest.mark.parametrize("is_real", [False, True])
def test_bfloat16_is_the_default_where_a_gpu_does_not_emulate_it(monkeypatch, is_real):
    monkeypatch.setattr(TrainingArguments, "__post_init__", lambda self: None)  # it looks for GPUs
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: is_real or including_emulation,
    )
    assert RLConfig().bf16 is is_real


# Each is refused with its line in wrong_options.txt.
WRONG = [
    {"batch_size": 100},
    {"share_prefixes": "often"},
    {"micro_batch_size": 2.5},
    {"temperature": 0.0},
    {"temperature": 0.005},
    {"min_p": -0.1},
    {"presence_penalty": 3},
    {"lora_dropout": 1.0},
    {"client_type": "chat"},
    {"deterministic": True, "max_off_policy_steps": 2},
    {"eval_sampling": {"temperature": -0.1}},
    {"eval_sampling": {"top_k": "all"}},
    {"eval_sampling": {"topp": 1}},
    {"eval_sampling": {"max_tokens": 2048}},
    {"eval_sampling": "greedy"},
    {"max_prompt_len": 64, "max_seq_len": 64},
    {"vllm_server_port": 0},
    {"learning_rate": float("nan")},
    {"loss": "grpo"},
    {"loss_args": {"eps": 1.0}},
    {"loss_args": {"eps_high": -1}},
    {"group_filter": {"min_reward_variance": -1}},
    {"group_filter": {"min_reward": "low"}},
    {"group_filter": {"min": 0.1}},
    {"group_filter": {"min_reward": 0.9, "max_reward": 0.1}},
    {"group_filter": {"max_oversampling": 0.5}},
    {"group_filter": {"max_oversampling": 2.0}},
    {"group_filter": {"min_reward": 0.1}, "shuffle": False},
    {"advantage": "gae"},
    {"loss_normalization": "batch"},
    {"gradient_accumulation_steps": 2},
    {"num_train_epochs": 1},
    {"dataloader_num_workers": 2},
    {"torch_compile": 1},
    {"torch_compile_mode": "default"},
    {"resume_from_checkpoint": 3},
    {"vllm_server_host": "http://localhost"},
    {"vllm_server_host": "localhost:8000"},
    {"output_dir": ""},
    {"output_dir": "a\0b"},
    {"output_dir": "a/" + "ä" * 128},
    {"output_dir": "\ud83d"},
    {"run_name": "../../x"},
    {"run_name": "a/.."},
    {"run_name": "a\0b"},
    {"gradient_checkpointing_kwargs": "{a"},
    {"seed": -1},
    {"adam_beta2": 1.0},
    {"save_strategy": "epoch"},
    {"eval_steps": 10},
    {"metric_for_best_model": "loss"},
    {"lr_scheduler_type": "reduce_lr_on_plateau"},
    {"eval_strategy": "steps", "eval_steps": 1.5},
    {"stop": [""]},
    {"stop": [3]},
    {"chat_template_kwargs": {"a": 1}, "client_type": "renderer"},
    {"kl_target": 0.1},
    {"kl_target": 0, "kl_beta": 0.1},
    {"use_lora": "false"},
    {"bf16": 1},
    {"shuffle": None},
    {"max_steps": 1e3},
    {"weight_decay": float("inf")},
    {"run_name": 3},
    {"report_to": ["wandb", 3]},
    {"lora_modules_to_save": "lm_head"},
    {"loss_args": {"eps_high": "4"}},
    {"eval_strategy": "step"},
    {"optim": "adamw"},
    {"lr_scheduler_type": "consine"},
    {"optim": "schedule_free_adamw"},
    {"optim": "adalomo"},
    {"optim": OptimizerNames.APOLLO_ADAMW_LAYERWISE},
    {"loss_args": "eps_low"},
    {"loss_args": 0.2},
    {"loss": "reinforce", "loss_args": {"eps_high": 1}},
    {"loss": "ppo", "loss_args": {"eps_low": 1.5}},
    {"loss": "icepop", "loss_args": {"min_ratio": 6.0}},
    {"gradient_masks": {"tv": {}}},
    {"gradient_masks": {"ipo": {"eps": 1}}},
    {"gradient_masks": {"ipo": {"max_divergence": -1}}},
    {"gradient_masks": {"ratio": {"min_ratio": 5}}},
    {"gradient_masks": {"ipo": 0.1}},
    {"gradient_masks": ["ipo"]},
    {"router_replay": True, "client_type": "renderer"},
    {"sampling_mask": True, "client_type": "renderer"},
    {"sampling_mask": True, "top_k": 1025},
    {"push_to_hub": True, "hub_strategy": "checkpoint"},
    {"lora_target_modules": "q_proj"},
    {"lora_target_modules": []},
    {"lora_target_modules": [1]},
    {"loss": "a:b:c"},
    {"loss": "module:"},
    {"per_device_train_batch_size": 4},
    {"remove_unused_columns": False},
    {"ddp_find_unused_parameters": True},
    {"num_generations": 8},
    {"foo": 8, "beta": 0.1},
    {"batchsize": 8},
]


def test_a_value_that_cannot_work_is_one_clear_error():
    lines = []
    for options in WRONG:
        with pytest.raises(ConfigError) as caught:
            make(**options)
        lines.append(str(caught.value))
    check_lines(lines, "wrong_options.txt")


def test_what_trainingarguments_takes_in_several_types_stays_allowed(tmp_path):
    args = make(
        output_dir=tmp_path / "a",  # a Path
        report_to=["none"], debug="underflow_overflow", optim=OptimizerNames.SGD,
        accelerator_config={"split_batches": False}, fsdp_config={"min_num_params": 0},
        lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycles": 1},
        learning_rate=np.float32(1), batch_size=np.int64(128), lora_alpha=16, logging_steps=2.0,
        save_steps=0.5, warmup_steps=0.1, gradient_checkpointing=True, eval_strategy="steps",
        load_best_model_at_end=True, save_strategy="best", resume_from_checkpoint=True,
    )  # fmt: skip
    assert args.output_dir == str(tmp_path / "a")
    assert type(args.batch_size) is int and type(args.learning_rate) is float
    again = replace(replace(args, max_steps=3), seed=1)  # of values that __post_init__ has set
    assert (again.max_steps, again.seed, again.optim) == (3, 1, "sgd")
    assert copy.deepcopy(args).to_dict() == args.to_dict()


def test_a_checker_and_a_reader_still_see_the_options_in_the_signature():
    first, *others = inspect.signature(RLConfig).parameters
    assert first == "output_dir" and "rollouts_per_example" in others


def test_the_best_model_is_the_one_with_the_highest_evaluated_reward():
    args = make(load_best_model_at_end=True, eval_strategy="steps")
    assert (args.metric_for_best_model, args.greater_is_better) == ("reward", True)
    assert make(save_strategy="best", eval_strategy="steps").metric_for_best_model == "reward"
    assert make().metric_for_best_model is None


def test_deepspeed_that_is_not_installed_is_one_clear_error(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed; `make DEEPSPEED=1 install`"):
        make(deepspeed="zero3.json")


SAMPLING = {"temperature": 0.5, "max_tokens": 9, "top_p": 0.9, "presence_penalty": 0.2}
SAMPLING |= {"frequency_penalty": 0.3}
OF_VLLM = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1}


def test_sampling_options_reach_the_request():
    args = make(**SAMPLING, **OF_VLLM)
    extra = {**OF_VLLM, "return_token_ids": True}
    assert args.sampling_args() == {**SAMPLING, "logprobs": True, "extra_body": extra}
    assert args.sampling_changes_probabilities() == [
        "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    ]  # fmt: skip
    assert make(temperature=0.3).sampling_changes_probabilities() == []
    assert make().sampling_args()["max_tokens"] is None


def test_evaluations_sample_as_training_but_for_their_own_options():
    def flat(sampling):
        return {**sampling, **sampling["extra_body"]}

    args = make(**SAMPLING, **OF_VLLM)
    assert args.eval_sampling_args() == args.sampling_args()
    own = {"temperature": 0.0, "max_tokens": 20, "top_p": 1.0, "min_p": 0.0, "top_k": 0}
    args = make(**SAMPLING, **OF_VLLM, eval_sampling=own)
    assert flat(args.eval_sampling_args()).items() >= {**own, "top_k": -1}.items()
    assert flat(args.sampling_args()).items() >= SAMPLING.items()
    # What an environment has of its own lies between the two.
    of_one = args.with_sampling({"max_tokens": 5, "repetition_penalty": 1.5})
    assert of_one.sampling_args()["max_tokens"] == 5
    evaluated = flat(of_one.eval_sampling_args())
    assert (evaluated["max_tokens"], evaluated["repetition_penalty"]) == (20, 1.5)


def test_stop_strings_and_template_variables_reach_every_request_that_should_have_them():
    thinks = {"enable_thinking": False}
    args = make(stop="END", eval_sampling={"stop": []}, chat_template_kwargs=thinks)
    assert args.stop == ["END"] and args.sampling_args()["stop"] == ["END"]
    assert "stop" not in args.eval_sampling_args() and "stop" not in make().sampling_args()
    for sampling in (args.sampling_args(), args.eval_sampling_args()):
        assert sampling["extra_body"]["chat_template_kwargs"] == thinks
        assert "include_stop_str_in_output" not in sampling["extra_body"]
    own = args.with_sampling({"stop": "##", "include_stop_str_in_output": True}).sampling_args()
    assert own["stop"] == ["##"] and own["extra_body"]["include_stop_str_in_output"] is True
    assert make(stop=["a"], eval_sampling={"stop": "b"}).eval_sampling_args()["stop"] == ["b"]
    with pytest.raises(ConfigError, match=r"max_token=9: cannot .* did you mean 'max_tokens'\?"):
        args.with_sampling({"max_token": 9})


def test_processes_on_a_cpu_that_know_nothing_of_each_other_are_refused(monkeypatch):
    """accelerate finds no GPU, so it takes each process of torchrun for a run of its own."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *args, **kwargs: None)
    for name in ("LOCAL_RANK", "RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    RLConfig()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"use_cpu=False: .* WORLD_SIZE=2 .* set use_cpu=True"):
        RLConfig()


# Each wave of rollouts has two deadlines, one for scoring; three attempts at all of it.
@pytest.mark.parametrize(
    ("options", "num_deadlines"),
    [
        ({}, 2 * 9 + 3),  # two batches of 512 rollouts and 64 of an evaluation, 128 at a time
        ({"max_concurrent": 512}, 2 * 3 + 3),
        ({"eval_rollouts_per_example": 4}, 2 * 10 + 3),
        ({"max_off_policy_steps": 2}, 2 * 13 + 4),
        ({"group_filter": {"min_reward": 0.1, "max_oversampling": 2.0}}, 2 * 17 + 3),
        ({"env_workers": 1}, 2 * 9 + 4),
    ],
)
def test_other_ranks_wait_as_long_as_rank_0_may_take(options, num_deadlines):
    common = {"env_workers": 0, "eval_examples": 64, "max_concurrent": 128}
    args = make(**{**common, "generation_timeout": 1000.0, **options})
    assert args.longest_wait_s() / 3 - 5 * 300 - 240 == num_deadlines * 1000
    assert args.ddp_timeout == 1800 and make(ddp_timeout=60).ddp_timeout == 60


@pytest.mark.parametrize(
    ("batch_size", "max_oversampling", "expected"),
    [(80, 1.0, 5), (80, 1.2, 6), (80, 1.5, 7), (80, 3.0, 15), (1600, 1.15, 115)],
)
def test_oversampling_stays_within_its_bound_whatever_floats_round_down(
    batch_size, max_oversampling, expected
):
    bounds = {"min_reward_variance": 0.01, "min_reward": 0.1, "max_reward": 0.9}
    bounds["max_oversampling"] = max_oversampling
    args = make(batch_size=batch_size, group_filter=bounds)
    assert args.max_groups_per_batch == expected
    assert asdict(args.make_filter()) == bounds


def test_a_baseline_needs_a_group_of_two():
    with pytest.raises(ConfigError, match=r"rollouts_per_example=1: must be >= 2: .*'mean'"):
        make(rollouts_per_example=1).make_advantage()
