"""A teacher and what it adds to the advantages, with a stand-in for its server."""

import asyncio
import math
import re
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from aiohttp import web
from pydantic import ValidationError

from tests.conftest import free_port
from tests.helpers import StubRunner, make_request, make_tokenizer
from tests.serving import in_thread, serving
from verifiers_rl import RLConfig, WeightedEnv
from verifiers_rl.distill import Distillation, Teacher
from verifiers_rl.distill.teacher import check_vocabulary, teacher_advantages
from verifiers_rl.envs.base import InvalidEnvironmentError, RunnerOptions
from verifiers_rl.envs.make import Environments, Part, make_runner
from verifiers_rl.inference import InferenceServerError, ServerLostError
from verifiers_rl.types import Sample


def logprob_of(before, token):
    """What the stand-in thinks of a token after another one."""
    return -0.1 - (7 * before + 3 * token) % 11 / 5


def answer_to(ids):
    entries = [
        {str(token): {"logprob": logprob_of(before, token), "rank": 1, "decoded_token": "x"}}
        for before, token in pairwise(ids)
    ]
    return {"choices": [{"prompt_logprobs": [None, *entries]}]}


@asynccontextmanager
async def teaching(change=lambda reply: reply, statuses=()):
    """The URL of a stand-in for vLLM, and the requests that it gets. Its first answers have these
    statuses, and `change` changes the others.
    """
    requests, left = [], list(statuses)

    async def answer(request):
        requests.append((dict(request.headers), await request.json()))
        if left:
            if (status := left.pop(0)) is None:  # the answer is lost on its way
                await asyncio.sleep(60)
            return web.Response(status=status, text="later")
        return web.json_response(change(answer_to(requests[-1][1]["prompt"])))

    async with serving(answer, "/v1/completions") as url:
        yield url, requests


OPSD = {"algorithm": "opsd", "hint": "{answer}"}


def connected(distillation, url, tokenizer=None, example="any"):
    options = RunnerOptions(url, tokenizer, 64, name="taught")
    args = RLConfig(use_cpu=True, temperature=1.0, max_seq_len=64, generation_timeout=5.0)
    distillation.connect(options, args, example)
    return distillation


def ask(ids, change=lambda reply: reply, statuses=(), is_own=False, **options):
    """The logprobs of one request, and the requests that the stand-in got."""

    async def run():
        async with teaching(change, statuses) as (url, requests):
            teacher = Teacher(**{"model": "big", "base_url": url, **options})
            asking = connected(Distillation(**OPSD) if is_own else Distillation(teacher), url)
            try:
                await asking.open()
                return await asking.logprobs(np.array(ids)), requests
            finally:
                await asking.close()

    return asyncio.run(run())


def test_the_teachers_logprobs_are_those_of_exactly_these_tokens(monkeypatch):
    monkeypatch.setenv("BIG_KEY", "secret")
    found, ((headers, body),) = ask([5, 3, 9, 9], key_variable="BIG_KEY")
    assert math.isnan(found[0])
    assert found[1:].tolist() == [logprob_of(5, 3), logprob_of(3, 9), logprob_of(9, 9)]
    assert body["prompt"] == [5, 3, 9, 9] and body["model"] is None
    assert body["prompt_logprobs"] == 0 and body["max_tokens"] == 1
    assert headers["Authorization"] == "Bearer secret"
    _, ((headers, _),) = ask([5, 3])  # the run's own token is for its own server
    assert "Authorization" not in headers
    with pytest.raises(InferenceServerError, match="NO_SUCH_KEY is not set"):
        ask([5, 3], key_variable="NO_SUCH_KEY")


@pytest.mark.parametrize(
    "statuses, timeout_s, said",
    [
        ((503, 429), 300.0, "is not there (status 503: later); waiting"),
        ((None,), 2.0, "waiting for it"),
    ],
)
def test_a_teacher_that_is_busy_or_whose_answer_was_lost_is_asked_again(
    caplog, statuses, timeout_s, said
):
    found, requests = ask([5, 3], statuses=statuses, timeout_s=timeout_s)
    assert found[1] == logprob_of(5, 3) and len(requests) == len(statuses) + 1
    assert caplog.text.count(said) == 1


