"""What does a weight sync cost? Bytes, seconds, generation speed and rounding, in one run.

    python benchmarks/weight_sync.py [--layers 28] [--vocab 151936] [--repeats 5]
    python benchmarks/weight_sync.py --nccl   # between GPUs 0 and 1, or on the only one

The model has Qwen3-0.6B's shape and random weights: float32 here (with threads on half of the
cores, as `RLTrainer` sets it), bfloat16 in a real `vf-vllm`. Each mode's figure is the median of
`--repeats` pushes by `push_to_all`, after one that warms up. Each round measures all modes of one
server in turn:

- full, merged: all weights, or all weights with a rank-16 adapter added. The server has no LoRA.
- adapter: the adapter alone. The server has --enable-lora.
- (a) raw: buffers of the same sizes, already packed and touched, are sent over one TCP connection
  to a second process, which drops them. No HTTP, no casts, no model: a lower bound.

Generation: wall time of `--requests` sequences at once, prompts of 16 tokens included, divided by
the number of generated tokens. Adapter and base model take turns on the LoRA server; merged weights
run on the other. vLLM runs eager, on half of the cores; with a GPU's CUDA graphs and kernels this
may differ.

Rounding: largest and mean difference between a prompt's logprobs on the server and those of the
float32 model here, and ||error|| / ||update|| of the adapter's update in bfloat16. This ratio
depends on the update's size: here B has a standard deviation of 1e-3, about what it would have
after 100 steps at 1e-5.

    python benchmarks/weight_sync.py --replicas 1,2,4 [--layers 28] [--vocab 151936] [--repeats 5]

measures instead a push of all weights to so many servers at once (`push_to_all`), over HTTP. A
stand-in process takes the place of each server: it reads the body, and drops it. So this is the
trainer's side: gathering, casting, packing, sending.
"""

import argparse
import copy
import multiprocessing
import os
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import verifiers_rl  # noqa: F401 (before transformers: see its torchvision_operators.py)

# isort: split
import httpx
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from raw_broadcast import RawReceiver
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from verifiers_rl.cli.children import LocalChild
from verifiers_rl.cli.supervise import answers
from verifiers_rl.inference.client import (
    TOKEN_VARIABLE,
    InferenceClient,
    InferenceServerError,
    generation_key,
)
from verifiers_rl.sync import weight_sync
from verifiers_rl.sync.weight_sync import WeightSync, push_to_all

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 600.0
START = time.monotonic()
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Rows = dict[str, list[float]]


def make_models(folder: Path, options: argparse.Namespace) -> tuple[nn.Module, Any]:
    """Make the model in float32, and the same parameters under an adapter. Saves a bfloat16
    checkpoint.

    The float32 values are those of the checkpoint, as when training starts from a bfloat16 model.
    """
    sys.path.insert(0, str(ROOT / "examples"))
    from warm_start import make_tokenizer

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = model.float().eval().to(options.device)
    twin = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS)
    adapted = get_peft_model(twin, lora).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zero at first
                parameter.normal_(std=1e-3)
    return model, adapted


def gpu(number: int) -> str:
    """Return the name of the GPU that this process counts as `number`, which another process takes
    in CUDA_VISIBLE_DEVICES.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(number) if visible is None else visible.split(",")[number].strip()


def as_on_another_machine(name: str) -> dict[str, str]:
    """Return the variables with which NCCL takes a process for one of a machine of this name.

    It refuses two ranks on one GPU only where their machine is the same. (`NCCL_HOSTID` in its
    documentation.) Then weights travel over sockets. None where each rank has a GPU.
    """
    if torch.cuda.device_count() > 1:
        return {}
    return {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo"}


@contextmanager
def running_server(
    model: Path, log: Path, options: argparse.Namespace, *flags: str
) -> Iterator[InferenceClient]:
    """Run a `vf-vllm` on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = ["-m", "verifiers_rl.inference.server", "--model", str(model)]
    command += ["--port", str(port), "--dtype", "bfloat16", "--enforce-eager"]
    command += ["--max-model-len", "128", "--block-size", "32"]
    command += flags
    client = InferenceClient("127.0.0.1", port)
    env = {}
    if options.nccl:
        number = min(1, torch.cuda.device_count() - 1)
        env = {"CUDA_VISIBLE_DEVICES": gpu(number)} | as_on_another_machine("server")
        command += ["--gpu-memory-utilization", "0.4"]  # the trainer may be on it, too
    server = LocalChild("inference", command, env, log)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not answers(("127.0.0.1", port)):
            if server.wait(0.5):
                raise InferenceServerError(f"the server ended with status {server.poll()}")
            if time.monotonic() > deadline:
                raise InferenceServerError(f"the server was not ready after {TIMEOUT_S:g} s")
        say("the server is ready")
        yield client
    except (InferenceServerError, httpx.HTTPError):
        print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
        raise
    finally:
        server.stop()


