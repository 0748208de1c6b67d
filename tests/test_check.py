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

from tests.conftest import free_port
from tests.helpers import EXAMPLE, example_table, load_example, make_tiny_model
from tests.test_e2e_train import processes_of, write_run
from verifiers_rl.cli.check import Preflight
from verifiers_rl.cli.config import EnvTable, RunConfig, toml_arguments
from verifiers_rl.logprobs import token_logprobs_and_entropy
from verifiers_rl.types import Rollout, Sample

OFFLINE = ("gpus", "options", "model", "environment")


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
    """The last lines that the named checks of a preflight print."""

    def run(preflight, *names):
        found = []
        for name in names:
            capsys.readouterr()
            preflight.line(name, getattr(preflight, f"check_{name}"))
            found.append(capsys.readouterr().out.splitlines()[-1])
        return found

    return run


def test_a_good_configuration_is_ok_in_every_line(make_preflight, lines):
    found = lines(make_preflight(), *OFFLINE)
    assert [line[:6] for line in found] == ["ok    "] * 4, found
    assert found[0] == "ok    gpus: server on CPU, trainer on CPU"
    assert "8 training examples, 4 for evaluation" in found[3]


def test_more_gpus_than_there_are(make_preflight, lines):
    (line,) = lines(make_preflight(inference_gpus=1, trainer_gpus=1), "gpus")
    assert line.startswith("FIX   gpus: ") and "need 2 GPUs, 0 are visible; lower them" in line


def test_a_port_in_use(make_preflight, lines):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (line,) = lines(make_preflight({"vllm_server_port": port}), "port")
    assert line == (
        f"FIX   port: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "stop what uses it or choose another vllm_server_port in [trainer.args]"
    )


def test_a_wrong_option_folder_or_tracker(make_preflight, lines, tmp_path):
    (line,) = lines(make_preflight({"batch_size": 100}), "options")
    assert "[trainer.args] batch_size=100: must be" in line and "try batch_size=112" in line
    (line,) = lines(make_preflight({"output_dir": "/proc/run"}), "options")
    assert line.startswith("FIX   options: output_dir='/proc/run' cannot be written: /proc: ")
    (line,) = lines(make_preflight({"report_to": "clearml"}), "options")
    assert "report_to='clearml': it is not installed; uv pip install" in line


def test_an_output_folder_that_a_run_has_used(make_preflight, lines, tmp_path):
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text('{"global_step": 3}')
    preflight = make_preflight({"output_dir": str(tmp_path)})
    (line,) = lines(preflight, "options")
    assert line.startswith("FIX   options: ") and "holds a run already" in line
    preflight.resume = True
    (line,) = lines(preflight, "options")
    assert line.startswith("ok    ") and line.endswith(f"resuming from {checkpoint}")


def test_an_adapter_that_fits_nowhere(make_preflight, lines):
    (line,) = lines(make_preflight({"lora_target_modules": ["nothing"]}), "model")
    assert line.startswith("FIX   model: ") and "nothing" in line


def test_an_environment_that_does_not_load(make_preflight, lines):
    table = EnvTable("nowhere", v1={"taskset": {"id": "nowhere"}})
    (*_, line) = lines(make_preflight(envs=[table]), *OFFLINE)
    assert line.startswith("FIX   environment: ")
    assert "id='nowhere': no module 'nowhere' is installed" in line


def test_a_check_without_its_precondition_is_skipped(make_preflight, capsys):
    preflight = make_preflight()
    preflight.line("environment", preflight.check_environment, "options", "model")
    assert capsys.readouterr().out == "skip  environment: needs options, model\n"


def logprobs_at(model, ids, temperature):
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].detach()
    return token_logprobs_and_entropy(logits, torch.tensor(ids[1:]), temperature)[0].numpy()


class Server:
    """What the checks ask of client and weight sync. Its logprobs are those of a model between the
    one before a push and the pushed one.
    """

    model_name = "policy"

    def __init__(self, preflight, share_of_push):
        self.preflight, self.share = preflight, share_of_push

    def push(self, model, policy_version):
        self.pushed = {name: value.clone() for name, value in model.state_dict().items()}
        return {"sync_s": 0.1, "sync_bytes": 1e6}

    def status(self):
        return {"dtype": "float32", "device": "cpu", "supports_lora": True}

    def complete(self, body, timeout_s):
        ids = [*body["prompt"], 7, 8, 9]
        after = logprobs_at(self.preflight.model, ids, body["temperature"])[-3:]
        # make_tiny_model has the weights of the folder, and a new adapter changes none.
        before = logprobs_at(make_tiny_model(), ids, body["temperature"])[-3:]
        logprobs = before + self.share * (after - before)
        reply = {"token_ids": [7, 8, 9], "logprobs": {"token_logprobs": logprobs.tolist()}}
        return {"choices": [reply]}


