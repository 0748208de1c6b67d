"""The flat layout means what ours means."""

import tomllib

import pytest

from tests.helpers import write_environment
from verifiers_rl.cli import flat
from verifiers_rl.cli.layers import TomlError

FLAT = """
model = "org/model"
name = "mine"
max_steps = 100
batch_size = 256
rollouts_per_example = 8
learning_rate = 1e-4
warmup_steps = 10
lora_alpha = 32
oversampling_factor = 2.0
max_async_level = 2
max_inflight_rollouts = 96
seq_len = 4096

[sampling]
max_tokens = 512
temperature = 0.9
top_p = 0.95
top_k = 50
min_p = 0.05
repetition_penalty = 1.1
presence_penalty = 0.1
frequency_penalty = 0.2
stop = ["</answer>"]
include_stop_str_in_output = true
enable_thinking = false
reasoning_effort = "low"

[[env]]
id = "someone/alphabet-sort"
args = { min_turns = 3 }
weight = 2

[[env]]
[env.taskset]
id = "number_guess"
[env.agent.harness]
id = "null"

[lora]
enabled = true
r = 8
dropout = 0.1
target_modules = ["q_proj"]

[difficulty_filter]
enabled = true
min_reward_variance = 0.01
min_reward = 0.1
max_reward = 0.9

[kl_penalty]
enabled = true
beta = 0.02
target_kl = 0.1

[wandb]
project = "words"
name = "mine"

[eval]
interval = 20
num_examples = 30
rollouts_per_example = 4
eval_base_model = false

[[eval.env]]
id = "someone/alphabet-sort"
args = { held_out = true }
num_examples = 50

[checkpoints]
interval = 40
"""
OURS = """
model = "org/model"
[[env]]
id = "someone/alphabet-sort"
args = { min_turns = 3 }
weight = 2
only = "train"
[[env]]
only = "train"
[env.taskset]
id = "number_guess"
[env.agent.harness]
id = "null"
[[env]]
id = "someone/alphabet-sort"
args = { held_out = true }
only = "eval"
eval_examples = 50
[trainer.args]
run_name = "mine"
max_steps = 100
batch_size = 256
rollouts_per_example = 8
learning_rate = 1e-4
warmup_steps = 10
lora_alpha = 32
max_off_policy_steps = 2
max_concurrent = 96
max_seq_len = 4096
max_tokens = 512
temperature = 0.9
top_p = 0.95
top_k = 50
min_p = 0.05
repetition_penalty = 1.1
presence_penalty = 0.1
frequency_penalty = 0.2
stop = ["</answer>"]
include_stop_str_in_output = true
chat_template_kwargs = { enable_thinking = false, reasoning_effort = "low" }
use_lora = true
lora_rank = 8
lora_dropout = 0.1
lora_target_modules = ["q_proj"]
kl_beta = 0.02
kl_target = 0.1
report_to = ["wandb"]
project = "words"
eval_strategy = "steps"
eval_steps = 20
eval_examples = 50
eval_rollouts_per_example = 4
eval_on_start = false
save_steps = 40
[trainer.args.group_filter]
max_oversampling = 2.0
min_reward_variance = 0.01
min_reward = 0.1
max_reward = 0.9
"""


def test_both_layouts_mean_the_same(compose):
    flat_one, ours = compose(FLAT), compose(OURS)
    for name in ("model", "envs", "trainer", "inference"):
        assert getattr(flat_one, name) == getattr(ours, name), name
    options = flat_one.make_args(use_cpu=True).to_dict()
    assert options == ours.make_args(use_cpu=True).to_dict()
    # The example has every key of the layout, but two second names.
    shown = {line.split(" = ")[0] for line in FLAT.splitlines() if " = " in line}
    moved = {key.rpartition(".")[2] for key in flat.MOVED} - {"rank", "alpha"}
    assert moved <= shown
    assert {env.own_name for env in flat_one.envs} == {"alphabet-sort", "number_guess"}


@pytest.mark.parametrize(
    "text, ours",
    [
        ("[lora]\nenabled = false", "use_lora = false"),
        ("[lora]\nrank = 4\nalpha = 8", "lora_rank = 4\nlora_alpha = 8"),
        ("[difficulty_filter]", "group_filter.min_reward_variance = 1e-6"),
        ("[difficulty_filter]\nmin_reward = 0.2", "group_filter.min_reward = 0.2"),
        ("[kl_penalty]\nbeta = 0.1", "kl_beta = 0.1"),
        ("[wandb]", "report_to = ['wandb']"),
        (
            "[eval]\nnum_examples = 9",
            "eval_strategy = 'steps'\neval_steps = 100\neval_examples = 9\neval_on_start = true",
        ),
    ],
)
def test_what_a_table_leaves_out(compose, text, ours):
    config = compose(f'model = "m"\n{text}\n[[env]]\nid = "e"\n')
    assert config.trainer.args == tomllib.loads(ours)
    assert [env.only for env in config.envs] == [None]
    # A later file switches off what an earlier one has set.
    off = "[difficulty_filter]\nenabled = false\n[kl_penalty]\nenabled = false\n"
    args = compose(FLAT, off, words="--oversampling_factor 3.0").make_args(use_cpu=True)
    assert args.make_filter().lets_all_pass and (args.kl_beta, args.kl_target) == (0.0, None)


