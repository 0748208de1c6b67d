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
from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.envs.make import make_runner
from verifiers_rl.inference.teacher import TeacherError
from verifiers_rl.losses import LOSSES
from verifiers_rl.report.means import batch_metrics
from verifiers_rl.types import Batch, Slots


def is_right(completion, answer):
    return float(completion == answer)


@asynccontextmanager
async def answering(say=lambda text: text[::-1], statuses=(), finish="stop"):
    """A stand-in for the teacher's server. Its first answers have these statuses."""
    requests, left = [], list(statuses)

    async def models(request):
        return web.json_response({"data": [{"id": "big", "max_model_len": 99}]})

    async def complete(request):
        requests.append((request.headers["Authorization"], await request.json()))
        if left:
            return web.Response(status=left.pop(0), text="later")
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


def answer(tokenizer, tmp_path, num_rollouts=2, timeout_s=5.0, coef=1.0, **server):
    """A group of an environment whose examples a stand-in answers, and the requests."""
    env = env_from([{"prompt": "abc", "answer": "cba"}], is_right)
    args = RLConfig(
        output_dir=str(tmp_path), use_cpu=True, env_workers=0, temperature=1.0, max_seq_len=32,
        max_tokens=12, top_p=0.9,
    )  # fmt: skip

    async def run():
        async with answering(**server) as (url, requests):
            teacher = Teacher("big", url, timeout_s=timeout_s)
            one = WeightedEnv(env, "taught", algorithm="sft", teacher=teacher, distill_coef=coef)
            runner = make_runner([one], "http://127.0.0.1:1", tokenizer, args)
            await runner.open()
            try:
                slots = Slots(4)
                group = await runner.run_group("train", 0, num_rollouts, "policy", {}, 3, slots)
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
    assert batch_metrics([group])["reward"] == 1.0


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
