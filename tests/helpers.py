"""Small models, samples and stand-ins that several tests use."""

import asyncio
import base64
import importlib.util
import io
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TrainerCallback,
)

from tests.serving import serving as serving
from verifiers_rl.cli.config import EnvTable
from verifiers_rl.inference import ServerLostError
from verifiers_rl.report.run_folder import read_metrics
from verifiers_rl.requests import GroupRequest, Places
from verifiers_rl.sync.nccl import ID_BYTES, ID_KEY
from verifiers_rl.sync.plan import WORD_BYTES, TransferPlan, checksum_of
from verifiers_rl.sync.sources import buckets_of
from verifiers_rl.sync.weight_sync import push_to_all
from verifiers_rl.types import (
    Batch,
    BatchSource,
    Rollout,
    Sample,
    WeightSink,
    idle,
    pack_samples,
    unpack_samples,
)

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples/reverse_text"
EXAMPLE_MODULE = EXAMPLE / "reverse_text.py"


def load_example(name):
    """A module of examples, of any folder there, without installing it: "warm_start", or
    "reverse_text/train" if several folders have one of this name.
    """
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    return load_module(min(EXAMPLE.parent.rglob(f"{name}.py")))


def load_module(path):
    """The module in this file, as if it were installed."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def example_env():
    """The example's environment, as a TOML would name it."""
    taskset = {"id": "reverse_text", "num_tasks": 4096, "instruction": ""}
    held_out = {"held_out": True, "num_tasks": 256}
    return EnvTable(taskset=taskset, eval_taskset=held_out).load(EXAMPLE)


ENVIRONMENT = """
import verifiers.v1 as vf

__all__ = ["Given"]


class GivenTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    async def setup(self, trace, runtime):
        SETUP

    @vf.reward
    async def given(self, trace: vf.Trace) -> float:
        return 1.0


class Given(vf.Taskset[GivenTask, vf.TasksetConfig]):
    def load(self):
        for i, question in enumerate(QUESTIONS):
            yield GivenTask(vf.TaskData(idx=i, prompt=question), self.config.task)
"""


def write_environment(folder, name, questions, setup="pass"):
    """Write a module with an environment of one turn for these questions, whose rollouts begin with
    the statement `setup`. Return the lines of a TOML that name it.
    """
    text = ENVIRONMENT.replace("SETUP", setup).replace("QUESTIONS", repr([*questions]))
    (folder / f"{name}.py").write_text(text)
    return f'[env.taskset]\nid = "{name}"\n[env.agent.harness]\nid = "null"\n'


TINY = {
    "vocab_size": 261,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OF_QWEN3 = {"num_key_value_heads": 2, "eos_token_id": 257, "pad_token_id": 256}


def make_tiny_model(tie_word_embeddings=False, seed=0):
    torch.manual_seed(seed)
    config = Qwen3Config(
        **TINY,
        **OF_QWEN3,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=tie_word_embeddings,
    )
    return Qwen3ForCausalLM(config).float()


def make_tiny_llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY)).float()


def make_tiny_moe():
    """Two of four experts a token; the sizes are those that vLLM's CPU kernels take."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **TINY | {"hidden_size": 64, "intermediate_size": 128},
        **OF_QWEN3,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        head_dim=32,
        max_position_embeddings=256,
    )
    return Qwen3MoeForCausalLM(config).float()


def make_tokenizer(*special):
    """The example's: a token for each byte, and for each of these special ones."""
    return load_example("warm_start").make_tokenizer([*special])


def write_model(folder, model=None, tokenizer=None):
    """Write a model, by default the tiny one, and its tokenizer. Return the folder's name."""
    (model or make_tiny_model()).save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return str(folder)


def chat(*texts):
    """Messages of a user and an assistant in turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]


def make_samples(num_samples, seed=0, prompt=3, longest=9, version=0):
    """Random samples: a prompt without loss,
    then up to `longest` sampled tokens with random logprobs.
    """
    rng = random.Random(seed)
    samples = []
    for _ in range(num_samples):
        n = rng.randint(1, longest)
        sample = Sample(
            [rng.randrange(256) for _ in range(prompt + n)],
            [False] * prompt + [True] * n,
            [0.0] * prompt + [-5.0 - rng.random() for _ in range(n)],
            [-1] * prompt + [version] * n,
        )
        sample.set_advantage(rng.uniform(-1, 1))
        samples.append(sample)
    return samples


def in_base64(array):
    """An array as a file of numpy, as a server returns experts."""
    np.save(file := io.BytesIO(), array)
    return base64.b64encode(file.getvalue()).decode()


def values_of(sample):
    """The fields of a sample as lists, to compare samples by."""
    return [getattr(sample, name).tolist() for name in Sample.DTYPES]


def sent(samples):
    """Copies of the samples, as another process gets them."""
    return unpack_samples(*pack_samples(samples))


class GlooGroup:
    """A process group of Gloo that can be aborted, as NCCL's can."""

    def __init__(self, store, rank, world_size):
        options = torch.distributed.ProcessGroupGloo._Options()
        device = torch.distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        options._devices = [device]
        self._group = torch.distributed.ProcessGroupGloo(store, rank, world_size, options)
        self.num_aborts = 0

    def broadcast(self, tensors, options):
        return self._group.broadcast(tensors, options)

    def abort(self):
        self.num_aborts += 1
        self._group = None