def test_environments_of_evaluations_have_limits_of_their_own(compose):
    envs = 'model = "m"\n[[env]]\nid = "a"\n[eval]\n{}'
    envs += '[[eval.env]]\nid = "b"\n[[eval.env]]\nid = "c"\nnum_examples = 30\n'
    envs += '[[eval.env]]\nid = "d"\neval_examples = 5\n'
    for own, limit in (("num_examples = 20\n", 20), ("", 256)):
        config = compose(envs.format(own))
        found = [(env.own_name, env.only, env.eval_examples) for env in config.envs]
        assert found == [
            ("a", "train", None),
            ("b", "eval", limit),
            ("c", "eval", 30),
            ("d", "eval", 5),
        ]
        assert config.trainer.args["eval_examples"] == max(limit, 30)
    with pytest.raises(TomlError, match=r"/1/config\.toml: \[eval\] env: write \[\[eval.env\]\]s"):
        compose('model = "m"\n[env]\nid = "e"\n', '[[eval.env]]\nid = "f"\n')


def test_layers_of_both_layouts_compose_and_the_later_one_wins(compose):
    second = "[inference]\ngpus = 0\n[trainer]\ngpus = 0\n[trainer.args]\nbatch_size = 64\n"
    args = compose(FLAT, second).trainer.args
    assert (args["batch_size"], args["temperature"]) == (64, 0.9)
    assert compose(second, FLAT).trainer.args["batch_size"] == 256
    # In one file too.
    both = compose(FLAT + second.replace("batch_size = 64", "seed = 7"))
    assert both.trainer.args == {**compose(FLAT).trainer.args, "seed": 7}
    words = "--sampling.temperature 0.5 --trainer.args.batch_size 32 --env.1.weight 4"
    # Of two keys for one option on the command line, the last.
    words += " --env.2.eval_examples 7 --seq_len 1 --trainer.args.max_seq_len 5"
    config = compose(FLAT, words=words)
    args = config.trainer.args
    assert (args["temperature"], args["max_seq_len"], args["batch_size"]) == (0.5, 5, 32)
    assert [env.weight for env in config.envs] == [2, 4, 1.0]
    assert config.envs[2].eval_examples == 7 and args["eval_examples"] == 50


OURS_BELOW = """
model = "m"
[env]
id = "e"
[trainer.args]
eval_strategy = "steps"
eval_steps = 10
eval_on_start = false
eval_examples = 40
group_filter = { min_reward_variance = 0.05 }
report_to = ["tensorboard", "wandb"]
"""


@pytest.mark.parametrize(
    "words, changed",
    [
        ("--eval.num_examples 20", "eval_examples = 20"),
        ("--eval.interval 5", "eval_steps = 5"),
        ("--difficulty_filter.enabled true", ""),
        ("--wandb.name x", "run_name = 'x'\nreport_to = ['wandb']"),
    ],
)
def test_a_default_of_a_table_never_wins_over_a_value(compose, words, changed):
    below = compose(OURS_BELOW).trainer.args
    assert compose(OURS_BELOW, words=words).trainer.args == below | tomllib.loads(changed)


def test_an_evaluation_that_is_switched_off_has_no_defaults(compose):
    text = 'model = "m"\n[[env]]\nid = "e"\n[eval]\nnum_examples = 5\n'
    config = compose(text, words="--trainer.args.eval_strategy no")
    assert config.trainer.args == {"eval_strategy": "no", "eval_examples": 5}


def test_an_id_of_the_hub_is_the_module_that_its_package_installs(
    tmp_path, compose, monkeypatch, kept_path
):
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "0").mkdir()
    write_environment(tmp_path / "0", "hub_game", ["a", "b"])
    for table in ('id = "someone/hub-game@1.2"\n', 'taskset = { id = "someone/hub-game" }\n'):
        (loaded,) = compose(f'model = "m"\nmax_steps = 1\n[[env]]\n{table}').load_envs()
        assert loaded.name == "hub-game" and len(list(loaded.env.taskset)) == 2