def test_a_teacher_that_stays_away_ends_the_run_with_one_line():
    with pytest.raises(InferenceServerError) as raised:
        ask([5, 3], statuses=(503,) * 50, timeout_s=0.5)
    said = r"teacher 'big' at http://\S+: no answer in 0\.5 s \(timeout_s\), at last 503 'later'"
    assert re.match(said, str(raised.value)) and "\n" not in str(raised.value)
    with pytest.raises(InferenceServerError, match=r"0\.3 s .*Cannot connect.*; start it again"):
        ask([5, 3], base_url=f"http://127.0.0.1:{free_port()}/v1/", timeout_s=0.3)


def set_logprob(value):
    def change(reply):
        reply["choices"][0]["prompt_logprobs"][1]["3"]["logprob"] = value
        return reply

    return change


def shorten(reply):
    reply["choices"][0]["prompt_logprobs"].pop()
    return reply


def other_token(reply):
    entries = reply["choices"][0]["prompt_logprobs"]
    entries[1] = {"4": entries[1]["3"]}
    return reply


def plain_numbers(reply):
    reply["choices"][0]["prompt_logprobs"][1] = {"3": -0.5}
    return reply


@pytest.mark.parametrize(
    "change, problem",
    [
        (shorten, "longer than argument|shorter than argument"),
        (other_token, "KeyError"),
        (set_logprob(math.nan), "the logprob of a token is nan"),
        (set_logprob(-9999.0), "the logprob of a token is -9999"),
        (plain_numbers, "does not answer as vLLM does: .*; is it a vLLM server"),
    ],
)
def test_a_wrong_reply_is_an_error_and_never_a_number(change, problem):
    with pytest.raises(InferenceServerError, match=problem):
        ask([5, 3], change)


@pytest.mark.parametrize(
    "status, is_own, error, said",
    [
        (400, False, InferenceServerError, "refuses: status 400: later"),
        (401, False, InferenceServerError, "status 401: later; set key_variable"),
        (400, True, InferenceServerError, "--max-model-len above max_seq_len, and the hint"),
        # A lost server of the run's own is the trainer's to wait for.
        (404, True, ServerLostError, "status 404: later"),
        (503, True, ServerLostError, "status 503: later"),
    ],
)
def test_a_server_that_refuses_is_asked_once(status, is_own, error, said):
    with pytest.raises(error, match=said):
        ask([5, 3], statuses=(status,), is_own=is_own)


# --- Advantages -----------------------------------------------------------------------------------


def expected(sample, theirs, coef):
    """Advantages by the definition, token by token."""
    found = []
    for place in range(len(sample.token_ids)):
        is_sampled = sample.policy_versions[place] >= 0
        if not sample.loss_mask[place] or not is_sampled:
            found.append(0.0)
        else:
            found.append(-coef * (float(sample.inference_logprobs[place]) - float(theirs[place])))
    return found


def test_the_teachers_advantages_equal_those_worked_out_by_hand():
    prompt = Sample([7, 8], [False, True], [0.0, -1.0], [-1, 4])
    # The last token is in the loss, and no policy has sampled it.
    other = Sample([5, 3, 9, 2], [False, True, True, True], [0, -0.5, -2, math.nan], [-1, 4, 4, -1])
    theirs = [np.array([math.nan, -3.0]), np.array([math.nan, -1.5, -0.25, -9.0])]
    added, kl = teacher_advantages([prompt, other], theirs, 0.5)
    # -0.5 * (-1 + 3), -0.5 * (-0.5 + 1.5), -0.5 * (-2 + 0.25)
    assert added.tolist() == [0.0, -1.0, 0.0, -0.5, 0.875, 0.0]
    assert kl == pytest.approx((2.0 + 1.0 - 1.75) / 3)


# --- Scoring groups -------------------------------------------------------------------------------


def taught(runner, distillation, url="http://127.0.0.1:1", tokenizer=None, example=None):
    """An environment with this runner, whose training rollouts are scored."""
    connected(distillation, url, tokenizer, example)
    return Environments([Part(WeightedEnv(runner, "taught", scorer=distillation), runner, {})])


