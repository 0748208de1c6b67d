"""Write the folder of a run that never happened, with plausible rollouts.

The files of rollouts come from the writer that runs use. Tests and benchmarks of what reads these
files need many rollouts of all kinds: turns, tool calls, reasoning, errors, cut replies,
evaluations, two environments.
"""

import math
import random

import numpy as np

from tests.test_rollouts import make_row, make_tokens
from verifiers_rl.json_text import as_json
from verifiers_rl.report.rollouts import RolloutWriter
from verifiers_rl.report.run_folder import METRICS, write_run

TEXT = """
the of and to in is that it as for with by on was are be this from at which or an has have number
sum product digits prime even odd triangle circle angle length area first second third answer
therefore because hence so then next check compute factor divide multiply add subtract equals result
value equation solve x y n m k left right side both let assume suppose given city river mountain
capital population year century king queen war treaty island ocean coast résumé naïve Größe 数学
答案 река город
"""
WORDS = TEXT.split()
GROUP, EVERY, NUM_EVAL = 8, 20, 32  # rollouts of a group; steps between evaluations; its examples
BEGUN_AT = 1_760_000_000.0
STEP_S = 24.0


def sentence(rng, num_words):
    return " ".join(rng.choices(WORDS, k=num_words)).capitalize() + "."


def conversation(rng, env, question, version):
    messages, turns, now = [{"role": "user", "content": question}], [], 0.0
    for turn in range(rng.choice((1, 1, 2, 3)) if env == "calculator" else 1):
        if turn:  # the one before called a tool
            function = {"name": "calculate", "arguments": '{"expression": "6 * 7"}'}
            messages[-1]["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
            messages.append({"role": "tool", "content": "42", "tool_call_id": "c"})
        size = rng.randint(10, 120)
        times = {"begin_s": now + 0.2, "end_s": now + 0.2 + size / 50}
        numbers = {"message": len(messages), "num_sampled_tokens": size, "policy_version": version}
        turns.append(times | numbers)
        messages.append({"role": "assistant", "content": sentence(rng, size // 2)})
        if rng.random() < 0.3:
            messages[-1]["reasoning_content"] = sentence(rng, size // 4)
        now = times["end_s"]
    return {"messages": messages, "turns": turns, "num_turns": len(turns), "generation_s": now}


def group(rng, step, number, split, skill):
    """The rollouts of one example. `skill`, 0 to 1, says how good the policy is by now."""
    env, version = rng.choice(("calculator", "trivia")), step - 1
    question = f"Question {number}: {sentence(rng, 14)}"
    rows = []
    for _ in range(1 if split == "eval" else GROUP):
        correct = float(rng.random() < skill)
        error = "TimeoutError: a tool took over 30 s" if rng.random() < 0.01 else None
        row = make_row(step, None if error else correct + 0.1 * rng.random(), split)
        rows.append(row | conversation(rng, env, question, version) | {
            "env": env, "example": number, "group": number, "error": error,
            "rewards": [{"name": "correct", "value": correct}], "is_truncated": rng.random() < 0.03,
            "oldest_version": version, "newest_version": version,
        })  # fmt: skip
    for row in (scored := [row for row in rows if not row["error"]]):
        mean = sum(one["reward"] for one in scored) / len(scored)
        row["advantage"] = row["reward"] - mean
    return rows


def tokens(row, seed):
    """Columns for the tokens of this row, in which words stand for tokens."""
    words, sampled = [], []
    for message in row["messages"]:
        own = f"{message.get('reasoning_content', '')} {message['content']}".split()
        words += [f"{word} " for word in own]
        sampled += [message["role"] == "assistant"] * len(own)
    numbers = np.random.default_rng(seed).normal(size=(4, len(words))).astype(np.float32)
    inference, moved, entropy, outlier = np.where(sampled, numbers, 0.0)
    return make_tokens(
        words, loss_mask=sampled, inference_logprobs=-abs(inference), entropy=abs(entropy),
        trainer_logprobs=np.where(sampled, -abs(inference + 0.05 * moved), math.nan),
        advantages=np.where(sampled, row["advantage"], 0.0).astype(np.float32),
        policy_versions=np.where(sampled, row["oldest_version"], -1).astype(np.int32),
        is_masked=outlier > 2.3,
    )  # fmt: skip


def metrics_row(rows, step, rng):
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    train_s, wait_s = rng.uniform(14, 16), rng.uniform(3, 8)
    return {
        "step": step, "reward": float(np.mean(rewards)),
        "error_share": 1 - len(rewards) / len(rows),
        "train_s": train_s, "wait_s": wait_s, "step_s": train_s + wait_s + 0.3,
    }  # fmt: skip


def write_fake_run(folder, num_rollouts, num_steps, seed=0, tokens_of=0.05):
    """Write run.json, metrics.jsonl and the files of rollouts into a folder.

    Args:
        num_rollouts: about so many, evaluations included.
        tokens_of: share of the groups whose tokens are written.
    """
    rng = random.Random(seed)
    num_trained = num_rollouts - num_steps // EVERY * NUM_EVAL
    num_groups = max(num_trained // (GROUP * num_steps), 1)
    folder.mkdir(parents=True, exist_ok=True)
    run = {"run_name": f"fake-{seed}", "model": "Qwen/Qwen3-0.6B", "status": "finished", "pid": 1}
    run["args"] = {"learning_rate": 1e-5 * (1 + seed), "batch_size": num_groups * GROUP}
    times = {"begun_at": BEGUN_AT, "ended_at": BEGUN_AT + STEP_S * num_steps}
    write_run(folder, {"format": 2, "max_steps": num_steps, **run, **times})
    writer, metrics = RolloutWriter(folder, 1), []
    for step in range(1, num_steps + 1):
        skill, rows = step / num_steps, []
        for number in range(num_groups):
            rows += (made := group(rng, step, number, "train", skill))
            if (step * num_groups + number) % round(1 / tokens_of) == 0:
                for row in made:
                    row |= {} if row["error"] else tokens(row, rng.getrandbits(32))
        metrics.append(metrics_row(rows, step, rng))
        writer.append(rows, step)
        if step % EVERY == 0:
            rows = [group(rng, step, number, "eval", skill)[0] for number in range(NUM_EVAL)]
            writer.append(rows)
            reward = sum(row["reward"] or 0.0 for row in rows) / NUM_EVAL
            metrics.append({"step": step, "eval_reward": reward})
        writer.flush()  # as where steps are long
    (folder / METRICS).write_bytes(b"".join(as_json(row) + b"\n" for row in metrics))
