import copy
import inspect
import json
import typing
from dataclasses import asdict, fields, replace
from typing import Literal

import pytest
import torch
from transformers import HfArgumentParser, TrainingArguments
from transformers.training_args import OptimizerNames

from tests.helpers import check_lines
from verifiers_rl.config import ConfigError, RLConfig


def make(**options):
    return RLConfig(**{"use_cpu": True, **options})


def test_what_is_left_out_follows_from_the_rest():
    args = make()
    assert args.output_dir == "outputs/rl" and args.bf16 is False


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


def test_every_option_of_ours_has_a_help():
    inherited = {f.name for f in fields(TrainingArguments)}
    own = [f for f in fields(RLConfig) if f.name not in inherited]
    assert len(own) > 30
    assert [f.name for f in own if len(f.metadata["help"]) < 15] == []


# Each is refused with its line in wrong_options.txt.
WRONG = [
    {"batch_size": 100},
    {"share_prefixes": "often"},
    {"micro_batch_size": 2.5},
    {"temperature": 0.0},
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
    {"shuffle": "no"},
    {"gradient_checkpointing": "false"},
    {"bf16": 1},
    {"shuffle": None},
    {"seed": "a"},
    {"max_steps": 1e3},
    {"eval_steps": "two"},
    {"save_total_limit": "2"},
    {"weight_decay": float("inf")},
    {"run_name": 3},
    {"report_to": ["wandb", 3]},
    {"lora_modules_to_save": "lm_head"},
    {"loss_args": {"eps_high": "4"}},
    {"eval_strategy": "step"},
    {"optim": "adamw"},
    {"lr_scheduler_type": "consine"},
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
        report_to=["none"],
        debug="underflow_overflow",
        accelerator_config={"split_batches": False},
        optim=OptimizerNames.SGD,
        lr_scheduler_type="cosine",
        lr_scheduler_kwargs='{"num_cycles": 1}',
        learning_rate=1,
        lora_alpha=16,
        logging_steps=2.0,
        save_steps=0.5,
        fsdp_config={"min_num_params": 0},
        warmup_steps=0.1,
        gradient_checkpointing=True,
        eval_strategy="steps",
        load_best_model_at_end=True,
        save_strategy="best",
        resume_from_checkpoint=True,
    )
    assert args.output_dir == str(tmp_path / "a")
    again = replace(replace(args, max_steps=3), seed=1)  # of values that __post_init__ has set
    assert (again.max_steps, again.seed, again.optim) == (3, 1, "sgd")
    assert copy.deepcopy(args).to_dict() == args.to_dict()


def parse(*words):
    (args,) = HfArgumentParser(RLConfig).parse_args_into_dataclasses([*words, "--use_cpu"])
    return args


# Of each declared type one field, words for it, and what RLConfig makes of them.
OF_A_COMMAND_LINE = [
    ("shuffle", ["false"], False),
    ("overwrite_output_dir", [], True),  # the option alone
    ("gradient_checkpointing", ["true"], True),
    ("max_steps", ["7"], 7),
    ("lora_dropout", ["0.1"], 0.1),
    ("max_tokens", ["9"], 9),
    ("group_filter", ['{"min_reward": -0.5}'], {"min_reward": -0.5}),
    ("eval_sampling", ['{"temperature": 0}'], {"temperature": 0}),
    ("output_dir", ["a b"], "a b"),
    ("loss", ["ppo"], "ppo"),
    ("project", ["words"], "words"),
    ("weight_sync_backend", ["http"], "http"),
    ("lr_scheduler_type", ["cosine"], "cosine"),
    ("report_to", ["none"], []),
    ("report_to", ["tensorboard", "wandb"], ["tensorboard", "wandb"]),
    ("lora_target_modules", ["q_proj", "v_proj"], ["q_proj", "v_proj"]),
    ("lora_target_modules", ["all-linear"], "all-linear"),
    ("lora_modules_to_save", ["lm_head"], ["lm_head"]),
    ("stop", ["</answer>", "a b"], ["</answer>", "a b"]),
    ("loss_args", ['{"eps_high": 3.0}'], {"eps_high": 3.0}),
    ("share_prefixes", ["false"], False),
    ("gradient_masks", ["{}"], {}),
    ("gradient_masks", ['{"dppo": {"max_divergence": 0.1}}'], {"dppo": {"max_divergence": 0.1}}),
    ("chat_template_kwargs", ['{"enable_thinking": false}'], {"enable_thinking": False}),
    ("env_workers", ["3"], 3),
    ("env_workers", ["auto"], "auto"),
    ("eval_strategy", ["steps"], "steps"),
    ("logging_steps", ["2"], 2),
    ("lr_scheduler_kwargs", ['{"num_cycles": 1}'], {"num_cycles": 1}),
]


@pytest.mark.parametrize(("name", "words", "value"), OF_A_COMMAND_LINE)
def test_a_command_line_of_transformers_fills_each_kind_of_field(name, words, value):
    found = getattr(parse(f"--{name}", *words), name)
    assert found == value and isinstance(found, type(value))
    assert getattr(make(**{name: value}), name) == found  # as in a script