def packed_weights(sources, model, num_tensors=None):
    """What a push of these sources carries, of the first tensors alone if so many are wanted."""
    shapes = {name: source.shape for name, source in sources.items()}
    plan = TransferPlan(tensors=shapes, dtype="float32", bucket_bytes=1)  # a bucket for each tensor
    made = zip(plan.buckets, buckets_of(plan, sources, model), strict=False)
    found = {}
    for bucket, buffer in itertools.islice(made, num_tensors):
        found |= {name: view.clone() for name, view in bucket.views(buffer)}
    return found


def push_to(sync, model, policy_version):
    """Push these weights to one server; raise its error."""
    (error,) = push_to_all([sync], model, policy_version)
    if error is not None:
        raise error


def at_bucket(sync, number, act):
    """From now on, call `act` before this WeightSync sends the bucket of this number in a push."""
    begin_push, send, coming = sync.begin_push, sync.send, iter(())

    def begin(*args):
        nonlocal coming
        coming = itertools.count()
        begin_push(*args)

    def counted(bucket):
        if next(coming) == number:
            act()
        send(bucket)

    sync.begin_push, sync.send = begin, counted


def share_memory_of_cpu(memory):
    """In place of `nccl.share`. As long as its handles are."""
    memory.share_memory_()
    return [os.getpid(), *memory.untyped_storage()._share_fd_cpu_(), "0" * 128]


def map_memory_of_cpu(handle, device):
    """In place of `nccl.map_in`."""
    pid, fd, size, _ = handle
    return torch.from_file(f"/proc/{pid}/fd/{fd}", shared=True, size=size, dtype=torch.uint8)


def make_gloo_group(store, rank, world_size):
    """In place of `make_nccl_group`: what stands in for NCCL's id is the path of a file by which
    the ranks find each other.
    """
    if rank == 0:
        folder = tempfile.mkdtemp(prefix="gloo")
        store.set(ID_KEY, f"{folder}/store".encode().ljust(ID_BYTES))
    path = store.get(ID_KEY).decode().strip()
    return GlooGroup(torch.distributed.FileStore(path, world_size), rank, world_size)


def push_body(weights, sizes):
    """The body of a push of these weights, in buckets of these sizes."""
    parts, start = [], 0
    for size in sizes:
        words = np.frombuffer(weights[start : start + size] + bytes(WORD_BYTES), np.int64).copy()
        words[-1] = ~words.sum()
        parts.append(words.tobytes())
        start += size
    return b"".join(parts)


class StubRequest:
    """A `ControlRequest` to a `StubServer`: `work` takes the body and gives the reply."""

    def __init__(self, server, work):
        self.server, self._work = server, work
        self.data, self.given_up = bytearray(), threading.Event()

    def begin(self):
        self._check()
        return self

    def write(self, data):
        self.server.on_write(self.given_up)
        self._check()
        self.data += data

    def has_reply(self):
        return self.given_up.is_set()

    def answer(self, timeout_s=None, stays_open=False):
        self._check()
        return self._work(self.data)

    def close(self): ...

    def give_up(self):
        self.given_up.set()

    def _check(self):
        if self.given_up.is_set() or not self.server.is_up:
            raise ServerLostError(f"no answer from {self.server.base_url}")


