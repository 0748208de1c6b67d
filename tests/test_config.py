from dataclasses import asdict, fields, replace

import pytest
from transformers import TrainingArguments

from verifiers_rl.config import ConfigError, RLConfig


def make(**options):
    return RLConfig(**{"use_cpu": True, **options})


def test_the_defaults_are_the_documented_ones():
    args = make()
    expected = {
        "use_lora": True,
        "lora_rank": 16,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "lora_use_rslora": False,
        "lora_target_modules": [
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ],
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "max_steps": 500,
        "micro_batch_size": 8,
        "batch_size": 512,
        "rollouts_per_example": 16,
        "max_seq_len": 2048,
        "max_tokens": None,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": None,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_off_policy_steps": 1,
    }
    assert {name: getattr(args, name) for name in expected} == expected
    assert args.output_dir == "outputs/rl" and args.bf16 is False


def test_every_option_of_ours_has_a_help():
    inherited = {f.name for f in fields(TrainingArguments)}
    own = [f for f in fields(RLConfig) if f.name not in inherited]
    assert len(own) > 30
    assert [f.name for f in own if len(f.metadata["help"]) < 15] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch_size": 100},
            r"batch_size=100 is not a multiple of rollouts_per_example=16; try batch_size=112",
        ),
        ({"rollouts_per_example": 1}, r"rollouts_per_example=1: must be >= 2"),
        ({"batch_size": 0}, r"batch_size=0: must be an integer >= 1"),
        ({"micro_batch_size": 2.5}, r"micro_batch_size=2.5: must be an integer"),
        ({"temperature": 0.0}, r"temperature=0.0: must be a number > 0"),
        ({"top_p": 1.5}, r"top_p=1.5: must be > 0 and <= 1"),
        ({"top_k": 0}, r"top_k=0: must be an integer >= 1"),
        ({"min_p": -0.1}, r"min_p=-0.1"),
        ({"repetition_penalty": 0}, r"repetition_penalty=0"),
        ({"presence_penalty": 3}, r"presence_penalty=3: must be from -2 to 2"),
        ({"lora_rank": 0}, r"lora_rank=0"),
        ({"lora_dropout": 1.0}, r"lora_dropout=1.0"),
        ({"temperature": 2.5}, r"temperature=2.5: must be at most 2"),
        ({"client_type": "chat"}, r"client_type='chat': must be one of openai_chat_completions, "),
        ({"max_off_policy_steps": -1}, r"max_off_policy_steps=-1: must be an integer >= 0"),
        (
            {"max_prompt_len": 64, "max_seq_len": 64},
            r"max_prompt_len=64: must be below max_seq_len=64",
        ),
        ({"max_tokens": 4096}, r"max_tokens=4096: must be below max_seq_len=2048"),
        ({"vllm_server_port": 0}, r"vllm_server_port=0: must be a port"),
        ({"generation_timeout": 0}, r"generation_timeout=0"),
        ({"weight_sync_backend": "mpi"}, r"weight_sync_backend='mpi': must be one of auto, nccl"),
        ({"lora_sync": "files"}, r"lora_sync='files': must be one of adapter, merged"),
        ({"learning_rate": float("nan")}, r"learning_rate=nan"),
        ({"loss": "grpo"}, r"loss='grpo': must be one of cispo, ppo"),
        ({"loss_args": {"eps": 1.0}}, r"loss_args has 'eps'.*it takes eps_high"),
        ({"loss_args": {"eps_high": -1}}, r"eps_high=-1 must be a number >= 0"),
        ({"kl_beta": -0.1}, r"kl_beta=-0.1: must be a number >= 0"),
        ({"min_reward_variance": -1}, r"min_reward_variance=-1: must be a number >= 0"),
        ({"min_reward": "low"}, r"min_reward='low': must be a number, or left out"),
        (
            {"min_reward": 0.9, "max_reward": 0.1},
            r"min_reward=0.9: must not be above max_reward=0.1",
        ),
        ({"max_oversampling": 0.5}, r"max_oversampling=0.5: must be a number >= 1"),
        ({"max_oversampling": 2.0}, r"max_oversampling=2.0: without effect unless min_reward_var"),
        ({"min_reward": 0.1, "shuffle": False}, r"shuffle=False: with a filter it must be True"),
        ({"advantage": "gae"}, r"advantage='gae': must be one of mean, std, leave_one_out, maxrl"),
        ({"loss_normalization": "batch"}, r"loss_normalization='batch': must be one of token,"),
        ({"max_tokens_per_microbatch": 0}, r"max_tokens_per_microbatch=0: must be an integer >= 1"),
        (
            {"gradient_accumulation_steps": 2},
            r"gradient_accumulation_steps=2 has no effect.*set batch_size",
        ),
        ({"num_train_epochs": 1}, r"num_train_epochs=1 has no effect.*set max_steps"),
        ({"dataloader_num_workers": 2}, r"dataloader_num_workers=2 has no effect"),
        ({"torch_compile": True}, r"torch_compile=True has no effect.*not supported yet"),
    ],
)
def test_a_value_that_cannot_work_is_one_clear_error(options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_deepspeed_that_is_not_installed_is_one_clear_error(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed; `make DEEPSPEED=1 install`"):
        make(deepspeed="zero3.json")


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


def test_neutral_sampling_needs_no_warning():
    assert make(temperature=0.3).sampling_changes_probabilities() == []
    assert make().sampling_args()["max_tokens"] is None


@pytest.mark.parametrize("value", [True, False])
def test_gradient_checkpointing_is_passed_on_to_trainer(value):
    args = make(gradient_checkpointing=value)
    assert getattr(args, "activation_checkpointing", args.gradient_checkpointing) is value


def test_other_ranks_wait_as_long_as_rank_0_may_take():
    # Each wave of rollouts has two deadlines, one for scoring; three attempts at all of it.
    def timeout(**options):
        seconds = RLConfig(use_cpu=True, eval_examples=64, **options).ddp_timeout
        return seconds / 3 - 5 * 300 - 240

    assert timeout() == (2 * 2 + 2) * 600  # 512 rollouts and 64 of an evaluation, 512 at a time
    options = {"max_concurrent": 128, "generation_timeout": 1000.0}
    assert timeout(**options) == (2 * 5 + 2) * 1000
    assert timeout(**options, eval_rollouts_per_example=4) == (2 * 6 + 2) * 1000
    assert timeout(**options, max_off_policy_steps=2) == (2 * 9 + 3) * 1000
    assert timeout(**options, min_reward=0.1, max_oversampling=2.0) == (2 * 9 + 2) * 1000
    assert timeout(**options, env_workers=1) == (2 * 5 + 3) * 1000
    assert RLConfig(use_cpu=True, ddp_timeout=90_000).ddp_timeout == 90_000


@pytest.mark.parametrize(
    ("max_oversampling", "expected"), [(1.0, 5), (1.2, 6), (1.5, 7), (3.0, 15)]
)
def test_oversampling_stays_within_its_bound(max_oversampling, expected):
    options = {"batch_size": 80, "max_oversampling": max_oversampling, "use_cpu": True}
    assert RLConfig(**options, min_reward_variance=1e-6).max_groups_per_batch == expected
    assert RLConfig(use_cpu=True, batch_size=80).max_groups_per_batch == 5


def test_what_floats_round_down_is_not_lost_and_the_filter_gets_its_bounds():
    options = {"min_reward_variance": 0.01, "min_reward": 0.1, "max_reward": 0.9}
    config = RLConfig(use_cpu=True, batch_size=1600, max_oversampling=1.15, **options)
    assert config.max_groups_per_batch == 115
    assert asdict(config.group_filter()) == options
