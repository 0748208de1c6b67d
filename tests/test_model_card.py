import json
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from peft.peft_model import PeftModel

import verifiers_rl
from tests.helpers import make_tiny_model
from verifiers_rl import RLConfig, WeightedEnv
from verifiers_rl.report.model_card import (
    changed_options,
    environment_names,
    model_card,
    write_model_card,
)
from verifiers_rl.report.run_folder import clear_run_folder, is_our_card

STATE = SimpleNamespace(global_step=7, best_global_step=5)


def make_model(name="Qwen/Qwen3-0.6B", **lora):
    model = make_tiny_model()
    model.name_or_path = model.config._name_or_path = name
    if not lora:
        return model
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))


def make_args(folder, **options):
    options = {"use_cpu": True, "output_dir": str(folder), "run_name": "words", **options}
    rows = [{"step": 1, "reward": 0.25}, {"step": 7, "reward": 0.5}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return RLConfig(**options)


def test_the_card_of_an_adapter_says_what_is_known(tmp_path):
    args = make_args(tmp_path, learning_rate=3e-4, hub_token="secret", vllm_server_port=9)
    model = make_model(r=32, target_modules=["v_proj", "q_proj"])
    card = model_card(model, args, STATE, "reverse_text")
    data = ModelCard(card).data.to_dict()
    assert (data["base_model"], data["library_name"]) == ("Qwen/Qwen3-0.6B", "peft")
    for part in (
        "# words",
        "A LoRA adapter of rank 32 (q_proj, v_proj) for `Qwen/Qwen3-0.6B`, trained by reinfo",
        f"verifiers_rl {verifiers_rl.__version__} and verifiers ",
        "- Environment: reverse_text\n",
        "- Optimizer steps: 7, each on 512 rollouts in groups of 16\n",
        "- reward: 0.250 (step 1) -> 0.500 (step 7)\n",
        "- License: not known here",
        "```\nlearning_rate = 0.0003\n```",
        "vllm serve Qwen/Qwen3-0.6B --enable-lora --max-lora-rank 32 "
        f"--lora-modules {tmp_path.name}=.\n",
    ):
        assert part in card, part
    assert "secret" not in card and "best evaluation" not in card


def test_the_card_of_a_whole_model_names_no_local_folder_as_a_model_of_the_hub(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    args = make_args(tmp_path, load_best_model_at_end=True, eval_strategy="steps", use_lora=False)
    card = model_card(make_model(str(base)), args, STATE, [WeightedEnv(None, "a")])
    assert "base_model" not in ModelCard(card).data.to_dict()
    assert f"All weights of `{base}`, trained by reinforcement learning" in card
    assert "- Weights: those of step 5, the best evaluation" in card
    assert "vllm serve .\n" in card and "--enable-lora" not in card


def test_only_options_of_the_algorithm_that_were_changed_are_listed(tmp_path):
    args = make_args(
        tmp_path, loss="ppo", loss_args={"eps_high": 0.3}, optim="sgd", warmup_steps=2,
        lora_rank=4, logging_steps=5, batch_size=32, bf16=False, micro_batch_size=2,
    )  # fmt: skip
    assert changed_options(args) == {
        "lr_scheduler_type": "constant_with_warmup", "optim": "sgd", "warmup_steps": 2,
        "batch_size": 32, "loss": "ppo", "loss_args": {"eps_high": 0.3},
    }  # fmt: skip
    assert changed_options(make_args(tmp_path)) == {}


def test_environments_are_named_by_their_ids_where_they_have_one():
    class MyTaskset:
        config = SimpleNamespace(id="")

    env = SimpleNamespace(config=SimpleNamespace(taskset=SimpleNamespace(id="fix_it")))
    assert environment_names(env) == ["fix_it"]
    assert environment_names("fix_it") == ["fix_it"]
    assert environment_names(MyTaskset()) == ["MyTaskset"]
    assert environment_names(SimpleNamespace(env_id="classic")) == ["classic"]
    assert environment_names([WeightedEnv(env, "a"), WeightedEnv(env, "b")]) == ["a", "b"]


@pytest.mark.filterwarnings("ignore:.*config file:UserWarning")
def test_the_empty_card_of_peft_is_replaced_and_somebodys_own_readme_stays(tmp_path):
    model = make_model(r=4, target_modules=["q_proj"])
    args = make_args(tmp_path)
    assert isinstance(model, PeftModel)
    model.create_or_update_model_card(str(tmp_path))
    assert "More Information Needed" in (tmp_path / "README.md").read_text()
    write_model_card(tmp_path, model, args, STATE)
    model.create_or_update_model_card(str(tmp_path))  # as the final save does
    card = (tmp_path / "README.md").read_text()
    assert "More Information Needed" not in card and "# words" in card
    assert ModelCard(card).data.base_model == "Qwen/Qwen3-0.6B"
    assert is_our_card(tmp_path / "README.md")
    clear_run_folder(tmp_path)
    assert not (tmp_path / "README.md").exists()
    (tmp_path / "README.md").write_text("# Mine")
    write_model_card(tmp_path, model, args, STATE)
    assert (tmp_path / "README.md").read_text() == "# Mine"