async def run_group(env, request):
    await env.open()
    try:
        return await env.run_group(request)
    finally:
        await env.close()


def generate(make_orchestrator, algorithm, runner=None, **options):
    """A batch of a stub environment with the stand-in as its teacher, and the requests."""
    with in_thread(teaching()) as (url, requests):
        teacher = Distillation(Teacher("big", url), algorithm, 0.5)
        orchestrator = make_orchestrator(taught(runner or StubRunner(), teacher), **options)
        orchestrator.submit(0, "policy", 0)
        return orchestrator.get(), requests


def theirs_of(sample):
    ids = sample.token_ids.tolist()
    return [math.nan, *(logprob_of(a, b) for a, b in pairwise(ids))]


@pytest.mark.parametrize(
    "algorithm, of_rewards", [("opd", [0.0] * 8), ("rl", [-1.5, -0.5, 0.5, 1.5] * 2)]
)
def test_a_teacher_takes_the_place_of_rewards_or_adds_to_their_advantages(
    make_orchestrator, algorithm, of_rewards
):
    batch, requests = generate(make_orchestrator, algorithm)
    assert len(requests) == len(batch.samples) == 8
    for rollout, reward in zip(batch.rollouts, of_rewards, strict=True):
        (sample,) = rollout.samples
        wanted = np.array(expected(sample, theirs_of(sample), 0.5)) + reward * sample.loss_mask
        assert sample.advantages.tolist() == pytest.approx(wanted.tolist(), abs=1e-6)
    assert batch.metrics["reward"] == 1.5  # whatever is learned
    kls = [-sum(expected(s, theirs_of(s), 1.0)) / s.num_loss_tokens for s in batch.samples]
    assert batch.metrics["taught/teacher_kl"] == pytest.approx(np.mean(kls))
    assert batch.metrics["taught/teacher_s"] > 0


def test_groups_of_one_reward_are_learned_from_if_they_have_a_teacher(make_orchestrator):
    same = StubRunner(outcome=lambda index, i: 1.0)
    batch, _ = generate(make_orchestrator, "opd", same, group_filter={"min_reward_variance": 1e-6})
    assert len(batch.rollouts) == 8 and batch.metrics["filtered_share"] == 0
    assert batch.sizes.has_advantage.all()


def test_evaluations_and_failed_rollouts_need_no_teacher():
    outcome = {"outcome": lambda index, i: ValueError("no")}

    async def run(split):
        async with teaching() as (url, requests):
            env = taught(StubRunner(**outcome), Distillation(Teacher("big", url)))
            return await run_group(env, make_request(0, 4, split)), requests

    _, requests = asyncio.run(run("train"))
    assert not requests
    outcome.clear()
    group, requests = asyncio.run(run("eval"))
    assert not requests and all(rollout.added_advantages is None for rollout in group)


# --- Self-distillation ----------------------------------------------------------------------------


def test_the_teacher_of_opsd_reads_the_hint_before_the_rollouts_own_tokens(tokenizer, monkeypatch):
    async def example(split, index):
        return {"split": split, "prompt": "p", "answer": f"a{index}"}

    text = "<|system|>The answer is a6.<|end|>"
    hint = tokenizer.encode(text)

    async def run(text):
        async with teaching() as (url, requests):
            teacher = Distillation(algorithm="opsd", hint=text)
            env = taught(StubRunner(), teacher, url, tokenizer, example)
            group = await run_group(env, make_request(6, 2, model="adapter"))
            return group, [body for _, body in requests]

    group, bodies = asyncio.run(run("The answer is {answer}."))
    for rollout in group:
        (sample,) = rollout.samples
        (body,) = [b for b in bodies if b["prompt"] == hint + sample.token_ids.tolist()]
        assert body["model"] == "adapter"
        wanted = expected(sample, theirs_of(sample), 1.0)  # the stand-in looks one token back
        assert rollout.added_advantages == pytest.approx(wanted, abs=1e-6)
    for hint, problem in (
        ("{reply}", "'reply'.*fields answer, prompt"),
        ("{answer[9]}", "IndexErr"),
    ):
        with pytest.raises(InvalidEnvironmentError, match=f"'taught'.*{problem}"):
            asyncio.run(run(hint))
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no system message') }}")
    with pytest.raises(InvalidEnvironmentError, match=r"'taught': hint=.*no system message"):
        asyncio.run(run("The answer is {answer}."))


