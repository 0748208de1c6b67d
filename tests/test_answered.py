"""Supervised finetuning on a teacher's answers, beside RL in one run."""
# ruff: noqa: F811 (fixtures of another file)

import asyncio
import json
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from aiohttp import web

from tests.helpers import make_tiny_model
from tests.test_trainer import batch_gradients, make_trainer, tokenizer  # noqa: F401
from verifiers_rl import RLConfig, Teacher, WeightedEnv, env_from
from verifiers_rl.envs.base import InvalidEnvironmentError, text_of
from verifiers_rl.envs.make import make_runner
from verifiers_rl.envs.workers import WorkerEnvironment
from verifiers_rl.inference.teacher import TeacherError
from verifiers_rl.losses import LOSSES
from verifiers_rl.report.means import batch_metrics
from verifiers_rl.types import Batch, Progress, Slots


def is_right(completion, answer):
    return float(completion == answer)


@asynccontextmanager
async def answering(say=lambda text: text[::-1], statuses=(), finish="stop", away=(), seen=None):
    """A stand-in for the teacher's server. Its first answers have these statuses, and those of
    /v1/models the statuses `away` from the first request on. `seen` gets what it answers, in order,
    and how many requests it has at that moment.
    """
    requests, left, gone, num_now = [], list(statuses), list(away), 0
    seen = [] if seen is None else seen

    async def models(request):
        status = gone.pop(0) if requests and gone else 200
        seen.append(("models", status, num_now))
        if status != 200:
            return web.Response(status=status, text="away")
        return web.json_response({"data": [{"id": "big", "max_model_len": 99}]})

    async def complete(request):
        nonlocal num_now
        requests.append((request.headers["Authorization"], await request.json()))
        status = left.pop(0) if left else 200
        num_now += 1
        await asyncio.sleep(0.02)  # others that may come are here by then
        seen.append(("completions", status, num_now))
        num_now -= 1
        if status != 200:
            return web.Response(status=status, text="later")
        text = requests[-1][1]["messages"][-1]["content"]
        message = {"role": "assistant", "content": say(text)}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 1, "model": "big",
             "choices": [choice]}
        )  # fmt: skip

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", requests
    finally:
        await runner.cleanup()


def answer(
    tokenizer, tmp_path, num_rollouts=2, timeout_s=5.0, coef=1.0, prompt="abc", max_concurrent=64,
    slots=None, **server,
):  # fmt: skip
    """A group of an environment whose examples a stand-in answers, and the requests."""
    env = env_from([{"prompt": prompt, "answer": "cba"}], is_right)
    args = RLConfig(
        output_dir=str(tmp_path), use_cpu=True, env_workers=0, temperature=1.0, max_seq_len=32,
        max_tokens=12, top_p=0.9,
    )  # fmt: skip

    async def run():
        async with answering(**server) as (url, requests):
            teacher = Teacher("big", url, timeout_s=timeout_s, max_concurrent=max_concurrent)
            one = WeightedEnv(env, "taught", algorithm="sft", teacher=teacher, distill_coef=coef)
            runner = make_runner([one], "http://127.0.0.1:1", tokenizer, args)
            await runner.open()
            try:
                group = await runner.run_group(
                    "train", 0, num_rollouts, "policy", {}, 3, slots or Slots(4)
                )
            finally:
                await runner.close()
            return group, requests

    return asyncio.run(run())


def test_a_teachers_answers_become_rollouts_in_the_students_tokens(tokenizer, tmp_path):
    group, requests = answer(tokenizer, tmp_path, coef=0.5)
    assert len(group) == len(requests) == 2
    for authorization, body in requests:
        assert authorization == "Bearer none" and body["model"] == "big"
        assert (body["temperature"], body["max_tokens"], body["top_p"]) == (1.0, 12, 0.9)
    whole = tokenizer.encode("<|user|>abc<|end|><|assistant|>cba<|end|>")
    for rollout in group:
        (sample,) = rollout.samples
        assert sample.token_ids.tolist() == whole
        said = whole[sample.loss_mask.argmax() :]
        assert tokenizer.decode(said) == "cba<|end|>" and sample.num_loss_tokens == len(said)
        assert np.isnan(sample.inference_logprobs[sample.loss_mask]).all()
        assert (sample.policy_versions == -1).all()
        assert sample.advantages.tolist() == (0.5 * sample.loss_mask).tolist()
        assert (rollout.reward, rollout.env, rollout.num_turns) == (1.0, "taught", 1)
        assert rollout.error is None and rollout.has_own_advantages
    metrics = batch_metrics([group])
    assert metrics["reward"] == 1.0 and "teacher_s" not in metrics


def test_replies_that_the_tasks_own_prompt_has_are_not_learned(tokenizer, tmp_path):
    said = [("user", "ab"), ("assistant", "ba"), ("user", "abc")]
    shots = [{"role": role, "content": text} for role, text in said]
    (rollout,), _ = answer(tokenizer, tmp_path, num_rollouts=1, prompt=shots)
    (sample,) = rollout.samples
    assert tokenizer.decode(sample.token_ids[sample.loss_mask]) == "cba<|end|>"
    assert tokenizer.decode(sample.token_ids).startswith("<|user|>ab<|end|><|assistant|>ba")
    assert rollout.num_turns == 1 and rollout.completion == "cba"
    assert rollout.prompt.splitlines() == ["user: ab", "assistant: ba", "user: abc"]


def test_the_text_of_a_tool_call_has_its_name_however_it_is_written():
    called = {"name": "add", "arguments": '{"a": 1}'}
    for call in (called, {"type": "function", "id": "1", "function": called}):
        message = {"role": "assistant", "content": "so", "tool_calls": [call]}
        assert text_of([message]) == 'so [add({"a": 1})]'


