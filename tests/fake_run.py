"""Write the folder of a run that never happened, with plausible rollouts.

The files of rollouts come from the writer that runs use. Tests and benchmarks of what reads these
files need many rollouts of all kinds: turns, tool calls, reasoning, branches, errors, cut replies,
evaluations, two environments.
"""

from __future__ import annotations

import json
import math
import random

import numpy as np

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
    messages = [{"role": "system", "content": "Answer step by step."}]
    messages.append({"role": "user", "content": question})
    turns = []
    now = 0.0
    for turn in range(rng.choice((1, 1, 1, 2, 3)) if env == "calculator" else 1):
        if turn:  # the one before called a tool
            a, call_id = rng.randint(2, 999), f"call_{turn}"
            function = {"name": "calculate", "arguments": json.dumps({"expression": f"{a} * 2"})}
            call = {"id": call_id, "type": "function", "function": function}
            messages[-1]["tool_calls"], turns[-1]["finish_reason"] = [call], "tool_calls"
            messages.append({"role": "tool", "content": str(2 * a), "tool_call_id": call_id})
            now += rng.uniform(0.002, 0.4)
        size = rng.randint(10, 120)
        end_s = now + size * rng.uniform(0.01, 0.03)
        numbers = {"num_prompt_tokens": 50 + 100 * turn, "num_sampled_tokens": size}
        numbers |= {"begin_s": round(now, 3), "end_s": round(end_s, 3), "policy_version": version}
        turns.append({"message": len(messages), "finish_reason": "stop", **numbers})
        messages.append({"role": "assistant", "content": sentence(rng, size // 2)})
        if rng.random() < 0.3:
            messages[-1]["reasoning_content"] = sentence(rng, size // 4)
        now = end_s
    return {"messages": messages, "turns": turns, "generation_s": round(now, 3)}


def group(rng, step, number, split, skill):
    """The rollouts of one example. `skill`, 0 to 1, says how good the policy is by now."""
    env = rng.choice(("calculator", "trivia"))
    example = number if split == "eval" else rng.randrange(5000)
    question = f"Question {example}: {sentence(rng, 14)}"
    difficulty = rng.random()
    rows = []
    for _ in range(1 if split == "eval" else GROUP):
        version = max(step - rng.choice((1, 2)), 0)
        said = conversation(rng, env, question, version)
        num_sampled = sum(turn["num_sampled_tokens"] for turn in said["turns"])
        style, correct = 0.1 * rng.random(), float(rng.random() < skill * (1.2 - difficulty))
        error = "TimeoutError: a tool took over 30 s" if rng.random() < 0.01 else None
        row = {
            "step": step, "split": split, "env": env, "example": example, "group": number,
            "error": error, "reward": None if error else correct + style, "has_tokens": False,
            "rewards": [{"name": "correct", "value": correct}, {"name": "style", "value": style}],
            "is_truncated": rng.random() < 0.03, "num_turns": len(said["turns"]),
            "num_sampled_tokens": num_sampled, "num_tokens": 50 + num_sampled, "in_loss": False,
            "oldest_version": version, "newest_version": version,
            "begun_at": BEGUN_AT + STEP_S * step,
            "other_branches": [said["messages"][:2]] if rng.random() < 0.02 else None,
        }  # fmt: skip
        rows.append(row | said)
    scored = [row for row in rows if row["reward"] is not None and split == "train"]
    for row in scored:
        mean = sum(one["reward"] for one in scored) / len(scored)
        row |= {"advantage": row["reward"] - mean, "in_loss": True}
    return rows


def tokens(row, seed):
    """Columns for the tokens of this row, in which words stand for tokens."""
    words = []
    sizes = []
    for message in row["messages"]:
        text = f"<{message['role']}> {message.get('reasoning_content', '')}{message['content']}"
        sizes.append(len(text.split()))
        words += [f"{word} " for word in text.split()]
    sampled = np.repeat([message["role"] == "assistant" for message in row["messages"]], sizes)
    numbers = np.random.default_rng(seed).normal(size=(4, len(words))).astype(np.float32)
    inference, moved, entropy, outlier = np.where(sampled, numbers, 0.0)
    return {
        "has_tokens": True, "sample": np.zeros(len(words), np.int32), "token_texts": words,
        "token_ids": np.arange(len(words), dtype=np.int32), "loss_mask": sampled,
        "inference_logprobs": -abs(inference),
        "trainer_logprobs": np.where(sampled, -abs(inference + 0.05 * moved), math.nan),
        "entropy": np.where(sampled, abs(entropy), math.nan),
        "advantages": np.where(sampled, row["advantage"], 0.0).astype(np.float32),
        "policy_versions": np.where(sampled, row["oldest_version"], -1).astype(np.int32),
        "is_masked": outlier > 2.3,
    }  # fmt: skip


def metrics_row(rows, step, rng):
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    train_s, wait_s = rng.uniform(14, 16), rng.uniform(3, 8)
    return {
        "step": step, "loss": rng.gauss(0, 0.01), "grad_norm": rng.uniform(0.2, 0.5),
        "reward": float(np.mean(rewards)), "entropy": 0.9 * 0.995**step,
        "mismatch_kl": rng.uniform(5e-4, 2e-3), "train_s": train_s, "wait_s": wait_s,
        "error_share": 1 - len(rewards) / len(rows), "step_s": train_s + wait_s + 0.3,
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
    writer = RolloutWriter(folder, 1)
    with (folder / METRICS).open("w") as metrics:
        for step in range(1, num_steps + 1):
            skill = 0.2 + 0.7 * (1 - math.exp(-2 * step / num_steps))
            rows = []
            for number in range(num_groups):
                rows += (made := group(rng, step, number, "train", skill))
                if (step * num_groups + number) % round(1 / tokens_of) == 0:
                    for row in made:
                        row |= {} if row["error"] else tokens(row, rng.getrandbits(32))
            metrics.write(as_json(metrics_row(rows, step, rng)).decode() + "\n")
            writer.append(rows, step)
            if step % EVERY == 0:
                rows = [group(rng, step, number, "eval", skill)[0] for number in range(NUM_EVAL)]
                writer.append(rows)
                reward = sum(row["reward"] or 0.0 for row in rows) / NUM_EVAL
                metrics.write(as_json({"step": step, "eval_reward": reward}).decode() + "\n")
            writer.flush()  # as where steps are long
