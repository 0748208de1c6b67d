import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from tests.conftest import free_port
from tests.helpers import EXAMPLE, example_table, load_example, make_tiny_model
from tests.test_e2e_train import processes_of, write_run
from verifiers_rl.cli.check import Preflight, check_versions
from verifiers_rl.cli.config import EnvTable, RunConfig, toml_arguments
from verifiers_rl.logprobs import token_logprobs_and_entropy
from verifiers_rl.types import Rollout, Sample


@pytest.fixture
def model_folder(tmp_path):
    make_tiny_model().save_pretrained(tmp_path / "model")
    load_example("warm_start").make_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def make_preflight(model_folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # also restores what check_gpus sets

    def make(trainer_args=None, **options):
        options = {
            "envs": [example_table(8, 4)],
            "inference_gpus": 0,
            "trainer_gpus": 0,
            "trainer_args": {"max_seq_len": 64, "vllm_server_port": free_port()}
            | (trainer_args or {}),
            **options,
        }
        return Preflight(RunConfig(EXAMPLE / "rl.toml", str(model_folder), **options))

    return make


@pytest.fixture
def lines(capsys):
    """The lines that the named checks of a preflight print, without what an environment says of
    itself.
    """

    def run(preflight, *names):
        capsys.readouterr()
        for name in names:
            preflight.line(name, getattr(preflight, f"check_{name}"))
        printed = capsys.readouterr().out.splitlines()
        return [line for line in printed if not line.startswith("      ")]

    return run


def test_a_good_configuration_is_ok_in_every_line(make_preflight, lines):
    names = ("gpus", "versions", "options", "port", "model_config", "tokenizer", "environment")
    found = lines(make_preflight(), *names, "first_prompt", "trainer_model")
    assert [line[:6] for line in found] == ["ok    "] * 9, found
    assert found[0] == "ok    gpus: server on CPU, trainer on CPU"
    assert "8 training examples, 4 for evaluation" in found[6]


def test_more_gpus_than_there_are(make_preflight, lines):
    (line,) = lines(make_preflight(inference_gpus=1, trainer_gpus=1), "gpus")
    assert line.startswith("FIX   gpus: ") and "need 2 GPUs, 0 are visible; lower them" in line


def test_versions_name_what_is_installed_and_the_command():
    assert check_versions(["torch>=2", "none>=1; extra == 'vllm'"], on_gpu=False).endswith(
        "all 1 within bounds"
    )
    with pytest.raises(Exception, match=r"torch 2\.\S+; uv pip install 'torch<2'"):
        check_versions(["torch<2"], on_gpu=False)
    with pytest.raises(Exception, match=r"none 0 \(none\); uv pip install 'none>=1'"):
        check_versions(["none>=1; extra == 'vllm'"], on_gpu=True)


def test_a_wrong_trainer_option(make_preflight, lines):
    (line,) = lines(make_preflight({"batch_size": 100}), "options")
    assert line.startswith("FIX   options: ") and "[trainer.args] batch_size=100 is not" in line
    assert "try batch_size=112" in line


def test_a_port_in_use(make_preflight, lines):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = lines(make_preflight({"vllm_server_port": port}), "options", "port")[1]
    assert line == (
        f"FIX   port: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "stop what uses it or choose another vllm_server_port in [trainer.args]"
    )


def test_an_output_folder_that_cannot_be_written(make_preflight, lines, tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    (line,) = lines(make_preflight({"output_dir": str(folder)}), "options", "output_folder")[1:]
    assert line == (
        f"FIX   output_folder: output_dir={str(folder)!r} cannot be written: {tmp_path}/file: "
        "Not a directory; choose another"
    )
    (line,) = lines(make_preflight({"output_dir": "/proc/run"}), "options", "output_folder")[1:]
    assert line.startswith("FIX   output_folder: output_dir='/proc/run' cannot be written: /proc: ")
    good = tmp_path / "new" / "run"
    (line,) = lines(make_preflight({"output_dir": str(good)}), "options", "output_folder")[1:]
    assert line.startswith(f"ok    output_folder: {good}, ") and line.endswith(" GB free")
    assert not good.parent.exists()


def test_an_output_folder_that_a_run_has_used(make_preflight, lines, tmp_path):
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text('{"global_step": 3}')
    preflight = make_preflight({"output_dir": str(tmp_path)})
    line = lines(preflight, "options", "output_folder")[1]
    assert line.startswith("FIX   output_folder: ") and "holds a run already" in line
    preflight.resume = True
    (line,) = lines(preflight, "output_folder")
    assert line.startswith("ok    ") and line.endswith(f"resuming from {checkpoint}")


@pytest.mark.parametrize(
    ("report_to", "found"),
    [
        ("none", "ok    trackers: none"),
        ("clearml", "FIX   trackers: report_to='clearml': it is not installed; uv pip install"),
        (["comet_ml"], "FIX   trackers: report_to='comet_ml': it is not installed"),
        ("wandbb", "FIX   trackers: report_to='wandbb': no such tracker; known: "),
    ],
)
def test_a_tracker_that_is_not_there(make_preflight, lines, report_to, found):
    line = lines(make_preflight({"report_to": report_to}), "options", "trackers")[1]
    assert line.startswith(found)


def test_sequences_longer_than_the_model_can(make_preflight, lines):
    line = lines(make_preflight({"max_seq_len": 129}), "options", "model_config")[1]
    assert line.startswith("FIX   model_config: max_seq_len=129 in [trainer.args]")
    assert "max_position_embeddings=128; lower it" in line


def test_a_tokenizer_without_template_or_end(make_preflight, lines, model_folder):
    tokenizer = load_example("warm_start").make_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(model_folder)
    (line,) = lines(make_preflight(), "tokenizer")
    assert line.startswith("FIX   tokenizer: ") and line.endswith(
        "has no eos_token; set it in its tokenizer_config.json"
    )
    (model_folder / "chat_template.jinja").unlink()
    (line,) = lines(make_preflight(), "tokenizer")
    assert "has no chat template; choose an instruct model, or put a chat_template.jinja" in line


def test_an_environment_that_does_not_load(make_preflight, lines):
    def said(table):
        line = lines(make_preflight(envs=[table]), "options", "environment")[1]
        assert line.startswith("FIX   environment: ")
        return line

    line = said(EnvTable("nowhere", v1={"taskset": {"id": "nowhere"}}))
    assert "id='nowhere': no module 'nowhere' is installed" in line and "'nowhere'" in line
    line = said(EnvTable("nowhere"))
    assert ": [env] id='nowhere': no module 'nowhere' is installed nor beside the TOML in" in line


def test_prompts_that_do_not_fit(make_preflight, lines):
    names = ("options", "tokenizer", "environment", "first_prompt")
    line = lines(make_preflight({"max_seq_len": 6}), *names)[3]
    assert "max_seq_len=6 leaves none for the reply; raise max_seq_len" in line
    line = lines(make_preflight({"max_prompt_len": 4}), *names)[2]
    assert "12 were longer than max_prompt_len" in line


def test_an_adapter_that_fits_nowhere(make_preflight, lines):
    preflight = make_preflight({"lora_target_modules": ["nothing"]})
    line = lines(preflight, "gpus", "options", "trainer_model")[2]
    assert line.startswith("FIX   trainer_model: lora_target_modules=['nothing']: ")


def test_a_check_without_its_precondition_is_skipped(make_preflight, capsys):
    preflight = make_preflight()
    preflight.line("environment", preflight.check_environment, "trainer options", "GPUs")
    assert capsys.readouterr().out == "skip  environment: needs trainer options, GPUs\n"


@pytest.mark.parametrize("use_lora", [True, False])
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("pushed", None),
        ("before", "no nearer to the pushed weights than to those before"),
        ("inexact", "the server samples from a different model than the one being trained"),
        ("half", "on which the push had 0.5 x the effect"),
    ],
)
def test_logprobs_tell_which_weights_the_server_has(
    make_preflight, lines, monkeypatch, use_lora, weights, message
):
    preflight = make_preflight({"use_lora": use_lora})
    lines(preflight, "gpus", "options", "trainer_model")

    class Server:
        """What the checks ask of client and weight sync."""

        model_name = "policy"

        def push(self, model, policy_version):
            return {"sync_s": 0.1, "sync_bytes": 1e6}

        def status(self):
            return {"dtype": "float32"}

        def complete(self, body, timeout_s):
            # make_tiny_model has the weights of the folder, and a new adapter changes none.
            model = make_tiny_model() if weights == "before" else preflight.model
            ids = torch.tensor([*body["prompt"], 7, 8, 9])
            logits = model(input_ids=ids[None]).logits[0, -4:-1].detach()
            logprobs, _ = token_logprobs_and_entropy(logits, ids[-3:], body["temperature"])
            if weights == "inexact":
                logprobs[1] += 0.02
            if weights == "half":  # as a server that scales an adapter differently
                before = make_tiny_model()(input_ids=ids[None]).logits[0, -4:-1].detach()
                before, _ = token_logprobs_and_entropy(before, ids[-3:], body["temperature"])
                logprobs = (logprobs + before) / 2
            reply = {"token_ids": [7, 8, 9], "logprobs": {"token_logprobs": logprobs.tolist()}}
            return {"choices": [reply]}

    monkeypatch.setattr(preflight, "_make_sync", Server)
    preflight.client.close()
    preflight.client = Server()
    preflight.prompt_ids = [1, 2, 3]
    sync, logprobs = lines(preflight, "sync", "logprobs")
    assert sync == "ok    sync: 1 MB in 0.10 s"
    if message is None:
        assert re.match(
            r"ok    logprobs: \S+ nats apart on average over 3 sampled tokens, .*"
            r"; the push had 1 x the effect$",
            logprobs,
        )
    else:
        assert logprobs.startswith("FIX   logprobs: ") and message in logprobs


