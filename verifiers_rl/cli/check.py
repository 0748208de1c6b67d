"""`vf-rl --check @ config.toml`: tries what a run needs once, in order, with a line each.

    ok    what: detail
    FIX   what: what is wrong, and what to do
    skip  what: needs a check that failed

The checks that need no server come first. Then the run's own server is started. One weight sync
sends changed weights there, to see that they arrive, and a second one the model's own. A few
rollouts follow, and the `mismatch_kl` that their step would have. No process and no file is left
behind, except the server's log if a check failed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any

from verifiers_rl.cli.children import Child
from verifiers_rl.cli.config import RunConfig
from verifiers_rl.cli.plan import (
    assign_gpus,
    check_folder,
    check_trainer_options,
    servers_to_start,
    split_gpus,
    start_server,
    teachers_to_start,
)
from verifiers_rl.inference.client import TOKEN_VARIABLE, InferenceClient
from verifiers_rl.process.interrupts import handle_signals
from verifiers_rl.report.trackers import tracker_error

NUM_ROLLOUTS = 8  # of the first example of each training environment, or a group if that is smaller


class Fix(Exception):
    """A check failed; the message is one line that names the value and says what to do."""


def check(config: RunConfig, resume: bool | str | None = None) -> int:
    """Run all checks. Returns the exit status: 0 if every line is ok, else 1.

    Args:
        resume: the value that the run will get; see `prepare_run_folder`.
    """
    preflight = Preflight(config, resume)
    handle_signals(end_check)
    try:
        return preflight.run()
    finally:
        handle_signals(signal.SIG_IGN)  # let nothing interrupt the clean-up
        preflight.close()


def end_check(number: int, frame: FrameType | None) -> None:
    # SystemExit, because asyncio and the environment's code do not take it for a failed rollout.
    print(f"vf-rl: {signal.Signals(number).name}: ending the check", flush=True)
    sys.exit(128 + number)


class Preflight:
    """The checks of one run, in order. Each stores in `self` what later checks need."""

    gpus: tuple[str, ...]
    args: Any  # RLConfig; its module is heavy, so it is imported late
    client: InferenceClient
    model: Any
    tokenizer: Any
    runner: Any
    samples: list[Any]  # of the training environments' rollouts

    def __init__(self, config: RunConfig, resume: bool | str | None = None) -> None:
        self.config = config
        self.resume = resume
        self.num_failed = 0
        self.passed: set[str] = set()
        self.server: Child | None = None
        self.sync: Any = None
        self.log = Path(tempfile.gettempdir()) / f"vf-rl-check-{secrets.token_hex(4)}.log"

    def run(self) -> int:
        start = time.monotonic()
        print(f"vf-rl: checking {', '.join(map(str, self.config.files))}", flush=True)
        self.line("GPUs", self.check_gpus)
        self.line("port", self.check_port)
        self.line("options", self.check_options)
        self.line("model", self.check_model, "GPUs", "options")
        self.line("environment", self.check_environment, "options", "model")
        self.line("server", self.check_server, "port", "environment")
        self.line("weight sync", self.check_sync, "server")
        self.line("rollouts", self.check_rollouts, "weight sync")
        self.line("mismatch", self.check_mismatch, "rollouts")
        seconds = f"{time.monotonic() - start:.0f} s"
        if not self.num_failed:
            print(f"vf-rl: all is ok, after {seconds}", flush=True)
            return 0
        log = f"; the server's output is in {self.log}" if self.server is not None else ""
        print(f"vf-rl: {self.num_failed} to fix, after {seconds}{log}", flush=True)
        return 1

    def line(self, what: str, check: Callable[[], str], *needs: str) -> None:
        """Run one check and print its line. An error becomes a FIX line."""
        if missing := [name for name in needs if name not in self.passed]:
            print(f"skip  {what}: needs {', '.join(missing)}", flush=True)
            return
        try:
            detail = check()
        except Exception as error:  # anything can be wrong; the other checks still run
            from verifiers_rl.data import describe_error

            # Our own errors say what to do. For others, the line has their kind and cause.
            is_ours = type(error).__module__.startswith("verifiers_rl.")
            text = str(error) if is_ours else describe_error(error)
            print(f"FIX   {what}: {' '.join(text.split())}", flush=True)
            self.num_failed += 1
        else:
            self.passed.add(what)
            print(f"ok    {what}: {detail}", flush=True)

    def close(self) -> None:
        """End the server, and delete its log unless a check failed."""
        # The server first: a push that a signal interrupted ends when the server ends.
        if self.server is not None:
            self.server.stop()
        if self.sync is not None:
            self.sync.close()
        if hasattr(self, "client"):
            self.client.close()
        if not self.num_failed:
            self.log.unlink(missing_ok=True)

    # --- Without a server -------------------------------------------------------------------------

    def check_gpus(self) -> str:
        split_gpus(self.config)
        self.gpus = assign_gpus(self.config)
        # Set before anything here starts CUDA. We use the trainer's first GPU, as a run does.
        os.environ["CUDA_VISIBLE_DEVICES"] = self.gpus[1].split(",")[0]
        server, trainer = (f"GPU {ids}" if ids else "CPU" for ids in self.gpus[:2])
        return f"server on {server}, trainer on {trainer}"

    def check_port(self) -> str:
        from verifiers_rl.inference.port import port_error

        for host, port in (addresses := servers_to_start(self.config)):
            if problem := port_error(host, port):
                raise Fix(problem.replace("--port", "vllm_server_port in [trainer.args]"))
        return f"{len(addresses)} free" if addresses else "vllm_servers run already"

    def check_options(self) -> str:
        args = check_trainer_options(self.config)
        self.config.load_own_code()
        checkpoint = check_folder(args, self.resume)
        if problem := tracker_error(args.report_to):
            raise Fix(problem)
        return f"{args.max_steps} steps of {args.batch_size} rollouts, into {args.output_dir}" + (
            f", resuming from {checkpoint}" if checkpoint else ""
        )

    def check_model(self) -> str:
        from transformers import AutoTokenizer, set_seed

        from verifiers_rl.models import load_policy

        name = self.config.model
        on_cpu = {"use_cpu": True} if self.config.trainer_gpus == 0 else {}
        self.args = args = self.config.make_args(**on_cpu)
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        set_seed(args.seed)
        self.model = model = load_policy(name, args).to(args.device).eval()
        return (
            f"{model.num_parameters() / 1e6:.1f} M parameters, "
            f"{model.num_parameters(only_trainable=True) / 1e6:.1f} M of them trained, "
            f"{str(next(model.parameters()).dtype).removeprefix('torch.')} on {args.device}"
        )

    def check_environment(self) -> str:
        from verifiers_rl.data import describe_sizes
        from verifiers_rl.envs.make import make_runner

        # Teachers that run already are asked in the rollouts. Those of the run are not started.
        envs = self.config.load_envs(with_teachers=not teachers_to_start(self.config))
        host, port = self.args.servers()[0]
        self.client = InferenceClient(host, port, self.args.vllm_server_timeout)
        self.runner = make_runner(envs, self.client.base_url, self.tokenizer, self.args)
        handle_signals(end_check)  # loading a verifiers environment replaced them
        train, held_out = (describe_sizes(self.runner.sizes(split)) for split in ("train", "eval"))
        return (
            f"{', '.join(env.name for env in self.config.envs)}, {train} training examples, "
            f"{held_out} for evaluation"
        )

    # --- With the server --------------------------------------------------------------------------

    def check_server(self) -> str:
        args, start = self.args, time.monotonic()
        if not args.vllm_servers:
            os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(32)  # the server inherits it
            address = args.vllm_server_host, args.vllm_server_port
            server = start_server(self.config, self.gpus[0], address, self.log)  # one of several
            self.server = server.child
            server.wait_until_ready(args.vllm_server_timeout)
        for host, port in args.servers():
            with closing(InferenceClient(host, port)) as client:
                client.check_model(self.model.config)
        status = self.client.status()
        return (
            f"answers after {time.monotonic() - start:.0f} s, serves the model in "
            f"{status['dtype']} on {status['device']}, max_model_len {status['max_model_len']}"
        )

    def check_sync(self) -> str:
        import torch

        from verifiers_rl.sync import WeightSync, choose_lora_sync
        from verifiers_rl.sync.agreement import compare, sample

        args, status = self.args, self.client.status()
        lora_sync = choose_lora_sync(args.lora_sync, status)
        timeout_s = args.vllm_server_timeout
        self.sync = WeightSync(self.client, args.weight_sync_backend, lora_sync, timeout_s)
        # Weights that differ from the server's, because then the logprobs tell whether they
        # arrived. A new adapter changes no output, so nobody would notice if it got lost.
        trained = [p for p in self.model.parameters() if p.requires_grad]
        before = [p.detach().clone() for p in trained]
        with torch.no_grad():
            for p in trained:
                p += torch.randn_like(p) * (0.3 * float(p.float().std(correction=0)) or 0.06)
        self.sync.push(self.model, 0)
        prompt_ids = self.tokenizer("The server answers.").input_ids
        told = [sample(self.client, self.sync.model_name, prompt_ids, args)]
        pushed = compare(self.model, told, self.client, args)
        with torch.no_grad():
            for p, value in zip(trained, before, strict=True):
                p.copy_(value)
        stale = compare(self.model, told, self.client, args)
        if not pushed.mean < stale.mean / 3 or pushed.is_of_another_model:  # True for NaN, too
            raise Fix(
                f"after a push of changed weights, the server's logprobs are {pushed}, and "
                f"{stale.mean:.2g} from those without the change: the server does not use what it "
                "received as the trainer does; take quantization and model overrides out of "
                "[inference.args], else report it with the server's log"
            )
        result = self.sync.push(self.model, 1)
        return f"{result['sync_bytes'] / 1e6:.3g} MB in {result['sync_s']:.2f} s; {pushed}"

    def check_rollouts(self) -> str:
        from verifiers_rl.data import describe_error
        from verifiers_rl.requests import GroupRequest, Places

        model, sampling = self.sync.model_name, self.args.sampling_args()
        number = min(NUM_ROLLOUTS, self.args.rollouts_per_example)
        firsts = [0, *accumulate(self.runner.sizes("train"))][:-1]  # of each environment

        async def roll_out() -> Any:
            places, timeout_s = Places(number), self.args.generation_timeout
            try:
                await self.runner.open()
                return [
                    await self.runner.run_group(
                        GroupRequest("train", first, number, model, 1, sampling, places, timeout_s)
                    )
                    for first in firsts
                ]
            finally:
                await self.runner.close()

        self.samples = []
        said = []
        for group in asyncio.run(roll_out()):
            done = [rollout for rollout in group if rollout.error is None]
            text = f"{group[0].env}: {len(done)} of the first example"
            if failed := [rollout.error for rollout in group if rollout.error is not None]:
                text += f", {len(failed)} failed, the first with: {describe_error(failed[0])}"
            if 2 * len(done) <= len(group):
                raise Fix(text)
            self.samples += [sample for rollout in done for sample in rollout.samples]
            said.append(
                f"{text}, mean reward {sum(r.reward for r in done) / len(done):.3g}, "
                f"{sum(r.num_sampled_tokens for r in done)} sampled tokens in "
                f"{sum(r.num_turns for r in done)} turn(s), at most "
                f"{max(r.generation_s for r in done):.1f} s"
            )
        return "; ".join(said)

    def check_mismatch(self) -> str:
        from verifiers_rl.report.metrics import EarlyWarnings
        from verifiers_rl.sync.agreement import compare

        found = compare(self.model, self.samples, self.client, self.args)
        detail = f"mismatch_kl {found.mismatch_kl:.1e}, {found}"
        if not found.mismatch_kl <= EarlyWarnings.FIRST_MISMATCH_KL:  # True for NaN, too
            raise Fix(
                f"{detail}: above {EarlyWarnings.FIRST_MISMATCH_KL:g}; docs/mismatch.md says which "
                "option brings both sides together"
            )
        return detail
