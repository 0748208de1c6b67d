"""Weights from a trainer's model to the real vLLM server, checked by the logprobs it returns."""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.conftest import Started, free_port, is_running, wait_until
from tests.families import write_family
from tests.helpers import (
    TARGETS,
    at_bucket,
    example_env,
    load_example,
    make_tiny_moe,
    make_tokenizer,
    push_to,
    run_python,
    share_memory_of_cpu,
    write_model,
)
from verifiers_rl import RLConfig, RLTrainer, cispo
from verifiers_rl.inference import InferenceClient, InferenceServerError, ServerLostError
from verifiers_rl.inference.packed_tokens import pack_numbers, unpack_sampled
from verifiers_rl.models import load_policy
from verifiers_rl.router_replay import routers_of
from verifiers_rl.sync import WeightSync

pytestmark = pytest.mark.e2e

# Tests generate without a key. Blocks are small; a cache of 16,384 tokens instead of 1 GiB, since
# the servers of this file live until its end.
FLAGS = ("--block-size", "32", "--num-gpu-blocks-override", "512", "--open")
LORA = ("--enable-lora", "--max-lora-rank", "16")
PROMPT = [int(i) for i in torch.randint(256, (70,), generator=torch.Generator().manual_seed(1))]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of an untied and a tied model with random weights."""
    make_model, folders = load_example("warm_start").make_model, {}
    for tied in (False, True):
        torch.manual_seed(0)
        model = make_model(make_tokenizer(), tie_word_embeddings=tied)
        folders[tied] = write_model(tmp_path_factory.mktemp("model"), model)
    return folders


# Servers that tests share, each with the folder of its model; a test leaves them able to take a
# trainer. A test that needs other flags, or ends its server, starts one of its own and says why.


@pytest.fixture(scope="module")
def full_server(models, run_server):
    """Of the untied model. It schedules asynchronously, as on a GPU, and can sleep; `lora_server`
    does neither. All weights of the tied model arrive in several engines, below.
    """
    flags, module = (*FLAGS, "--enable-sleep-mode"), "tests.gpu_like_server"
    with run_server(models[False], *flags, module=module) as server:
        assert "scheduler.AsyncRolloutScheduler" in server.said()
        yield models[False], server


@pytest.fixture(scope="module")
def lora_server(models, run_server):
    """Of the tied model. Adapters of the untied one arrive in several engines, below."""
    with run_server(models[True], *FLAGS, *LORA) as server:
        yield models[True], server


@pytest.fixture(scope="module", params=[(True, False), (False, True)], ids=["full", "adapter"])
def bfloat16_server(request, models, run_server):
    """In two halves, of the tied model for full weights, and of the untied one for adapters."""
    tied, with_lora = request.param
    flags = (*FLAGS, "--tensor-parallel-size", "2", *(LORA if with_lora else ()))
    with run_server(models[tied], *flags, dtype="bfloat16") as server:
        yield models[tied], server, ["adapter"] if with_lora else ["full", "merged"]


@pytest.fixture
def connect():
    """A trainer's end of the sync; the one before it leaves the server."""
    made = []

    def leave():
        for sync in made:
            sync.close()

    def make(server, **options):
        leave()
        client = InferenceClient("127.0.0.1", server.port)
        options = {"timeout_s": 60, "bucket_bytes": 1_000_000, **options}
        made.append(WeightSync(client, **options))
        return made[-1]

    make.leave = leave
    yield make
    leave()


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def perturb(model, seed, scale=0.02, part=""):
    """A step of training, as far as the server can tell, of weights whose names have this part."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and part in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def pushed_versions(sync, model, num_versions, **changes):
    """Change and push these weights so often; yield the policy version of each push."""
    for version in range(num_versions):
        perturb(model, seed=version, **changes)
        push_to(sync, model, version)
        yield version


def ask(server, model_name, engine=0, prompt=PROMPT[:40], seed=None, **options):
    """Tokens that the server samples, their logprobs, and from which of them on which policy did:
    80 tokens, unless the options say otherwise. That takes long enough for a push in its middle.
    """
    body = {"model": model_name, "messages": [{"role": "user", "content": "."}]}
    body |= {"tokens": pack_numbers(prompt), "seeds": [seed], "max_tokens": 80, "temperature": 1.0}
    headers = {"X-data-parallel-rank": str(engine)} if engine else {}
    url = f"{server.url}/v1/chat/completions/tokens"
    body |= {"ignore_eos": True, **options}
    reply = httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    _, versions, content = reply.text.split(" ", 2)
    token_ids, logprobs = unpack_sampled(json.loads(content)["packed_tokens"])
    spans = [span.split(":") for span in versions.split(",") if span]
    return token_ids.tolist(), logprobs, [(int(start), int(version)) for start, version in spans]


@torch.no_grad()
def logprobs_under(model, token_ids, prompt):
    """Logprobs of these tokens after the prompt."""
    logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]


def largest_difference(model, server, model_name, engine=0):
    """Of the server's logprobs of tokens that it samples, from the trainer's."""
    difference = 0.0
    # Twice: the second request finds the prompt in the prefix cache.
    for seed in range(2):
        token_ids, given, _ = ask(server, model_name, engine, PROMPT, seed, max_tokens=32)
        expected = logprobs_under(model, token_ids, PROMPT)
        difference = max(difference, (torch.tensor(given) - expected).abs().max().item())
    return difference


@pytest.mark.parametrize("way", [None, "CUDA IPC"])
def test_full_weights_arrive_exactly_ten_times_in_a_row(full_server, connect, monkeypatch, way):
    """Also through memory of a GPU that trainer and server share; here it is the CPU's."""
    folder, server = full_server
    model, sync = load(folder), connect(server)
    if way:
        status = sync.client.status
        monkeypatch.setattr(sync.client, "status", lambda: status() | {"gpus": ["gpu-0"]})
        monkeypatch.setattr("verifiers_rl.sync.weight_sync.gpu_uuid", lambda device: "gpu-0")
        monkeypatch.setattr("verifiers_rl.sync.nccl.share", share_memory_of_cpu)
    for version in pushed_versions(sync, model, 10):
        assert getattr(sync._transport, "way", None) == way and len(sync.plan.buckets) > 3
        assert largest_difference(model, server, sync.model_name) < 1e-4, version
        assert sync.client.status()["policy_version"] == version