@pytest.fixture
def mismatch_of(make_preflight, capsys):
    """What a check of the mismatch prints, of tokens to which the server gives 0.1 nats more."""

    def run(status, trainer_args=None, prepare=lambda preflight: None, more=0.1):
        preflight = make_preflight(trainer_args)
        for name in ("gpus", "options", "model_config", "trainer_model"):
            preflight.line(name, getattr(preflight, f"check_{name}"))
        preflight.client.close()
        status = {"head_dtype": None, "policy_version": None, **status}
        preflight.client = SimpleNamespace(status=lambda: status, close=lambda: None)
        prepare(preflight)
        ids = torch.arange(40) * 7 % 250
        logits = make_tiny_model()(input_ids=ids[None]).logits[0, :-1].detach()
        logprobs = token_logprobs_and_entropy(logits, ids[1:], preflight.args.temperature)[0]
        theirs = [0.0, *(logprobs.numpy() + more)]
        preflight.samples = [Sample(ids, [0, *[1] * 39], theirs, [-1, *[0] * 39])]
        capsys.readouterr()
        preflight.line("mismatch", preflight.check_mismatch)
        return capsys.readouterr().out

    return run


def test_the_advice_is_about_what_this_run_does(mismatch_of):
    # A trainer in float32 has its head in float32.
    said = mismatch_of({"dtype": "bfloat16"})
    assert 'dtype = "float32" in [inference.args]' in said
    assert 'hf_overrides = { head_dtype = "float32" }' in said and "[trainer.args]" not in said

    # Environments that are only evaluated on are sampled for no step.
    def add_evaluated(preflight):
        table = example_table(8, 4)
        table.only, table.sampling = "eval", {"top_k": 5}
        preflight.config.envs.append(table)

    assert "sampling_mask" not in mismatch_of({"dtype": "float32"}, prepare=add_evaluated)

    # A quantised checkpoint cannot be served as plain weights.
    def quantize(preflight):
        preflight.model_config.quantization_config = {"quant_method": "mxfp4"}

    quantized = {"dtype": "float32", "quantization": "mxfp4"}
    assert "leave quantization out" in mismatch_of(quantized)
    assert "leave quantization out" not in mismatch_of(quantized, prepare=quantize)


