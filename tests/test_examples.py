"""The examples' tasksets, without a server: held-out tasks stay out, demonstrations are rendered.
Rewards are tested in test_example_environments.py, and on the real server (test_e2e_train.py).
"""

import numpy as np
import pytest

from tests.helpers import StubSource, load_example, logged, make_tokenizer
from verifiers_rl import RLTrainer
from verifiers_rl.advantages import set_advantages
from verifiers_rl.losses import reinforce
from verifiers_rl.types import Batch, Rollout, Sample

TASKSETS = {
    "reverse_text": ("ReverseTextTaskset", "ReverseTextConfig"),
    "calculator": ("CalculatorTaskset", "CalculatorConfig"),
    "alphabet_sort": ("AlphabetSortTaskset", "AlphabetSortConfig"),
    "letter_hunt": ("LetterHuntTaskset", "LetterHuntConfig"),
}


@pytest.mark.parametrize("name", TASKSETS)
def test_held_out_tasks_are_not_trained_on_and_demonstrations_are_rendered(name):
    module = load_example(name)
    taskset, config = (getattr(module, part) for part in TASKSETS[name])

    def keys(**options):
        tasks = [task.data for task in taskset(config(id=name, **options))]
        if name == "alphabet_sort":
            return ["".join(sorted("".join(data.turns))) for data in tasks]
        return [(data.prompt, getattr(data, "secret", None)) for data in tasks]

    train, held_out = keys(), keys(held_out=True)
    assert len({*train}) == len(train) > 1000 and len({*held_out}) == len(held_out) >= 256
    assert not {*train} & {*held_out}
    clean, noisy = (module.demonstrations(16, 3, noise) for noise in (0.0, 0.5))
    assert len(clean) == 16 and clean != noisy
    tokenizer = make_tokenizer(*getattr(module, "EXTRA_TOKENS", ()))
    for conversation in clean:
        assert tokenizer.apply_chat_template(conversation["messages"], return_dict=False)


def test_the_trainer_runs_on_stubs(tmp_path):
    load_example("warm_start")  # which it imports, from beside it
    trainer = load_example("stubs").train(
        RLTrainer,
        output_dir=tmp_path,
        seed=1,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        disable_tqdm=True,
    )
    assert logged(trainer, "reward") == [0.5, 0.5]
    assert trainer.weight_sync.policy_version == 2


# --- Advantages -----------------------------------------------------------------------------------


def make_rollout(metrics, *samples):
    """A rollout with these scores; a sample is the policy version of each token, -1 for none."""
    made = [Sample([*range(len(v))], [x >= 0 for x in v], [0.0] * len(v), v) for v in samples]
    return Rollout(0, "", reward=1.0, metrics=metrics, samples=made, num_turns=len(metrics))


def test_gdpo_normalises_each_reward_in_the_group_and_their_sum_in_the_batch(
    make_trainer, monkeypatch
):
    """Of two rollouts, the better one has (r - mean) / std = 1 / sqrt(2) of each reward. The sums,
    with weights of 1 and 0.2, are 1.2 and 0.8 of that.
    """
    monkeypatch.setattr("verifiers_rl.loss_check.NUM_TRIES", 0)  # which calls the loss, too
    gdpo = load_example("gdpo")
    right = [(1.0, 0.0), (1.0, 0.0)]
    short = [(-10.0, -30.0), (-0.3, -0.1)]  # on scales of their own
    groups = [
        [make_rollout({"right": r, "short": s}, [-1, 0, 0]) for r, s in zip(*scores, strict=True)]
        for scores in zip(right, short, strict=True)
    ]
    for group in groups:
        set_advantages(group, gdpo.gdpo)
    rollouts = [*groups[0], *groups[1]]
    samples = [sample for rollout in rollouts for sample in rollout.samples]
    batch, seen, source = Batch(0, 0, samples, rollouts, groups=groups), set(), StubSource()
    source.get = lambda: source.pending.pop() and batch

    def loss(inputs):
        seen.update(inputs.advantages.tolist())
        return reinforce(inputs)

    make_trainer(
        kind=gdpo.GDPOTrainer,
        source=source,
        loss_fn=loss,
        batch_size=4,
        rollouts_per_example=2,
        max_steps=1,
    ).train()
    # std = sqrt(2 * (0.72 + 0.32) / 3) = 0.832666
    expected = [-1.019049, -0.679366, 0.679366, 1.019049]
    assert sorted(seen) == pytest.approx(expected, abs=1e-4)


def test_turn_credit_is_what_the_turn_and_later_ones_have_brought():
    """Of turns with 1, 0, 0, 0 the mean is 0.25 and the std 0.5: they count as 1.5 and -0.5."""
    group = [
        make_rollout({"turn_0": 1.0, "turn_1": 0.0}, [-1, -1, 3, 3, -1, 3]),
        make_rollout({"turn_0": 0.0, "turn_1": 0.0}, [-1, 3], [-1, -1, 4]),
        make_rollout({}),  # its agent took no turn
    ]
    set_advantages(group, load_example("turn_credit").turn_credit)
    found = [sample.advantages for rollout in group for sample in rollout.samples]
    expected = [*(0, 0, 1, 1, 0, -0.5), *(0, -1), *(0, 0, -0.5)]
    assert np.concatenate(found).tolist() == pytest.approx(expected, abs=1e-5)
    group = [make_rollout({"turn_0": 1.0}, [-1, 3]), make_rollout({})]  # one turn in all
    set_advantages(group, load_example("turn_credit").turn_credit)
    assert group[0].samples[0].advantages.tolist() == [0, 0]