def test_adapters_arrive_exactly_ten_times_in_a_row(lora_server, connect):
    folder, server = lora_server
    # Rank-stabilised: a scale of alpha / sqrt(r), here nearly three times as much.
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, use_rslora=True)
    model, sync = get_peft_model(load(folder), lora), connect(server)
    for version in pushed_versions(sync, model, 10):
        assert sync.model_name == "policy"
        assert largest_difference(model, server, "policy") < 1e-4, version


def test_weights_arrive_in_both_halves_of_a_bfloat16_server(bfloat16_server, connect):
    folder, server, kinds = bfloat16_server
    for kind in kinds:
        sync = connect(server, lora_sync="merged" if kind == "merged" else "adapter")
        assert sync.client.status()["world_size"] == 2
        for version in range(3):
            old, new = load(folder), policy(folder, kind)
            perturb(new, seed=version, scale=0.02 if kind == "full" else 0.1)
            push_to(sync, new, version)
            # bfloat16 has 8 bits: the rounding of its kernels, and far from the other weights.
            assert largest_difference(new, server, sync.model_name) < 0.05
            assert largest_difference(old, server, sync.model_name) > 0.25


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_weights_arrive_in_both_data_parallel_engines(models, connect, run_server, kind):
    """Both servers end in the test: one by a worker that is killed in a push, one as a whole."""
    flags = (*FLAGS, "--data-parallel-size", "2")
    flags += LORA if kind == "adapter" else ()
    folder = models[kind == "full"]
    with run_server(folder, *flags) as server:
        sync = connect(server)
        assert sync.client.status()["world_size"] == 2
        model = policy(folder, kind)
        for _ in pushed_versions(sync, model, 2):
            for engine in range(2):
                assert largest_difference(model, server, sync.model_name, engine) < 1e-4, engine
        if kind == "adapter":
            check_tokens_on_both_sides(kind, folder, server, connect, num_requests=2)
            # Killed, it leaves nothing: engines, workers, and what coordinates them.
            assert len(group_of(server)) >= 6  # server, coordinator, two engines, two workers
            server.process.kill()
            server.process.wait()
            # They are no children of ours: nothing to await.
            wait_until(lambda: not group_of(server), 30)
        else:
            check_a_killed_worker(model, sync, server)


def test_a_server_that_is_killed_while_its_engine_starts_leaves_nothing(models, tmp_path):
    def has_engine():
        assert server.process.poll() is None
        with suppress(OSError):  # one of them has just ended
            return any("EngineCor" in (path / "comm").read_text() for path in group_of(server))
        return False

    command = [sys.executable, "-m", "verifiers_rl.inference.server", "--model", models[False]]
    command += ["--port", str(free_port()), "--enforce-eager"]
    with Started(command, os.environ, tmp_path / "log") as server:
        wait_until(has_engine, 240)
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not group_of(server), 60)