@pytest.mark.parametrize(("num_failed", "start"), [(1, "ok  "), (2, "FIX "), (4, "FIX ")])
def test_rollouts_that_fail_are_counted_with_the_first_error(
    make_preflight, lines, num_failed, start
):
    preflight = make_preflight({"rollouts_per_example": 4})
    lines(preflight, "gpus", "options")

    class Runner:
        def sizes(self, split):
            return [8]

        async def open(self): ...

        async def close(self): ...

        async def run_group(self, split, index, num_rollouts, *args):
            errors = [*(OSError(f"no space {n}") for n in range(num_failed)), *[None] * 4]
            return [Rollout(0, "", env="words", reward=1.0, error=e) for e in errors[:num_rollouts]]

    preflight.client.close()
    preflight.client = SimpleNamespace(served_model_name="m", close=lambda: None)
    preflight.runner = Runner()
    (line,) = lines(preflight, "rollouts")
    assert line.startswith(f"{start}  rollouts: ") and "no space 0" in line
    if num_failed < 4:
        assert f"{num_failed} of 4 failed, the first with: OSError: no space 0" in line


def test_rollouts_sampled_by_top_p_alone_name_the_sampling_mask(make_preflight, capsys):
    preflight = make_preflight({"top_p": 0.9, "temperature": 0.7})
    for name in ("gpus", "options", "model_config", "trainer_model"):
        preflight.line(name, getattr(preflight, f"check_{name}"))
    preflight.client.close()
    status = {"dtype": "float32", "head_dtype": "float32", "policy_version": None}
    preflight.client = SimpleNamespace(status=lambda: status, close=lambda: None)
    ids = torch.arange(40) * 7 % 250
    logits = make_tiny_model()(input_ids=ids[None]).logits[0, :-1].detach()
    logprobs = token_logprobs_and_entropy(logits, ids[1:], 0.7)[0].numpy()
    mask = [0, *[1] * 39]
    preflight.samples = [Sample(ids, mask, [0.0, *(logprobs + 0.1)], [-1, *[0] * 39])]
    capsys.readouterr()
    preflight.line("mismatch", preflight.check_mismatch)
    *table, line = capsys.readouterr().out.splitlines()
    assert line.startswith("ok    mismatch: mismatch_kl 4.8e-03 over 39 tokens, 1.0e-01 nats apart")
    assert table[1].split()[:2] == ["all", "39"]
    assert "to mend it: sampling_mask = true: top_p took tokens away" in table[-1]
    preflight.samples[0].inference_logprobs[1:] = logprobs + 0.5
    preflight.line("mismatch", preflight.check_mismatch)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("FIX   mismatch: ") and "above 0.02; sampling_mask = true" in line
    status["policy_version"] = 3
    preflight.line("mismatch", preflight.check_mismatch)
    assert "weights of an earlier trainer" in capsys.readouterr().out