def test_a_teacher_has_no_more_requests_at_a_time_than_it_takes(tokenizer, tmp_path):
    for most, expected in ((1, 1), (64, 3)):
        seen = []
        answer(tokenizer, tmp_path, num_rollouts=3, max_concurrent=most, seen=seen)
        assert max(num_now for _, _, num_now in seen) == expected


def test_files_of_the_teachers_rollouts_count_with_rollout_workers_too(tokenizer, tmp_path):
    args = RLConfig(output_dir=str(tmp_path), use_cpu=True, env_workers=1, temperature=1.0)
    env = env_from([{"prompt": "abc", "answer": "cba"}], is_right)
    one = WeightedEnv(env, "taught", algorithm="sft", teacher=Teacher("big", "http://host"))
    runner = make_runner([one], "http://127.0.0.1:1", tokenizer, args)
    assert isinstance(runner._env, WorkerEnvironment) and runner._env.files_per_rollout == 0
    assert runner.files_per_rollout == runner._answers.files_per_rollout > 0


def test_a_reply_that_a_limit_cut_teaches_nothing(tokenizer, tmp_path):
    group, _ = answer(tokenizer, tmp_path, finish="length")
    assert all(r.is_truncated and not r.samples[0].num_loss_tokens for r in group)
    group, _ = answer(tokenizer, tmp_path, say=lambda text: "x" * 60)
    for rollout in group:  # longer than max_seq_len: its beginning is learned
        (sample,) = rollout.samples
        assert rollout.is_truncated and len(sample.token_ids) == 32
        assert sample.num_loss_tokens > 20


def test_a_teacher_that_was_away_is_asked_once_more(tokenizer, tmp_path):
    group, requests = answer(tokenizer, tmp_path, num_rollouts=1, statuses=(404,))
    assert len(requests) == 2 and group[0].reward == 1.0
    group, _ = answer(tokenizer, tmp_path, num_rollouts=1, statuses=(404, 404))
    assert group[0].error is not None and not group[0].samples


def test_a_rollout_is_played_once_more_when_the_teacher_is_back_and_counts_once(
    tokenizer, tmp_path
):
    seen = []
    progress = Progress(Slots(4), on_done=lambda: seen.append(("place", "free", 0)))
    answer(
        tokenizer, tmp_path, num_rollouts=1, statuses=(404,), away=(503, 503), seen=seen,
        slots=progress,
    )  # fmt: skip
    told = [one[:2] for one in seen]
    assert told[told.index(("completions", 404)) :] == [
        ("completions", 404), ("place", "free"), ("models", 503), ("models", 503), ("models", 200),
        ("completions", 200),
    ]  # fmt: skip
    assert progress.num_done == 1


def test_a_teacher_that_stays_away_ends_the_run(tokenizer, tmp_path):
    with pytest.raises(TeacherError, match=r"gave no answer within 0\.3 s"):
        answer(tokenizer, tmp_path, timeout_s=0.3, statuses=(404, 404), away=(503,) * 99)


def test_a_teacher_that_is_not_there_ends_the_run_with_one_line(tokenizer, tmp_path):
    env = env_from([{"prompt": "abc", "answer": "cba"}], is_right)
    args = RLConfig(output_dir=str(tmp_path), use_cpu=True, env_workers=0, temperature=1.0)
    teacher = Teacher("big", "http://127.0.0.1:9", timeout_s=0.2)
    one = WeightedEnv(env, "taught", algorithm="sft", teacher=teacher)

    async def run():
        await make_runner([one], "http://127.0.0.1:1", tokenizer, args).open()

    with pytest.raises(TeacherError, match=r"no answer within 0\.2 s"):
        asyncio.run(run())


def test_a_temperature_at_which_cross_entropy_is_another_is_refused(tokenizer, tmp_path):
    args = RLConfig(output_dir=str(tmp_path), use_cpu=True, env_workers=0, temperature=0.7)
    env = env_from([{"prompt": "abc", "answer": "cba"}], is_right)
    one = WeightedEnv(env, "taught", algorithm="sft", teacher=Teacher("big", "http://host"))
    with pytest.raises(InvalidEnvironmentError, match=r"at temperature 1, and temperature=0\.7"):
        make_runner([one], "http://127.0.0.1:1", tokenizer, args)


def test_a_run_that_is_deterministic_takes_no_answers_of_a_teacher(tokenizer, tmp_path):
    args = RLConfig(
        output_dir=str(tmp_path), use_cpu=True, env_workers=0, temperature=1.0, deterministic=True
    )
    env = env_from([{"prompt": "abc", "answer": "cba"}], is_right)
    one = WeightedEnv(env, "taught", algorithm="sft", teacher=Teacher("big", "http://host"))
    with pytest.raises(InvalidEnvironmentError, match=r"'taught'.*no seeds.*remove one of the two"):
        make_runner([one], "http://127.0.0.1:1", tokenizer, args)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_every_loss_learns_answers_by_the_gradient_of_cross_entropy(
    make_trainer, tokenizer, tmp_path, loss
):
    (rollout, _), _ = answer(tokenizer, tmp_path)
    batch = Batch(0, 0, rollout.samples, [rollout])
    trainer = make_trainer(loss=loss, temperature=1.0)
    _, gradients = batch_gradients(trainer, batch.samples)
    model = make_tiny_model()
    (sample,) = rollout.samples
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0, :-1].double()
    losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
    losses[torch.from_numpy(sample.loss_mask[1:])].mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            gradients[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=json.dumps([loss, name])
        )