# --- What is refused at the start -----------------------------------------------------------------


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path):
    ours, theirs = make_tokenizer("one"), make_tokenizer("two")
    ours.save_pretrained(tmp_path / "same")
    theirs.save_pretrained(tmp_path / "other")
    check_vocabulary(Teacher(f"{tmp_path}/same", "http://host"), ours)
    with pytest.raises(InferenceServerError, match="its vocabulary is not the student's"):
        check_vocabulary(Teacher(f"{tmp_path}/other", "http://host"), ours)
    with pytest.raises(InferenceServerError, match=r"model=.* has no tokenizer"):
        check_vocabulary(Teacher(f"{tmp_path}/none", "http://host"), ours)


BIG = partial(Teacher, model="big", base_url="http://host")
TEACHER = BIG()
TAUGHT = partial(Distillation, TEACHER)


@pytest.mark.parametrize(
    "make, options, problem",
    [
        (BIG, {"model": ""}, r"model\n.* at least 1 character"),
        (BIG, {"timeout_s": 0}, r"timeout_s\n.* greater than 0"),
        (BIG, {"max_concurrent": 0}, r"max_concurrent\n.* greater than or equal to 1"),
        (Distillation, {"algorithm": "opsd"}, "algorithm='opsd', hint='': 'opsd' needs a hint"),
        (TAUGHT, {"hint": "x"}, "algorithm='opd', hint='x'"),
        (Distillation, {"algorithm": "opsd", "hint": "{"}, "Single '{' encountered"),
        (TAUGHT, {"distill_coef": math.inf}, r"distill_coef\n.* finite number"),
    ],
)
def test_a_teacher_or_a_distillation_that_cannot_work_is_refused(make, options, problem):
    with pytest.raises(ValidationError, match=problem):
        make(**options)


def test_a_scorer_of_evaluations_is_refused():
    with pytest.raises(ValueError, match=r"'words'.*no effect beside only='eval'"):
        WeightedEnv("reverse_text", "words", only="eval", scorer=Distillation(TEACHER))


def test_a_distillation_has_one_environment():
    """It has the examples of that one, which a hint names."""
    one, runner = Distillation(TEACHER), StubRunner()
    parts = [Part(WeightedEnv(runner, name, scorer=one), runner, {}) for name in "ab"]
    with pytest.raises(InvalidEnvironmentError, match=r"one scorer, .* given to two environments"):
        Environments(parts)


def test_a_group_may_wait_for_the_slowest_teacher():
    slow = Distillation(Teacher("t", "http://host", timeout_s=400))
    scorers, runner = {"a": None, "b": Distillation(TEACHER), "c": slow}, StubRunner()
    weighted = [WeightedEnv(runner, name, scorer=one) for name, one in scorers.items()]
    parts = [Part(one, runner, {}) for one in weighted]
    assert Environments(parts).scoring_timeout_s == 400


@pytest.mark.parametrize(
    "scorer, options, problem",
    [
        (TAUGHT(), {"temperature": 0.7}, "temperature 1 without cuts; remove .*temperature"),
        (TAUGHT(), {"top_p": 0.9}, "temperature 1 without cuts; remove .*top_p"),
        (TAUGHT(), {"sampling_mask": True}, "temperature 1 without cuts; remove .*sampling_mask"),
        (Distillation(**OPSD), {}, "`async example"),
        # Of which one may be behind the others.
        (Distillation(**OPSD), {"vllm_servers": ["a:1", "b:1"]}, "cannot be its own teacher"),
    ],
)
def test_a_run_that_a_scorer_cannot_work_with_is_refused(scorer, options, problem):
    runner = StubRunner()
    if "vllm_servers" in options:
        runner.example = lambda split, index: None
    args = RLConfig(**{"use_cpu": True, "env_workers": 0, "temperature": 1.0, **options})
    with pytest.raises(InvalidEnvironmentError, match=problem):
        make_runner([WeightedEnv(runner, "env", scorer=scorer)], "http://host", None, args)
