"""The divergence from a teacher's likeliest tokens: its formula, its gradient, its way there."""
# ruff: noqa: F811 (fixtures of another file)

import asyncio
import math

import numpy as np
import pytest
import torch

from tests.helpers import StubRunner, make_samples, make_tiny_model
from tests.reference import reference_divergence
from tests.test_prefixes import Waits
from tests.test_teacher import TEACHER, NamedRunner, logprob_of, teaching
from tests.test_trainer import (  # noqa: F401
    batch_gradients,
    check_against_reference,
    make_trainer,
    tokenizer,
)
from tests.tree_samples import make_tree
from verifiers_rl import RLConfig, WeightedEnv
from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.envs.distilled import DistilledEnvironment
from verifiers_rl.envs.make import make_runner
from verifiers_rl.inference import Teacher, TeacherClient
from verifiers_rl.inference.teacher import TeacherError
from verifiers_rl.logprobs import chunked_logprobs_and_entropy, token_logprobs_and_entropy
from verifiers_rl.packing import collate
from verifiers_rl.report.means import batch_metrics
from verifiers_rl.report.metrics import TokenMeans
from verifiers_rl.sample_bytes import BYTES_PER_TOKEN, flatten_samples, unflatten_samples
from verifiers_rl.types import (
    Rollout,
    Sample,
    SampleSizes,
    SamplingMask,
    Slots,
    TeacherTargets,
    TeacherTop,
)


def likeliest(logits, k):
    """The k likeliest tokens of a teacher with these logits, as `TeacherTargets` with weight 1."""
    logprobs, ids = logits.double().log_softmax(-1).float().topk(k)
    return TeacherTargets(ids, logprobs, torch.ones(len(ids)))


def grads_of(divergence, *tensors):
    return torch.autograd.grad(divergence.sum(), tensors)


# --- The formula ----------------------------------------------------------------------------------


def test_the_divergence_equals_the_sum_worked_out_by_hand():
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    teacher = TeacherTargets(torch.tensor([[0]]), torch.tensor([[0.8]]).log(), torch.ones(1))
    *_, found = token_logprobs_and_entropy(logits, torch.tensor([1]), 1.0, teacher=teacher)
    assert found.item() == pytest.approx(
        0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2), abs=1e-6
    )
    all_three = TeacherTargets(
        torch.tensor([[2, 0, 1]]), torch.tensor([[0.1, 0.8, 0.1]]).log(), torch.ones(1)
    )
    *_, found = token_logprobs_and_entropy(logits, torch.tensor([1]), 1.0, teacher=all_three)
    whole = 0.5 * math.log(0.5 / 0.8) + 2 * 0.25 * math.log(0.25 / 0.1)
    assert found.item() == pytest.approx(whole, abs=1e-6)  # the whole reverse KL