class StubServer:
    """What an `InferenceClient` is to a WeightSync: a server that keeps the weights it gets.

    Attributes:
        weights, policy_version: of the last push.
        hold: the request by which a trainer has it.
        is_up: whether it answers.
        on_write: called with each bucket, with the event that is set when the push is given up.
        calls: "sleep" and "push", in their order.
    """

    host = "127.0.0.1"
    is_up, sleeps = True, False
    connection = plan = weights = policy_version = hold = None

    def __init__(self, number=0, dtype="float32", lora_dtype=None, gpus=(None,)):
        self.base_url, self.port = f"http://127.0.0.1:{number}", number
        self.dtype, self.lora_dtype, self.gpus = dtype, lora_dtype, [*gpus]
        self.on_write = lambda given_up: None
        self.held, self.joined, self.calls = [], [], []

    def die(self):
        self.is_up, self.connection = False, None

    def status(self):
        if not self.is_up:
            raise ServerLostError(f"no answer from {self.base_url}")
        return {
            "connection": self.connection,
            "world_size": 1,
            "gpus": self.gpus,
            "dtype": self.dtype,
            "lora_dtype": self.lora_dtype,
            "quantization": None,
            "served_model_name": "base",
            "joined": self.joined,
            "sleeps": self.sleeps,
            "max_model_len": 2**20,
        }

    def post(self, path, fields=None, timeout_s=30.0, num_bytes=0):
        url = urlsplit(path)
        given = fields or dict(parse_qsl(url.query))

        def connect(data):
            self.plan = TransferPlan.model_validate_json(json.dumps(given["plan"]))
            self.connection = f"to {self.base_url}"
            self.held.append(given["trainer"])
            return {"connection": self.connection}

        def close():
            if given["trainer"] in self.held:
                self.held.remove(given["trainer"])

        def receive(data):
            assert len(data) == num_bytes
            buffer = torch.frombuffer(data, dtype=torch.uint8)
            self.weights = {}
            for bucket in self.plan.buckets:
                packed, buffer = buffer[: bucket.num_bytes], buffer[bucket.num_bytes :]
                assert packed.view(torch.int64)[-1] == checksum_of(packed)
                self.weights |= dict(bucket.views(packed))
            self.policy_version = int(given["policy_version"])
            self.calls.append("push")
            return {}

        def sleep(data):
            assert given["connection"] == self.connection
            assert 0 < float(given["timeout_s"]) < timeout_s
            self.calls.append("sleep")
            return {}

        works = {"connect": connect, "receive": receive, "sleep": sleep}
        request = StubRequest(self, works[url.path.removeprefix("/weight_sync/")])
        if "trainer" in given:
            assert given["name"].startswith(f"process {os.getpid()} on ")
            self.hold, request.close = request, close
        return request


def stub_servers(monkeypatch, **status):
    """Let `wiring` find stand-ins with this status in place of servers; return those it makes."""
    made = []

    class Server(StubServer):
        def __init__(self, host, port):
            super().__init__(port)
            self.base_url, self.num_asked = f"http://{host}:{port}", 0
            made.append(self)

        def status(self):
            self.num_asked += 1
            return super().status() | {"device": "cuda", **status}

    monkeypatch.setattr("verifiers_rl.wiring.InferenceClient", Server)
    return made


def make_request(index=0, num_rollouts=1, split="train", policy_version=9, **fields):
    """A `GroupRequest`, with four places unless others are given."""
    fields = {"model": "m", "sampling_args": {}, "places": Places(4), **fields}
    return GroupRequest(
        split=split,
        index=index,
        num_rollouts=num_rollouts,
        policy_version=policy_version,
        **fields,
    )


def only_runner(environments):
    """The runner of the only environment of those that `make_runner` has made."""
    (part,) = environments.parts["train"]
    return part.runner


class StubRunner:
    """What the orchestrator calls of an EnvRunner. Rollouts take, score and fail as told;
    `change` changes those of a group.
    """

    weights = (1.0,)
    cancelled = in_flight = most_in_flight = 0
    closed = False

    def __init__(self, num_examples=10, outcome=None, delay_s=0.0, change=lambda group: None):
        self.size = num_examples
        self.outcome = outcome or (lambda index, i: float(i))
        self.delay_s, self.change = delay_s, change
        self.seen = []
        self.threads = set()

    def sizes(self, split):
        return [self.size if split == "train" else 4]

    async def open(self): ...

    async def close(self):
        self.closed = True

    async def run_group(self, request):
        index, num_rollouts = request.index, request.num_rollouts
        self.seen.append(request)
        self.threads.add(threading.current_thread().name)

        async def one(i):
            async with request.begin(i):
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                try:
                    await asyncio.sleep(self.delay_s)
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
                finally:
                    self.in_flight -= 1
            rollout = Rollout(
                index, "prompt", "completion", num_turns=1, samples=make_samples(1, seed=i)
            )
            result = self.outcome(index, i)
            if isinstance(result, Exception):
                rollout.error, rollout.samples = result, []
            elif isinstance(result, BaseException):
                raise result
            elif isinstance(result, str):
                rollout.reward, rollout.is_truncated = float(result), True
            else:
                rollout.reward = result
            return rollout

        group = await asyncio.gather(*(one(i) for i in range(num_rollouts)))
        self.change(group)
        return group


