import copy
import tomllib
from dataclasses import asdict, replace

import numpy as np
import pytest
from transformers.training_args import OptimizerNames

from tests.helpers import ROOT, check_lines
from verifiers_rl import RLTrainer
from verifiers_rl.config import ConfigError, RLConfig


def make(**options):
    return RLConfig(**{"use_cpu": True, **options})


@pytest.mark.parametrize("is_real", [False, True])
def test_bfloat16_is_the_default_where_a_gpu_does_not_emulate_it(monkeypatch, is_real):
    monkeypatch.setattr(
        "transformers.TrainingArguments.__post_init__", lambda self: None
    )  # it looks for GPUs
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    supported = lambda including_emulation=True: is_real or including_emulation  # noqa: E731
    monkeypatch.setattr("torch.cuda.is_bf16_supported", supported)
    assert RLConfig().bf16 is is_real and make().bf16 is False


def test_a_value_that_cannot_work_is_one_clear_error():
    """Options in wrong_options.txt, with what is said of them (=>); and those that no TOML has."""
    lines = []
    for case in (ROOT / "tests/wrong_options.txt").read_text().split("\n\n"):
        given, _, _ = case.partition("\n=> ")
        with pytest.raises(ConfigError) as caught:
            make(**tomllib.loads(given))
        lines += [*given.splitlines(), f"=> {caught.value}", ""]
    check_lines(lines[:-1], "wrong_options.txt")
    for given, problem in (
        ({"output_dir": "\ud83d"}, "^output_dir=.*: 'utf-8' codec can't encode character"),
        ({"shuffle": None}, "^shuffle=None: must be a valid boolean"),
        ({"optim": OptimizerNames.APOLLO_ADAMW_LAYERWISE}, "^optim=.*: cannot be used here"),
    ):
        with pytest.raises(ConfigError, match=problem):
            make(**given)
    with pytest.raises(ConfigError, match=r"rollouts_per_example=1: must be >= 2: .*'mean'"):
        make(rollouts_per_example=1).make_advantage()


def test_what_trainingarguments_takes_in_several_types_stays_allowed(tmp_path):
    args = make(
        output_dir=tmp_path / "a", optim=OptimizerNames.SGD, report_to=["none"],
        accelerator_config={"split_batches": False}, learning_rate=np.float32(1),
        batch_size=np.int64(128), logging_steps=2.0, warmup_steps=0.1, eval_strategy="steps",
        load_best_model_at_end=True, save_strategy="best",
    )  # fmt: skip
    assert args.output_dir == f"{tmp_path}/a"
    assert type(args.batch_size) is int and type(args.learning_rate) is float
    # The best model is the one with the highest reward.
    assert (args.metric_for_best_model, args.greater_is_better) == ("reward", True)
    again = replace(replace(args, max_steps=3), seed=1)  # of values that __post_init__ has set
    assert (again.max_steps, again.seed, again.optim) == (3, 1, "sgd")
    assert copy.deepcopy(args).to_dict() == args.to_dict()


SAMPLING = {"temperature": 0.5, "max_tokens": 9, "top_p": 0.9, "presence_penalty": 0.2}
SAMPLING |= {"frequency_penalty": 0.3, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1}


def test_sampling_options_reach_the_request():
    args = make(**SAMPLING)
    assert args.sampling_args() == SAMPLING
    changing = {*SAMPLING} - {"temperature", "max_tokens"}
    assert {*args.sampling_changes_probabilities()} == changing
    assert make(temperature=0.3).sampling_changes_probabilities() == []


def test_stop_strings_and_template_variables_reach_every_request_that_should_have_them():
    thinks = {"enable_thinking": False}
    args = make(stop="END", eval_sampling={"stop": []}, chat_template_kwargs=thinks)
    assert args.sampling_args()["stop"] == ["END"] and "stop" not in args.eval_sampling_args()
    for sampling in (args.sampling_args(), args.eval_sampling_args()):
        assert sampling["chat_template_kwargs"] == thinks
    own = args.with_sampling({"stop": "##", "include_stop_str_in_output": True}).sampling_args()
    assert own["stop"] == ["##"] and own["include_stop_str_in_output"] is True
    assert make(vllm_servers="host:1").servers() == [("host", 1)]  # one needs no list either
    with pytest.raises(ConfigError, match=r"max_token=9: cannot .* did you mean 'max_tokens'\?"):
        args.with_sampling({"max_token": 9})


def test_processes_on_a_cpu_that_know_nothing_of_each_other_are_refused(monkeypatch):
    """accelerate finds no GPU, so it takes each process of torchrun for a run of its own."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *args, **kwargs: None)
    for name, value in (("LOCAL_RANK", "0"), ("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2: .* alone, .* set use_cpu=True"):
        RLTrainer("a/model", "an env", RLConfig())


@pytest.mark.parametrize(
    "batch_size, max_oversampling, expected", [(80, 1.0, 5), (80, 1.5, 7), (1600, 1.15, 115)]
)
def test_oversampling_stays_within_its_bound_whatever_floats_round_down(
    batch_size, max_oversampling, expected
):
    bounds = {"min_reward_variance": 0.01, "min_reward": 0.1, "max_reward": 0.9}
    bounds["max_oversampling"] = max_oversampling
    args = make(batch_size=batch_size, group_filter=bounds)
    assert args.max_groups_per_batch == expected
    assert asdict(args.make_filter()) == bounds