@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
@pytest.mark.parametrize("head_is_trained", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 7, 100])
def test_divergence_and_gradient_equal_a_float64_loop(chunk_size, head_is_trained, entropy):
    torch.manual_seed(0)
    num, size, vocab, k = 16, 5, 23, 4
    head = torch.randn(vocab, size).requires_grad_(head_is_trained)
    hidden = (2 * torch.randn(num, size)).requires_grad_()
    teacher = likeliest(3 * torch.randn(num, vocab), k)
    teacher.logprobs[3] = -torch.inf  # no say
    teacher.logprobs[5, 2:], teacher.token_ids[5, 2:] = -torch.inf, teacher.token_ids[5, 0]
    targets, weights = torch.randint(vocab, (num,)), torch.randn(3, num)

    def total(logprobs, entropies, divergence):
        parts = [(weights[0] * logprobs).sum(), (weights[2] * divergence).sum()]
        return sum(parts) + ((weights[1] * entropies).sum() if entropy == "gradient" else 0.0)

    outputs = chunked_logprobs_and_entropy(
        hidden, lambda h: h @ head.T, targets, 0.7, chunk_size, entropy, head_is_trained,
        teacher=teacher,
    )  # fmt: skip
    trained = [hidden, head] if head_is_trained else [hidden]
    found = torch.autograd.grad(total(*outputs), trained)

    double = [t.detach().double().requires_grad_() for t in trained]
    policy = ((double[0] @ (double[1] if head_is_trained else head.double()).T) / 0.7).log_softmax(
        -1
    )
    divergence = torch.stack(
        [reference_divergence(*row) for row in zip(policy, teacher.token_ids, teacher.logprobs,
                                                   strict=True)]
    )  # fmt: skip
    expected = (policy[range(num), targets], -(policy.exp() * policy).sum(-1), divergence)
    wanted = torch.autograd.grad(total(*expected), double)
    np.testing.assert_allclose(outputs[2].detach(), divergence.detach(), atol=1e-5)
    np.testing.assert_allclose(outputs[0].detach(), expected[0].detach(), atol=1e-5)
    if entropy != "none":
        np.testing.assert_allclose(outputs[1].detach(), expected[1].detach(), atol=1e-5)
    assert outputs[2][3] == 0 and (outputs[2].detach() >= 0).all()
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize("k", [1, 4, 23])
@pytest.mark.parametrize("scale", [1.0, 20.0])  # with 20, all of the teacher's mass is in its top k
def test_a_teacher_that_agrees_gives_no_gradient(k, scale):
    torch.manual_seed(1)
    logits = (scale * torch.randn(32, 23)).requires_grad_()
    targets = torch.zeros(32, dtype=torch.int64)
    teacher = likeliest(logits.detach(), k)
    *_, divergence = token_logprobs_and_entropy(logits, targets, 1.0, teacher=teacher)
    (gradient,) = grads_of(divergence, logits)
    assert gradient.abs().max() < 1e-6 and divergence.abs().max() < 1e-6
    # Without the tail, the gradient would move the mass that is in the top k.
    other = likeliest(logits.detach() + scale * torch.randn(32, 23), k)
    *_, divergence = token_logprobs_and_entropy(logits, targets, 1.0, teacher=other)
    assert grads_of(divergence, logits)[0].abs().max() > 1e-2


# --- In the step ----------------------------------------------------------------------------------


def teach(samples, k=3, coef=0.5, advantage=None, seed=0):
    """Let a teacher have a say about most tokens in the loss."""
    rng = np.random.default_rng(seed)
    for number, sample in enumerate(samples):
        length = len(sample.token_ids)
        ids = np.array([rng.permutation(250)[:k] for _ in range(length)])
        logprobs = np.log(rng.dirichlet(np.ones(k + 1), length)[:, :k])
        logprobs[(np.arange(length) % 4 == 1) | ~sample.loss_mask] = -np.inf
        if number % 3:  # the others have none
            sample.teacher_top = TeacherTop(ids, logprobs, coef)
        if advantage is not None:
            sample.set_advantage(advantage)
    return samples


@pytest.mark.parametrize("normalization", ["token", "sequence"])
@pytest.mark.parametrize("layout", ["packed", "flat", "padded"])
def test_the_step_with_a_teacher_equals_the_float64_reference(make_trainer, layout, normalization):
    trainer = make_trainer(
        loss="reinforce", loss_normalization=normalization, logits_chunk_tokens=5, temperature=1.0
    )
    trainer._layout = layout
    check_against_reference(trainer, make_tiny_model, teach(make_samples(9)))
    assert trainer._window.steps[0]["distill_loss"] > 0