class StubSource(idle(BatchSource)):
    """A BatchSource without a server: the batch of each step follows from its number.
    Records what was asked.
    """

    running = False
    evaluates = None  # policy version

    def __init__(self, batch_size=8, reward_of=lambda version: 0.5):
        self.batch_size = batch_size
        self.reward_of = reward_of  # an evaluation's, from its policy version
        self.submitted, self.calls = [], []
        self.pending = []  # step, policy version

    @property
    def num_pending(self):
        return len(self.pending)

    def start(self):
        self.running = True

    def submit(self, step, model, policy_version):
        assert self.running
        self.submitted.append((step, model, policy_version))
        self.calls.append(f"submit {step}")
        self.pending.append((step, policy_version))

    def discard(self):
        self.calls.append("discard")
        self.pending.clear()
        self.evaluates = None

    def wait(self):
        self.calls.append("wait")

    def get(self):
        step, version = self.pending.pop(0)
        self.calls.append(f"get {step}")
        samples = make_samples(self.batch_size, seed=step, version=version)
        rollouts = [Rollout(0, "p", "c", reward=0.25, samples=[s], num_turns=1) for s in samples]
        return Batch(step, version, samples, rollouts, {"reward": 0.25})

    def begin_evaluation(self, model, policy_version):
        assert self.running and self.evaluates is None
        self.calls.append(f"evaluate {policy_version}")
        self.evaluates = policy_version

    def end_evaluation(self):
        assert self.evaluates is not None
        version, self.evaluates = self.evaluates, None
        self.calls.append(f"evaluated {version}")
        return {"reward": self.reward_of(version)}, []

    def stop(self):
        self.running = False
        self.pending.clear()
        self.evaluates = None


class StubSink(idle(WeightSink)):
    """A WeightSink that remembers the versions it was given. It calls `on_push` before."""

    model_name = "policy"
    num_waits = 0

    def __init__(self, on_push=lambda model, policy_version: None):
        self.on_push, self.pushed = on_push, []

    def push(self, model, policy_version):
        self.on_push(model, policy_version)
        self.pushed.append(policy_version)
        self.policy_version = policy_version
        return {"sync_s": 0.0}

    def wait_for_server(self):
        self.policy_version = None
        self.num_waits += 1

    def close(self):
        self.policy_version = None


def breaking(part, method, error, calls=None):
    """Return this part. Its method raises the error in all calls, or in those of these numbers,
    from 0.
    """
    original, numbers = getattr(part, method), itertools.count()

    def call(*args, **kwargs):
        if calls is None or next(numbers) in calls:
            raise error
        return original(*args, **kwargs)

    setattr(part, method, call)
    return part


def on(event, act):
    """A callback that calls `act` with the trainer's state at this event."""
    callback = TrainerCallback()
    setattr(callback, event, lambda args, state, control, **rest: act(state))
    return callback


def values_in(rows, name):
    """The values of this name in rows of metrics, from first to last."""
    return [row[name] for row in rows if name in row]


def logged(trainer, name):
    return values_in(trainer.state.log_history, name)


def evaluated(folder):
    """Step and reward of each evaluation of the run in this folder."""
    rows = read_metrics(folder)
    return [(row["step"], row["eval_reward"]) for row in rows if "eval_reward" in row]


def names_of(folder, pattern="*"):
    """The names of what is in this folder, in their order."""
    return sorted(path.name for path in folder.glob(pattern))


def checkpoints_of(folder):
    return names_of(folder, "checkpoint-*")


def weights_of(model):
    """A copy of the weights as they are now."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def skip_without_deepspeed(kind):
    """Skip the test where this kind of ranks, such as "zero3", needs what is not installed."""
    if kind.startswith("zero"):
        pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")


TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def environment_with(**variables):
    """This process's environment with the repository on Python's path, and these variables."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    given = {name: str(value) for name, value in variables.items()}
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | given


def run_python(*words, folder=ROOT, status=0, python=sys.executable, **variables):
    """Run Python with these words and the repository on its path, to an end with this status."""
    done = subprocess.run(
        [python, *map(str, words)],
        cwd=folder, env=environment_with(**variables), capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == status, done.stdout[-4000:] + done.stderr[-5000:]
    return done


def worker_pids():
    """The rollout workers of this process."""
    children = Path("/proc/self/task").glob("*/children")
    found = [int(pid) for path in children for pid in path.read_text().split()]
    return [pid for pid in found if b"made_there" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@contextmanager
def running_python(*words, folder=ROOT, **variables):
    """A process of Python, as `run_python` has it, with pipes. It is killed in the end."""
    process = subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=folder, env=environment_with(**variables), text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run_script(folder, text, *words, launcher=TWO_RANKS):
    """Run this Python script with these words, here or by a launcher. Return what it said on
    stderr.
    """
    (script := folder / "script.py").write_text(text)
    return run_python(*launcher, script, *words, OMP_NUM_THREADS="1").stderr


def check_lines(lines, name):
    """Compare lines with those of this file here; with EXPECT=1 in the environment, write it."""
    path = ROOT / "tests" / name
    if os.environ.get("EXPECT"):
        path.write_text("".join(f"{line}\n" for line in lines))
    assert lines == path.read_text().splitlines()