def test_each_kind_of_field_is_among_those():
    declared = typing.get_type_hints(RLConfig)
    inherited = {f.name for f in fields(TrainingArguments)}
    own = {name: kind for name, kind in declared.items() if name not in inherited}
    tried = {str(declared[name]) for name, _, _ in OF_A_COMMAND_LINE}
    tried.add(str(declared["kl_target"]))  # in the next test, because it needs kl_beta
    # Each Literal is a kind of its own, and all are parsed alike.
    assert {str(kind) for kind in own.values() if typing.get_origin(kind) is not Literal} <= tried


def test_a_config_and_its_command_line_are_the_same():
    options = {name: value for name, _, value in OF_A_COMMAND_LINE if value != []}
    del options["shuffle"]  # which has to stay beside min_reward
    options |= {"kl_beta": 0.1, "kl_target": 0.2, "run_name": "a name"}
    words = []
    for name, value in options.items():
        is_json = isinstance(value, dict | bool)
        text = json.dumps(value) if is_json else value
        words += [f"--{name}", *(text if isinstance(text, list) else [str(text)])]
    args = make(**options)
    assert parse(*words).to_dict() == args.to_dict()
    (again,) = HfArgumentParser(RLConfig).parse_dict(args.to_dict(), allow_extra_keys=True)
    assert again.to_dict() == args.to_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generations": 8}, r"^num_generations: .*docs/from_trl.md names those of TRL$"),
        ({"foo": 8, "beta": 0.1}, r"^foo: docs/reference.md .*; beta: did you mean 'kl_beta'\?$"),
        ({"batchsize": 8}, r"^batchsize: did you mean 'batch_size'\?$"),
        ({"per_device_train_batch_size": 4}, r"has no effect.*set batch_size and micro_batch_size"),
        ({"remove_unused_columns": False}, r"has no effect.*data comes from the environment"),
        ({"ddp_find_unused_parameters": True}, r"has no effect.*DDP would treat it as unused"),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest_or_where_they_are(options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_a_checker_and_a_reader_still_see_the_options_in_the_signature():
    assert list(inspect.signature(RLConfig).parameters)[:1] == ["output_dir"]
    assert "rollouts_per_example" in inspect.signature(RLConfig).parameters


@pytest.mark.parametrize(
    ("optim", "reason"),
    [
        ("schedule_free_adamw", "the server would sample from the wrong ones"),
        ("adalomo", "it updates weights inside the backward pass"),
        ("galore_adamw_layerwise", "it updates weights inside the backward pass"),
        (OptimizerNames.APOLLO_ADAMW_LAYERWISE, "it updates weights inside the backward pass"),
    ],
)
def test_an_optimizer_that_cannot_work_is_refused_with_the_reason(optim, reason):
    with pytest.raises(ConfigError, match=f"optim=.*cannot be used here: .*{reason}"):
        make(optim=optim)


@pytest.mark.parametrize("optim", ["adamw_torch", "galore_adamw", "apollo_adamw", "adafactor"])
def test_other_optimizers_pass(optim):
    assert make(optim=optim).optim == optim


def test_the_best_model_is_the_one_with_the_highest_evaluated_reward():
    args = make(load_best_model_at_end=True, eval_strategy="steps")
    assert (args.metric_for_best_model, args.greater_is_better) == ("reward", True)
    assert make(save_strategy="best", eval_strategy="steps").metric_for_best_model == "reward"
    assert make().metric_for_best_model is None


def test_deepspeed_that_is_not_installed_is_one_clear_error(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed; `make DEEPSPEED=1 install`"):
        make(deepspeed="zero3.json")


def test_a_run_without_a_name_and_a_server_with_an_ipv6_address_are_fine():
    args = make(run_name=None, vllm_server_host="::1")
    assert (args.output_dir, args.vllm_server_host) == ("outputs/rl", "::1")


def test_a_config_can_be_copied_with_changes():
    assert replace(make(max_steps=3), batch_size=32).max_steps == 3


def test_sampling_options_reach_the_request():
    args = make(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
    )
    assert args.sampling_args() == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logprobs": True,
        "extra_body": {
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "return_token_ids": True,
        },
    }
    assert args.sampling_changes_probabilities() == [
        "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    ]  # fmt: skip


def test_evaluations_sample_as_training_but_for_their_own_options():
    args = make(max_tokens=9, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1)
    assert args.eval_sampling_args() == args.sampling_args()
    own = {"temperature": 0.0, "max_tokens": 20, "top_p": 1.0, "min_p": 0.0, "top_k": 0}
    args = make(max_tokens=9, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, eval_sampling=own)
    evaluated, trained = args.eval_sampling_args(), args.sampling_args()
    assert [evaluated[name] for name in ("temperature", "max_tokens", "top_p")] == [0.0, 20, 1.0]
    assert (evaluated["extra_body"]["top_k"], evaluated["extra_body"]["min_p"]) == (-1, 0.0)
    assert [trained[name] for name in ("temperature", "max_tokens", "top_p")] == [0.5, 9, 0.9]
    # What an environment has of its own lies between the two.
    of_one = args.with_sampling({"max_tokens": 5, "repetition_penalty": 1.5})
    assert of_one.sampling_args()["max_tokens"] == 5
    assert of_one.eval_sampling_args()["max_tokens"] == 20
    assert of_one.eval_sampling_args()["extra_body"]["repetition_penalty"] == 1.5


def test_stop_strings_and_template_variables_reach_every_request_that_should_have_them():
    args = make(
        stop="END", eval_sampling={"stop": []}, chat_template_kwargs='{"enable_thinking": false}'
    )
    assert args.stop == ["END"] and args.sampling_args()["stop"] == ["END"]
    assert "stop" not in args.eval_sampling_args() and "stop" not in make().sampling_args()
    for sampling in (args.sampling_args(), args.eval_sampling_args()):
        assert sampling["extra_body"]["chat_template_kwargs"] == {"enable_thinking": False}
        assert "include_stop_str_in_output" not in sampling["extra_body"]
    of_one = args.with_sampling({"stop": "##", "include_stop_str_in_output": True})
    assert of_one.sampling_args()["stop"] == ["##"]
    assert of_one.sampling_args()["extra_body"]["include_stop_str_in_output"] is True
    assert make(stop=["a"], eval_sampling={"stop": "b"}).eval_sampling_args()["stop"] == ["b"]
    with pytest.raises(ConfigError, match=r"max_token=9: cannot .* did you mean 'max_tokens'\?"):
        args.with_sampling({"max_token": 9})


def test_neutral_sampling_needs_no_warning():
    assert make(temperature=0.3).sampling_changes_probabilities() == []
    assert make().sampling_args()["max_tokens"] is None


@pytest.mark.parametrize("value", [True, False])
def test_gradient_checkpointing_is_passed_on_to_trainer(value):
    args = make(gradient_checkpointing=value)
    assert getattr(args, "activation_checkpointing", args.gradient_checkpointing) is value


def test_a_table_of_a_command_line_that_is_too_deep_is_an_error():
    with pytest.raises(ConfigError, match="not valid JSON: maximum recursion depth"):
        make(loss_args="[" * 9999)


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


def test_other_ranks_wait_as_long_as_rank_0_may_take():
    # Each wave of rollouts has two deadlines, one for scoring; three attempts at all of it.
    def timeout(**options):
        options = {"env_workers": 0, "use_cpu": True, "eval_examples": 64, **options}
        seconds = RLConfig(**options).ddp_timeout
        return seconds / 3 - 5 * 300 - 240

    assert timeout() == (2 * 2 + 2) * 600  # 512 rollouts and 64 of an evaluation, 512 at a time
    options = {"max_concurrent": 128, "generation_timeout": 1000.0}
    assert timeout(**options) == (2 * 5 + 2) * 1000
    assert timeout(**options, eval_rollouts_per_example=4) == (2 * 6 + 2) * 1000
    assert timeout(**options, max_off_policy_steps=2) == (2 * 9 + 3) * 1000
    group_filter = {"min_reward": 0.1, "max_oversampling": 2.0}
    assert timeout(**options, group_filter=group_filter) == (2 * 9 + 2) * 1000
    assert timeout(**options, env_workers=1) == (2 * 5 + 3) * 1000
    assert RLConfig(use_cpu=True, ddp_timeout=90_000).ddp_timeout == 90_000


@pytest.mark.parametrize(
    ("max_oversampling", "expected"), [(1.0, 5), (1.2, 6), (1.5, 7), (3.0, 15)]
)
def test_oversampling_stays_within_its_bound(max_oversampling, expected):
    group_filter = {"min_reward_variance": 1e-6, "max_oversampling": max_oversampling}
    args = RLConfig(batch_size=80, group_filter=group_filter, use_cpu=True)
    assert args.max_groups_per_batch == expected
    assert RLConfig(use_cpu=True, batch_size=80).max_groups_per_batch == 5


def test_what_floats_round_down_is_not_lost_and_the_filter_gets_its_bounds():
    bounds = {"min_reward_variance": 0.01, "min_reward": 0.1, "max_reward": 0.9}
    bounds["max_oversampling"] = 1.15
    config = RLConfig(use_cpu=True, batch_size=1600, group_filter=bounds)
    assert config.max_groups_per_batch == 115
    assert asdict(config.make_filter()) == bounds


def test_a_baseline_needs_a_group_of_two(tmp_path):
    args = RLConfig(output_dir=str(tmp_path), use_cpu=True, rollouts_per_example=1)
    with pytest.raises(ConfigError, match=r"rollouts_per_example=1: must be >= 2: .*'mean'"):
        args.make_advantage()