def test_a_frozen_head_and_full_logits_have_the_teachers_gradient_too(make_trainer, monkeypatch):
    def gradients(**options):
        trainer = make_trainer(loss="reinforce", use_lora=True, temperature=1.0, **options)
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                torch.manual_seed(len(name))
                parameter.data.normal_(std=0.1)
        return batch_gradients(trainer, teach(make_samples(9), advantage=0.0))

    loss, chunked = gradients(logits_chunk_tokens=5)
    from verifiers_rl import model_trials

    monkeypatch.setattr(model_trials, "reason_against_chunking", lambda *models: "it has no head")
    full_loss, full = gradients()
    assert loss == pytest.approx(full_loss, rel=1e-5) and loss > 0.1
    for name, gradient in full.items():
        torch.testing.assert_close(chunked[name], gradient, rtol=1e-4, atol=1e-6)
    assert any(gradient.abs().max() > 1e-4 for gradient in full.values())


def test_shared_prefixes_give_the_teachers_gradient_of_samples_alone(make_trainer):
    def gradients(shares):
        trainer = make_trainer(share_prefixes=shares, micro_batch_size=8, temperature=1.0)
        found = batch_gradients(trainer, teach(make_tree(3), advantage=0.0))
        return (*found, trainer._window.steps[0])

    loss, shared, row = gradients(True)
    expected_loss, alone, row_alone = gradients(False)
    assert loss == pytest.approx(expected_loss, rel=1e-5) and loss > 0.1
    assert row["distill_loss"] == pytest.approx(row_alone["distill_loss"], rel=1e-5)
    for name, gradient in alone.items():
        torch.testing.assert_close(shared[name], gradient, rtol=1e-4, atol=1e-6)