def test_another_tokenizer_on_the_server(make_preflight, lines, monkeypatch):
    preflight = make_preflight()
    lines(preflight, "options", "tokenizer", "environment", "first_prompt")
    ids = preflight.prompt_ids
    monkeypatch.setattr(preflight, "_post", lambda path, body: {"tokens": [*ids[:2], 65]})
    (line,) = lines(preflight, "served_tokenizer")
    assert f"3 tokens there and {len(ids)} here, different from position 2: " in line
    assert "take tokenizer and chat_template out of [inference.args]" in line


def test_the_file_may_follow_check_without_an_at_sign():
    assert toml_arguments(["--check-layers", "a.toml"]) == ([Path("a.toml")], ["--check-layers"])
    for words in (["--check", "a.toml"], ["--check", "@", "a.toml"], ["@a.toml", "--check"]):
        assert toml_arguments(words) == ([Path("a.toml")], ["--check"])


# --- Through the command ----------------------------------------------------------------------


def run_check(toml, what="--check", **environment):
    return subprocess.run(
        [sys.executable, "-m", "verifiers_rl.cli.rl", what, "@", str(toml)],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
def test_what_is_wrong_has_a_line_each_and_no_server_starts(model_folder, tmp_path):
    (model_folder / "chat_template.jinja").unlink()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        toml = write_run(tmp_path, model_folder)
        text = toml.read_text().replace("vllm_server_port = ", "vllm_server_port = 0 #")
        port = taken.getsockname()[1]
        toml.write_text(text.replace("= 0 #", f"= {port} #"))
        done = run_check(toml)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    checks = [line for line in done.stdout.splitlines()[1:-1] if line[:6] != "      "]
    status = {line[6:].split(":")[0]: line[:4].strip() for line in checks}
    assert status == {
        "GPUs": "ok",
        "versions": "ok",
        "trainer options": "ok",
        "output folder": "ok",
        "trackers": "ok",
        "port": "FIX",
        "model config": "ok",
        "tokenizer": "FIX",
        "environment": "ok",
        "first prompt": "skip",
        "trainer's model": "ok",
        "server": "skip",
        "server's tokenizer": "skip",
        "rollouts": "skip",
        "mismatch": "skip",
        "one weight sync": "skip",
        "logprobs": "skip",
    }
    assert "skip  server: needs port\n" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("vf-rl: 2 to fix, after ")


@pytest.mark.e2e
def test_a_run_that_works_is_ok_and_leaves_nothing_behind(warm_start, tmp_path):
    toml = write_run(tmp_path, warm_start)
    # A short name: vLLM's sockets lie there, and their paths have 107 characters at most.
    with tempfile.TemporaryDirectory() as temporary:
        done = run_check(toml, "--check-layers", VF_RL_TEST=str(tmp_path), TMPDIR=temporary)
        left = list(Path(temporary).glob("vf-rl-check-*"))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    first, *checks, last = done.stdout.splitlines()
    assert first == f"vf-rl: checking {toml}" and last.startswith("vf-rl: all is ok, after ")
    assert [line[:6] for line in checks if not line.startswith("      ")] == ["ok    "] * 18
    assert any(line.startswith("ok    layers: no layer stands out; ") for line in checks)
    num_layers = AutoConfig.from_pretrained(warm_start).num_hidden_layers
    assert sum(line.startswith("      behind layer ") for line in checks) == num_layers
    (found,) = [line for line in checks if line.startswith("ok    mismatch: ")]
    assert re.match(r"ok    mismatch: mismatch_kl \S+ over \d+ tokens, ", found)
    assert not any("to mend it" in line for line in checks)  # float32 on both sides
    assert processes_of(tmp_path) == {}
    assert not left
    assert not (tmp_path / "run").exists()