@pytest.fixture(scope="module")
def expert_server(tmp_path_factory, run_server):
    """Of a mixture of experts, two of which are nearly equal in the routers' eyes. It returns the
    experts of each token, and computes prompts in parts if there are several.
    """
    model = make_tiny_moe()
    with torch.no_grad():
        for _, router in routers_of(model):
            router.weight[2] = router.weight[1]
    perturb(model, 0, 1e-6, ".mlp.gate.")
    folder = write_model(tmp_path_factory.mktemp("model"), model)
    flags = [*FLAGS, "--enable-return-routed-experts", "--max-num-batched-tokens", "128"]
    with run_server(folder, *flags, module="tests.experts_on_cpu") as server:
        yield folder, server


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of peft, about patterns of its own
def test_experts_arrive_exactly(expert_server, connect):
    folder, server = expert_server
    sync, model = connect(server), load(folder)
    for version in pushed_versions(sync, model, 3):
        assert largest_difference(model, server, sync.model_name) < 1e-4, version
    merged = connect(server, lora_sync="merged")
    for targets in (["q_proj", "o_proj"], TARGETS):  # which has an adapter of each expert
        model = load(folder)
        # As the routers are, rounding decides between two of the experts.
        perturb(model, 0, 0.5, ".mlp.gate.")
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
        perturb(model, seed=4, scale=0.05)
        push_to(merged, model, 4)
        assert largest_difference(model, server, merged.model_name) < 1e-4
    assert model.peft_config["default"].target_parameters == {"gate_up_proj", "down_proj"}


class RoundedOtherwise(RLTrainer):
    """After each push, the trainer's routers differ a little from the server's, as by rounding."""

    def push_weights(self):
        super().push_weights()
        perturb(self.model, 1, 2e-6, ".mlp.gate.")


def test_a_run_with_router_replay_computes_the_logprobs_that_the_server_sampled_with(
    expert_server, tmp_path
):
    folder, server = expert_server
    apart, metrics = {}, {}
    for replays in (False, True):
        found = []

        def loss_fn(inputs, found=found):
            found.append((inputs.trainer_logprobs - inputs.inference_logprobs).abs().max().item())
            return cispo(inputs)

        args = RLConfig(
            output_dir=f"{tmp_path}/run-{replays}", use_cpu=True, use_lora=False,
            batch_size=32, rollouts_per_example=8, micro_batch_size=32, max_seq_len=64,
            max_tokens=32, max_steps=1, max_off_policy_steps=0, learning_rate=0.0,
            save_strategy="no", disable_tqdm=True,
            vllm_server_port=server.port, router_replay=replays,
        )  # fmt: skip
        trainer = RoundedOtherwise(folder, example_env(), args, loss_fn=loss_fn)
        # It replays nothing, and a token may be far apart.
        trainer.weight_sync._check_agreement = lambda *_: None
        trainer.train()
        apart[replays] = max(found)
        (metrics[replays],) = [row for row in trainer.state.log_history if "reward" in row]
    assert apart[False] > 1e-3 and apart[True] < 1e-5
    assert metrics[True]["mismatch_kl"] < 1e-9 < metrics[False]["mismatch_kl"]


@pytest.mark.parametrize(
    "experts, kind", [(False, "adapter"), (True, "full")], ids=["dense", "experts"]
)
def test_qwen3_5_arrives_where_its_checkpoint_has_a_vision_tower(
    connect, run_server, tmp_path, experts, kind
):
    write_family("qwen3_5_moe" if experts else "qwen3_5", tmp_path)
    old, model = (
        load_policy(str(tmp_path), RLConfig(use_cpu=True, use_lora=use_lora))
        for use_lora in (False, kind == "adapter")
    )
    flags = ("--open", *(LORA if kind == "adapter" else ()))
    with run_server(tmp_path, *flags, dtype="auto") as server:
        sync = connect(server)
        scale = 0.05 if kind == "adapter" else 0.02
        for version in pushed_versions(sync, model, 3, scale=scale):
            # The rounding of bfloat16, by which a token may get another expert, and far from the
            # weights of the checkpoint.
            tolerance = 0.2 if experts else 0.05
            assert largest_difference(model, server, sync.model_name) < tolerance, version
            assert largest_difference(old, server, sync.model_name) > 2 * tolerance, version


def group_of(server):
    """Folders in /proc of the server's processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if is_running(path.name) and os.getpgid(int(path.name)) == server.process.pid:
                found.append(path)
        except OSError:
            pass  # it ended meanwhile
    return found


def policy(folder, kind):
    """The trainer's model: all weights, or with a fresh adapter."""
    lora = LoraConfig(r=8, target_modules=TARGETS)
    return load(folder) if kind == "full" else get_peft_model(load(folder), lora)


# --- While requests are running -----------------------------------------------------------------