def test_microbatches_do_not_change_the_teachers_gradient(make_trainer):
    samples = teach(make_samples(9), advantage=0.0)
    results = [
        batch_gradients(make_trainer(micro_batch_size=size, temperature=1.0), samples)
        for size in (1, 9)
    ]
    (loss, one_by_one), (whole_loss, whole) = results
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    for name, gradient in whole.items():
        torch.testing.assert_close(one_by_one[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("use_lora", [False, True])
def test_the_reference_takes_no_divergence_from_the_teacher(make_trainer, monkeypatch, use_lora):
    trainer = make_trainer(kl_beta=0.1, use_lora=use_lora, temperature=1.0)
    results = []
    predict = type(trainer).token_logprobs

    def recording(self, *given):
        results.append(predict(self, *given))
        return results[-1]

    monkeypatch.setattr(type(trainer), "token_logprobs", recording)
    batch_gradients(trainer, teach(make_samples(9)))
    # Logprobs, entropy and divergence of the policy; logprobs and entropy of the reference.
    assert {len(result) for result in results[::2]} == {3}
    assert {len(result) for result in results[1::2]} == {2}


def test_only_samples_with_an_advantage_or_a_teacher_are_computed(make_trainer):
    samples = teach(make_samples(9), advantage=0.0)
    sizes = SampleSizes.of(samples)
    assert sizes.has_advantage.tolist() == sizes.teacher_k.clip(0, 1).tolist() == [0, 1, 1] * 3
    trainer = make_trainer(temperature=1.0)
    batch_gradients(trainer, samples)
    assert trainer._window.steps[0]["idle_sample_share"] == pytest.approx(1 / 3)


def test_training_moves_the_policy_to_the_teacher(make_trainer):
    samples, model, teacher = make_samples(8), make_tiny_model(), make_tiny_model(seed=3)
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            logprobs, top = (3 * teacher(input_ids=ids).logits[0]).log_softmax(-1).topk(5)
        shifted = np.full((len(sample.token_ids), 5), -np.inf, np.float32)
        shifted[1:] = logprobs[:-1]
        shifted[~sample.loss_mask] = -np.inf
        sample.teacher_top = TeacherTop(np.roll(top.numpy(), 1, 0), shifted)
        sample.set_advantage(0.0)
    trainer = make_trainer(model, temperature=1.0)
    optimizer = torch.optim.Adam(trainer.model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        losses.append(batch_gradients(trainer, samples)[0])
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


# --- Its way --------------------------------------------------------------------------------------


def test_what_the_teacher_says_travels_with_its_sample():
    top = TeacherTop([[0, 0], [7, 3], [4, 4]], [[-np.inf] * 2, [-0.5, -1.5], [-0.25, -np.inf]], 0.3)
    first = Sample([9, 2, 7], [0, 1, 1], [0, -1, -1], [-1, 0, 0], teacher_top=top)
    first.sampling_mask = SamplingMask([0, 2, 1], [2, 3, 7])
    first.routed_experts = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    plain = Sample([5, 6], [0, 1], [0, -1], [-1, 0])
    wide = Sample([1, 2], [0, 1], [0, -1], [-1, 0], teacher_top=TeacherTop(
        [[0] * 3, [5, 6, 8]], [[-np.inf] * 3, [-1.0, -2.0, -3.0]], 2.0))  # fmt: skip
    samples = [first, plain, wide]
    sizes = SampleSizes.of(samples)
    assert sizes.teacher_k.tolist() == [2, 0, 3]
    of_first = 16 + 4 * (3 + 3) + (8 * 6 + 4) + 2 * 12
    assert sizes.num_optional_bytes.tolist() == [of_first, 0, 16 + 8 * 6 + 4]
    flat = flatten_samples(samples)
    assert len(flat) == 7 * BYTES_PER_TOKEN + of_first + 68
    copies = unflatten_samples(flat, [3, 2, 2], sizes.num_optional_bytes.tolist())
    for sample, copied in zip((first, wide), copies[::2], strict=True):
        assert copied.teacher_top.token_ids.tolist() == sample.teacher_top.token_ids.tolist()
        assert copied.teacher_top.logprobs.tolist() == sample.teacher_top.logprobs.tolist()
        assert copied.teacher_top.coef == pytest.approx(sample.teacher_top.coef)
    assert copies[1].teacher_top is None
    assert copies[0].sampling_mask.token_ids.tolist() == [2, 3, 7]
    assert copies[0].routed_experts.ravel().tolist() == list(range(12))

    targets = collate(copies, [[2, 1], [0]], [1.0] * 3, 0, teacher_k=3).targets
    assert targets.token_ids.tolist() == [2, 6, 2, 7]
    assert targets.teacher.token_ids.tolist() == [[5, 6, 8], [0, 0, 0], [7, 3, 7], [4, 4, 4]]
    inf = math.inf
    assert targets.teacher.logprobs.tolist() == [
        [-1, -2, -3], [-inf, -inf, -inf], [-0.5, -1.5, -inf], [-0.25, -inf, -inf]
    ]  # fmt: skip
    assert targets.teacher.coefs.tolist() == pytest.approx([2.0, 0.0, 0.3, 0.3])
    empty = collate(copies, [], [1.0] * 3, 0, teacher_k=3)  # of a rank without samples
    assert not empty.has_loss and (empty.targets.teacher.logprobs == -inf).all()
    assert collate(copies, [[1]], [1.0] * 3, 0).targets.teacher is None


def test_arrays_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"token_ids of shape \(1, 2\) and logprobs of shape"):
        TeacherTop([[1, 2]], [[0.0]])
    with pytest.raises(ValueError, match="a teacher_top of 1 tokens for 2 tokens"):
        Sample([8, 9], [0, 1], [0, -1], [-1, 0], teacher_top=TeacherTop([[1]], [[0.0]]))


def with_top(reply):
    """Give the stand-in's reply three likelier tokens in even places. In odd places, the prompt's
    own token is the second of three.
    """
    for place, entries in enumerate(reply["choices"][0]["prompt_logprobs"]):
        if entries is None:
            continue
        (own,) = entries.values()
        own["rank"] = 2 if place % 2 else 4
        others = {f"{300 + k}": {"logprob": -0.01 * (k + 1), "rank": k + 1} for k in range(3)}
        if place % 2:
            own["logprob"] = -0.015
            others.pop("302")
        entries |= others
    return reply


def distil(algorithm="opd", change=with_top, **options):
    """A group that the stand-in has scored, and the requests."""

    async def run():
        async with teaching(change) as (url, requests):
            client = TeacherClient(Teacher("big", url))
            env = DistilledEnvironment(StubRunner(), algorithm, client, 0.5, **options)
            await env.open()
            try:
                return await env.run_group("train", 0, 2, "m", {}, 0, Slots(4)), requests
            finally:
                await env.close()

    return asyncio.run(run())


def test_the_teachers_likeliest_tokens_take_the_place_of_its_advantages():
    group, requests = distil(distill_loss="topk", top_k=2)
    assert all(body["prompt_logprobs"] == 2 for _, body in requests)
    for rollout in group:
        (sample,) = rollout.samples
        top, ids = sample.teacher_top, sample.token_ids.tolist()
        assert top.coef == 0.5 and top.token_ids.shape == (len(ids), 2)
        for place in range(len(ids)):
            if not sample.loss_mask[place]:
                assert (top.logprobs[place] == -np.inf).all()
            elif place % 2:
                assert top.token_ids[place].tolist() == [300, ids[place]]
                assert top.logprobs[place].tolist() == pytest.approx([-0.01, -0.015])
            else:
                assert top.token_ids[place].tolist() == [300, 301]
        assert not rollout.teacher.advantages.any() and not sample.advantages.any()
        even = int(sum(sample.loss_mask[0::2]))
        assert rollout.teacher.num_outside_top_k == even
        expected = [
            float(sample.inference_logprobs[t])
            + (0.015 if t % 2 else -logprob_of(ids[t - 1], ids[t]))
            for t in range(1, len(ids))
            if sample.loss_mask[t]
        ]
        assert rollout.teacher.kl == pytest.approx(np.mean(expected), abs=1e-6)
    metrics = batch_metrics([group])
    num_outside = sum(r.teacher.num_outside_top_k for r in group)
    num_tokens = sum(r.teacher.num_tokens for r in group)
    assert metrics["outside_top_k_share"] == pytest.approx(num_outside / num_tokens)
    assert 0 < metrics["outside_top_k_share"] < 1


def test_the_sampled_form_asks_for_no_other_tokens_and_knows_the_share_too():
    group, requests = distil(top_k=3)
    assert all(body["prompt_logprobs"] == 0 for _, body in requests)
    assert all(r.samples[0].teacher_top is None and r.teacher.advantages.any() for r in group)
    assert batch_metrics([group])["outside_top_k_share"] > 0
    assert batch_metrics([distil(top_k=4)[0]])["outside_top_k_share"] == 0

    def without_ranks(reply):
        for entries in reply["choices"][0]["prompt_logprobs"][1:]:
            for entry in entries.values():
                del entry["rank"]
        return reply

    assert "outside_top_k_share" not in batch_metrics([distil(change=without_ranks)[0]])


@pytest.mark.parametrize("distill_loss", ["sampled", "topk"])
def test_a_teacher_has_no_say_about_tokens_that_are_masked(distill_loss):
    group, _ = distil(distill_loss=distill_loss, top_k=2)
    ids = group[0].samples[0].token_ids[group[0].samples[0].loss_mask]
    masked, _ = distil(distill_loss=distill_loss, top_k=2, masked_ids=[int(ids[-1])])
    for before, after in zip(group, masked, strict=True):
        (sample,) = after.samples
        is_masked = sample.loss_mask & (sample.token_ids == ids[-1])
        assert after.teacher.num_tokens == before.teacher.num_tokens - is_masked.sum()
        assert not after.teacher.advantages[is_masked].any()
        if distill_loss == "topk":
            assert (sample.teacher_top.logprobs[is_masked] == -np.inf).all()
    assert masked[0].teacher.num_tokens < group[0].teacher.num_tokens


def test_a_reply_with_too_few_tokens_is_an_error_and_never_a_number():
    with pytest.raises(TeacherError, match="1 of 2 tokens at position 1"):
        distil(distill_loss="topk", top_k=2, change=lambda reply: reply)

    def broken(reply):
        with_top(reply)["choices"][0]["prompt_logprobs"][1]["300"]["logprob"] = None
        return reply

    with pytest.raises(TeacherError, match="a logprob at position 1 is missing or no logprob"):
        distil(distill_loss="topk", top_k=2, change=broken)


def test_a_teacher_that_gives_too_few_logprobs_says_what_to_change():
    problem = "Requested prompt logprobs of 50, which is greater than max allowed: 20"
    client = TeacherClient(TEACHER)
    assert "--max-logprobs" in str(client._refused(f"POST /v1/completions: status 400: {problem}"))


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"distill_loss": "kl"}, "distill_loss='kl' must be one of 'sampled', 'topk'"),
        ({"distill_top_k": 0}, "distill_top_k=0 must be an integer >= 1"),
        ({"distill_mask_tokens": "<end>"}, "distill_mask_tokens='<end>' must be a list"),
        ({"algorithm": "sft", "distill_loss": "topk"}, "has no effect with algorithm='sft'"),
        ({"teacher": None, "distill_loss": "topk"}, "distill_loss='topk' has no effect without"),
        ({"teacher": None, "distill_top_k": 5}, "distill_top_k=5 has no effect without"),
        ({"teacher": None, "distill_mask_tokens": ["a"]}, "distill_mask_tokens=['a'] has no"),
    ],
)
def test_a_form_of_distillation_that_cannot_work_is_refused(options, problem):
    with pytest.raises(InvalidEnvironmentError) as raised:
        WeightedEnv("reverse_text", "words", **{"teacher": TEACHER, **options})
    assert problem in str(raised.value) and "environment 'words'" in str(raised.value)