def measure_rounds(modes: dict[str, Callable[[], None]], repeats: int, rows: Rows) -> None:
    for index in range(repeats + 1):
        for name, work in modes.items():
            start = time.perf_counter()
            work()
            if index:  # the first warms up
                rows[name].append(time.perf_counter() - start)


def complete(client: InferenceClient, body: dict[str, Any]) -> dict[str, Any]:
    url = f"{client.base_url}/v1/completions"
    reply = httpx.post(
        url,
        json=body,
        headers={"Authorization": f"Bearer {generation_key(client.base_url)}"},
        timeout=TIMEOUT_S,
        trust_env=False,
    )
    if reply.status_code != 200:
        raise RuntimeError(f"{url}: {reply.status_code} {reply.text}")
    return reply.json()


def generate(client: InferenceClient, name: str, options: argparse.Namespace) -> None:
    """Generate. Prompts are shorter than a cache block, so no run profits from the one before."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(256, (options.requests, 16), generator=generator).tolist()
    body = {"model": name, "prompt": prompts, "max_tokens": options.tokens, "ignore_eos": True}
    usage = complete(client, body | {"temperature": 1.0})["usage"]
    if usage["completion_tokens"] != options.requests * options.tokens:
        raise RuntimeError(f"the server generated {usage}")


PROMPT = torch.randint(256, (8,), generator=torch.Generator().manual_seed(1)).tolist()
Reply = tuple[list[int], Tensor]  # its tokens, and the server's logprobs of them


def served_reply(client: InferenceClient, name: str) -> Reply:
    """Let the server sample 56 tokens. (vLLM on a CPU gives no logprobs of a prompt with LoRA.)"""
    body = {"model": name, "prompt": PROMPT, "max_tokens": 56, "ignore_eos": True, "seed": 0}
    body |= {"temperature": 1.0, "logprobs": 0, "return_token_ids": True}
    (choice,) = complete(client, body)["choices"]
    return choice["token_ids"], torch.tensor(choice["logprobs"]["token_logprobs"])


@torch.no_grad()
def error_of(reply: Reply, model: nn.Module) -> Tensor:
    """Return how far the server's logprobs are from those of the trainer's model, (tokens,)."""
    token_ids, served = reply
    device = next(model.parameters()).device
    ids = torch.tensor([PROMPT + token_ids], device=device)
    logprobs = model(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    exact = logprobs.gather(-1, ids[0, len(PROMPT) :, None])[:, 0].cpu()
    return (served - exact).abs()


@torch.no_grad()
def lost_update(adapted: nn.Module) -> tuple[float, float]:
    """Return ||error|| / ||update|| over all adapted layers: merged in bf16, adapter in bf16."""
    merged_error = adapter_error = norm = 0.0
    for module in adapted.modules():
        if not isinstance(module, LoraLayer):
            continue
        update, base = module.get_delta_weight("default"), module.get_base_layer().weight
        a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
        served = module.scaling["default"] * (b.bfloat16().float() @ a.bfloat16().float())
        merged_error += ((base + update).bfloat16() - (base + update)).square().sum().item()
        adapter_error += (served - update).square().sum().item()
        norm += update.square().sum().item()
    return (merged_error / norm) ** 0.5, (adapter_error / norm) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"layers": 28, "vocab": 151936, "hidden": 1024}
    counts = {"repeats": 5, "requests": 64, "tokens": 16, "generations": 2}
    for name, default in (sizes | counts).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu", help="of the trainer's model")
    parser.add_argument("--nccl", action="store_true", help="needs a GPU")
    parser.add_argument("--replicas", default="")
    options = parser.parse_args()
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    torch.set_num_threads(max(num_cores // 2, 1))
    os.environ.setdefault(TOKEN_VARIABLE, secrets.token_urlsafe(16))
    if options.nccl:
        options.device = "cuda:0"
        os.environ |= as_on_another_machine("trainer")
        weight_sync.gpu_uuid = lambda device: "of this process"  # the server may be on it, too
    rows: Rows = defaultdict(list)
    if options.replicas:
        measure_replicas([int(number) for number in options.replicas.split(",")], options)
        return
    with tempfile.TemporaryDirectory() as name, closing(RawReceiver(TIMEOUT_S)) as raw:
        measure(Path(name), raw, rows, options)


def say(what: str) -> None:
    print(f"{time.monotonic() - START:6.1f} s: {what}", file=sys.stderr, flush=True)


def push(syncs: list[WeightSync], model: nn.Module) -> None:
    errors = push_to_all(syncs, model, 0)
    if any(errors):
        raise RuntimeError(errors)
    say("pushed")


def measure(folder: Path, raw: RawReceiver, rows: Rows, options: argparse.Namespace) -> None:
    model, adapted = make_models(folder / "model", options)
    plans, differences = {}, {}

    def sizes(sync: WeightSync) -> list[int]:
        return [bucket.num_bytes for bucket in sync.plan.buckets]

    with running_server(folder / "model", folder / "full.log", options) as client:
        sync = WeightSync(client, lora_sync="merged", timeout_s=TIMEOUT_S)
        push([sync], model)
        plans["full"] = plans["merged"] = sync.plan
        all_sizes = sizes(sync)
        modes: dict[str, Callable[[], None]] = {
            "full": lambda: push([sync], model),
            "merged": lambda: push([sync], adapted),
            "full (a)": lambda: raw.push(all_sizes),
        }
        # The time of a push means nothing unless its weights arrive. The server has loaded the
        # model's weights from the checkpoint; after a push of others they must be there again.
        served = {"loaded": served_reply(client, sync.model_name)}
        for mode in ("merged", "full"):
            modes[mode]()
            served[mode] = served_reply(client, sync.model_name)
        arrived = torch.equal(served["full"][1], served["loaded"][1])
        if not arrived or torch.equal(served["full"][1], served["merged"][1]):
            raise RuntimeError(f"weights did not arrive: {served}")
        differences["base"] = error_of(served["full"], model)
        differences["merged"] = error_of(served["merged"], adapted)
        measure_rounds(modes, options.repeats, rows)
        modes["merged"]()
        merged = {"generate merged": lambda: generate(client, sync.model_name, options)}
        measure_rounds(merged, options.generations, rows)
        sync.close()
    flags = ("--enable-lora", "--max-lora-rank", "16")
    with running_server(folder / "model", folder / "lora.log", options, *flags) as client:
        sync = WeightSync(client, timeout_s=TIMEOUT_S)
        push([sync], adapted)
        plans["adapter"] = sync.plan
        adapter_sizes = sizes(sync)
        differences["adapter"] = error_of(served_reply(client, sync.model_name), adapted)
        modes = {
            "adapter": lambda: push([sync], adapted),
            "adapter (a)": lambda: raw.push(adapter_sizes),
        }
        measure_rounds(modes, options.repeats, rows)
        generations = {
            "generate adapter": lambda: generate(client, sync.model_name, options),
            "generate base": lambda: generate(
                client, client.status()["served_model_name"], options
            ),
        }
        measure_rounds(generations, options.generations, rows)
        sync.close()
    num_tokens = options.requests * options.tokens
    report(plans, rows, differences, lost_update(adapted), num_tokens)


class StandIn(InferenceClient):
    """A server that is a process which drops what it receives."""

    def __init__(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=drop_all, args=(theirs,), daemon=True)
        self.process.start()
        super().__init__("127.0.0.1", ours.recv())

    def status(self) -> dict[str, Any]:
        return {
            "world_size": 1,
            "gpus": [None],
            "dtype": "bfloat16",
            "lora_dtype": None,
            "served_model_name": "m",
        }


def drop_all(pipe: Any) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            left, memory = int(self.headers["Content-Length"]), memoryview(bytearray(2**20))
            while left and (count := self.rfile.readinto(memory[:left])):
                left -= count
            reply = b'{"connection": "1"}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        pipe.send(server.server_port)
        server.serve_forever()


def measure_replicas(numbers: list[int], options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, _ = make_models(Path(folder) / "model", options)
    servers = [StandIn() for _ in range(max(numbers))]
    syncs = [WeightSync(server, timeout_s=TIMEOUT_S) for server in servers]
    rows: Rows = defaultdict(list)
    modes = {str(number): lambda number=number: push(syncs[:number], model) for number in numbers}
    for mode in modes.values():
        mode()
    measure_rounds(modes, options.repeats, rows)
    print(f"{syncs[0].plan.num_bytes / 1e6:.0f} MB to each server")
    print("| servers | s (min-max) | over the first row |")
    print("| --- | --- | --- |")
    first = statistics.median(rows[str(numbers[0])])
    for number, values in rows.items():
        seconds = statistics.median(values)
        span = f"{min(values):.3f}-{max(values):.3f}"
        print(f"| {number} | {seconds:.3f} ({span}) | {seconds / first:.2f} |")
    for sync, server in zip(syncs, servers, strict=True):
        sync.close()
        server.process.kill()
        server.process.join()


def report(
    plans: dict[str, Any],
    rows: Rows,
    differences: dict[str, Tensor],
    lost: tuple[float, float],
    num_tokens: int,
) -> None:
    median = {name: statistics.median(values) for name, values in rows.items()}
    print("| mode | MB | messages | tensors | s (min-max) | (a) s | mode / (a) |")
    print("|" + " --- |" * 7)
    for mode, plan in plans.items():
        same = "adapter" if mode == "adapter" else "full"
        seconds, a = median[mode], median[f"{same} (a)"]
        span = f"{min(rows[mode]):.3f}-{max(rows[mode]):.3f}"
        print(
            f"| {mode} | {plan.num_bytes / 1e6:.2f} | {len(plan.buckets)} "
            f"| {len(plan.tensors)} | {seconds:.4f} ({span}) "
            f"| {a:.4f} | {seconds / a:.2f} |"
        )
    aims = {
        "adapter's bytes / full's, at most 0.02": (
            value := plans["adapter"].num_bytes / plans["full"].num_bytes,
            value <= 0.02,
        ),
    }
    print()
    for aim, (value, met) in aims.items():
        print(f"- {aim}: {value:.4g}: {'met' if met else 'NOT MET'}")
    print("\n| served | ms a token | times merged | logprobs: largest, mean difference |")
    print("|" + " --- |" * 4)
    merged = median["generate merged"]
    for mode in ("merged", "base", "adapter"):
        seconds, compared = median[f"generate {mode}"], differences[mode]
        print(
            f"| {mode} | {seconds / num_tokens * 1e3:.3f} | {seconds / merged:.3f} "
            f"| {compared.max():.5f}, {compared.mean():.5f} |"
        )
    sent = ", ".join(
        f"{mode} {plan.num_bytes / 1e6:.1f} MB in {median[mode]:.4f} s"
        for mode, plan in plans.items()
    )
    slower = median["generate adapter"] / merged
    print(f"\nfigure: {sent}; a token under the adapter takes {slower:.2f} times merged")
    over_base = median["generate adapter"] / median["generate base"]
    print(f"\nadapter over base on the same server, time per token: {over_base:.3f}")
    print(f"norm of the update's error in bfloat16: merged {lost[0]:.2%}, adapter {lost[1]:.2%}")


if __name__ == "__main__":
    main()