def check_tokens_on_both_sides(kind, folder, server, connect, num_requests=1, sleeps=False):
    models = [policy(folder, kind) for _ in range(2)]
    for seed, model in enumerate(models):
        perturb(model, seed)
    sync = connect(server)
    for attempt in range(20):  # until the push falls into the middle of the requests
        push_to(sync, models[0], 0)
        with ThreadPoolExecutor() as threads:
            running = [
                threads.submit(ask, server, sync.model_name, engine)
                for engine in range(num_requests)
            ]
            time.sleep(0.02 * 1.4**attempt)  # on a busy machine it comes seconds later
            if sleeps:
                sync.sleep()
                waiting = threads.submit(ask, server, sync.model_name, max_tokens=1)
                time.sleep(0.5)
                assert not waiting.done()
            push_to(sync, models[1], 1)
        results = [request.result() for request in running]
        if all(len(spans) == 2 for _, _, spans in results):
            break
    for token_ids, logprobs, spans in results:
        assert len(token_ids) == 80 and [version for _, version in spans] == [0, 1]
        split = spans[1][0]
        assert 0 < split < 80
        old, new = (
            (logprobs_under(model, token_ids, PROMPT[:40]) - torch.tensor(logprobs)).abs()
            for model in models
        )
        assert old[:split].max() < 1e-4
        # Asleep, it gives up the keys and values of the old weights, which are computed anew. Else
        # the new weights are over the old ones' keys and values: neither policy's logprobs.
        assert new[split:].max() < 1e-4 if sleeps else new[split:].max() > 1e-3
    if sleeps:
        assert waiting.result()[2] == [(0, 1)]
    # What the push left in the prefix cache serves nobody after it.
    assert largest_difference(models[1], server, sync.model_name) < 1e-4


@pytest.mark.parametrize("sleeps", [False, True])
def test_tokens_on_both_sides_of_a_push_carry_their_version(full_server, connect, sleeps):
    """Those of adapters in several engines, above. Requests of a server that sleeps wait."""
    check_tokens_on_both_sides("full", *full_server, connect, sleeps=sleeps)


# --- Trainers come and go -----------------------------------------------------------------------


def test_logprobs_of_a_prompt_are_refused_beside_adapters_on_a_cpu(lora_server):
    folder, server = lora_server
    with pytest.raises(AssertionError, match="start vf-vllm without that flag"):
        ask(server, folder, prompt_logprobs=0)
    ask(server, folder)  # its engine lives


KILLED_IN_A_PUSH = """
import os, signal, sys
from tests.helpers import at_bucket, push_to
from tests.test_e2e_sync import load, perturb
from verifiers_rl.inference.client import InferenceClient
from verifiers_rl.sync.weight_sync import WeightSync

def die():
    print("killed in the middle", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

model = load(sys.argv[1])
sync = WeightSync(InferenceClient("127.0.0.1", int(sys.argv[2])), bucket_bytes=50_000)
push_to(sync, model, 0)
perturb(model, 9)
at_bucket(sync, 2, die)
push_to(sync, model, 1)
"""


def test_a_trainer_killed_in_a_push_leaves_a_server_for_the_next_one(full_server, connect):
    folder, server = full_server
    connect.leave()
    words = "-c", KILLED_IN_A_PUSH, folder, server.port
    assert "in the middle" in run_python(*words, status=-signal.SIGKILL).stdout
    model = load(folder)
    perturb(model, seed=5)
    sync = connect(server)
    push_to(sync, model, 0)
    assert largest_difference(model, server, sync.model_name) < 1e-4
    assert sync.client.status()["policy_version"] == 0
    sync.check_server()


def check_a_killed_worker(model, sync, server):
    """A worker killed in a push is a lost server: the push fails in seconds, and so do the requests
    of both engines that the push has frozen.
    """
    deadline = time.monotonic() + 120

    def ask_on(engine):
        while time.monotonic() < deadline:  # the next one where the push has not begun yet
            ask(server, sync.model_name, engine)

    workers = [path for path in group_of(server) if b"Worker" in (path / "cmdline").read_bytes()]
    assert len(workers) == 2
    with ThreadPoolExecutor() as threads:
        asking = [threads.submit(ask_on, engine) for engine in range(2)]
        time.sleep(0.05)
        start = time.monotonic()
        at_bucket(sync, 3, partial(os.kill, int(workers[0].name), signal.SIGKILL))
        with pytest.raises(ServerLostError):
            push_to(sync, model, 9)
        assert time.monotonic() - start < 30
        server.process.wait(60)  # vf-rl then starts another
        assert all(
            isinstance(each.exception(60), AssertionError | httpx.HTTPError) for each in asking
        )


def test_another_model_is_refused_with_both_sizes(full_server, connect):
    folder, server = full_server
    config = load(folder).config
    config.intermediate_size = 64
    with pytest.raises(
        InferenceServerError, match=r"shape \(384, 128\) in .* \(64, 128\) at .* another model\?"
    ):
        push_to(connect(server), AutoModelForCausalLM.from_config(config), 1)