def test_the_options_of_an_environment_reach_its_distillation(tokenizer, tmp_path, monkeypatch):
    from verifiers_rl.envs import make

    monkeypatch.setattr(make, "check_vocabulary", lambda teacher, tokenizer: None)
    args = RLConfig(output_dir=str(tmp_path), use_cpu=True, env_workers=0, temperature=1.0)
    given = {"algorithm": "opd", "teacher": TEACHER, "distill_loss": "topk", "distill_top_k": 7}

    def runner(**options):
        env = [WeightedEnv(NamedRunner("env"), "env", **given, **options)]
        return make_runner(env, "http://host", tokenizer, args)

    made = runner(distill_mask_tokens=["<|end|>"])
    assert (made._is_topk, made._top_k, made._masked_ids) == (True, 7, [tokenizer.eos_token_id])
    with pytest.raises(InvalidEnvironmentError, match="'<nope>' is no token of the model's"):
        runner(distill_mask_tokens=["<nope>"])


def test_a_truncated_rollout_that_is_left_out_of_the_loss_has_no_teacher_in_it():
    (sample,) = teach(make_samples(2))[1:]
    Rollout(0, "", samples=[sample]).leave_out_of_loss()
    assert not collate([sample], [[0]], [1.0], 0, teacher_k=3).has_loss


@pytest.mark.parametrize("use_lora", [False, True])
def test_the_divergence_does_not_wait_for_the_device(make_trainer, use_lora):
    samples = teach(make_samples(6))
    trainer = make_trainer(use_lora=use_lora, temperature=1.0)
    trainer._layout = trainer._choose_layout(trainer.model)
    microbatch = collate(samples, [[0, 1, 2], [3, 4]], [1.0] * 6, 0, teacher_k=3)
    means = TokenMeans()
    with Waits() as waits:
        trainer.microbatch_loss(trainer.model, microbatch, means).backward()
    assert not waits.found, waits.found[0]