@pytest.mark.parametrize("use_lora", [True, False])
@pytest.mark.parametrize("share_of_push", [1.0, 0.0, 0.5, 2.0, float("nan")])
def test_a_push_that_changes_the_server_otherwise_than_the_trainer_is_seen(
    make_preflight, lines, monkeypatch, use_lora, share_of_push
):
    preflight = make_preflight({"use_lora": use_lora})
    lines(preflight, "model")
    before = {name: value.clone() for name, value in preflight.model.state_dict().items()}
    preflight.client = server = Server(preflight, share_of_push)
    monkeypatch.setattr("verifiers_rl.sync.WeightSync", lambda *args: server)
    monkeypatch.setattr("verifiers_rl.sync.choose_lora_sync", lambda *args: "merged")
    (line,) = lines(preflight, "sync")
    if share_of_push == 1.0:
        assert re.match(r"ok    sync: 1 MB in 0\.10 s; \S+ nats apart on average over 3 ", line)
        # The last push is of the weights as they were.
        assert all(torch.equal(server.pushed[name], value) for name, value in before.items())
    else:
        assert line.startswith("FIX   sync: after a push of changed weights")


@pytest.mark.parametrize(("num_failed", "start"), [(1, "ok  "), (2, "FIX "), (4, "FIX ")])
def test_rollouts_that_fail_are_counted_with_the_first_error(
    make_preflight, lines, num_failed, start
):
    preflight = make_preflight({"rollouts_per_example": 4})
    lines(preflight, "model")

    class Runner:
        def sizes(self, split):
            return [8]

        async def open(self): ...

        async def close(self): ...

        async def run_group(self, request):
            errors = [*(OSError(f"no space {n}") for n in range(num_failed)), *[None] * 4]
            return [
                Rollout(0, "", env="words", reward=1.0, error=e)
                for e in errors[: request.num_rollouts]
            ]

    preflight.sync, preflight.runner = SimpleNamespace(model_name="m"), Runner()
    (line,) = lines(preflight, "rollouts")
    assert line.startswith(f"{start}  rollouts: words: {4 - num_failed} of the first example, ")
    assert f"{num_failed} failed, the first with: OSError: no space 0" in line


@pytest.mark.parametrize(("more", "start"), [(0.1, "ok    "), (0.5, "FIX   ")])
def test_a_large_mismatch_of_the_first_step_is_to_fix(make_preflight, lines, more, start):
    preflight = make_preflight()
    lines(preflight, "model")
    preflight.client = Server(preflight, 1.0)
    ids = [n * 7 % 250 for n in range(40)]
    logprobs = logprobs_at(make_tiny_model(), ids, preflight.args.temperature)
    preflight.samples = [Sample(ids, [0, *[1] * 39], [0.0, *(logprobs + more)], [-1, *[0] * 39])]
    (line,) = lines(preflight, "mismatch")
    assert line.startswith(f"{start}mismatch: mismatch_kl ") and "over 39 sampled tokens" in line
    assert ("docs/mismatch.md" in line) == (start == "FIX   ")


def test_the_file_may_follow_check_without_an_at_sign():
    for words in (["--check", "@", "a.toml"], ["@a.toml", "--check"]):
        assert toml_arguments(words) == ([Path("a.toml")], ["--check"])


# --- Through the command ----------------------------------------------------------------------


def run_check(toml, **environment):
    return subprocess.run(
        [sys.executable, "-m", "verifiers_rl.cli.rl", "--check", "@", str(toml)],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, **environment},
    )


def status_of(done):
    found = re.findall(r"^(ok|FIX|skip) +([^:]+):", done.stdout, re.MULTILINE)
    return {what: status for status, what in found}


@pytest.mark.slow
def test_what_is_wrong_has_a_line_each_and_no_server_starts(model_folder, tmp_path):
    (model_folder / "chat_template.jinja").unlink()
    toml = write_run(tmp_path, model_folder)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = re.sub(r"vllm_server_port = \d+", f"vllm_server_port = {port}", toml.read_text())
        toml.write_text(text)
        done = run_check(toml)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert status_of(done) == {
        "GPUs": "ok", "port": "FIX", "options": "ok", "model": "ok", "environment": "FIX",
        "server": "skip", "weight sync": "skip", "rollouts": "skip", "mismatch": "skip",
    }  # fmt: skip
    assert "skip  server: needs port, environment\n" in done.stdout
    assert "chat_template" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("vf-rl: 2 to fix, after ")


@pytest.mark.e2e
def test_a_run_that_works_is_ok_and_leaves_nothing_behind(warm_start, tmp_path):
    toml = write_run(tmp_path, warm_start)
    # A short name: vLLM's sockets lie there, and their paths have 107 characters at most.
    with tempfile.TemporaryDirectory() as temporary:
        done = run_check(toml, VF_RL_TEST=str(tmp_path), TMPDIR=temporary)
        left = list(Path(temporary).glob("vf-rl-check-*"))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.splitlines()[0] == f"vf-rl: checking {toml}"
    assert done.stdout.splitlines()[-1].startswith("vf-rl: all is ok, after ")
    assert list(status_of(done).values()) == ["ok"] * 9
    assert re.search(r"ok    mismatch: mismatch_kl \S+, \S+ nats apart", done.stdout)
    assert processes_of(tmp_path) == {}
    assert not left
    assert not (tmp_path / "run").exists()
