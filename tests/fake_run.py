"""Write the folder of a run that never happened, with plausible rollouts.

    python -m tests.fake_run FOLDER [--rollouts 100000] [--steps 200] [--seed 0] [--tokens-of 0.05]

The files of rollouts come from the writer that runs use. Tests and benchmarks of what reads these
files need many rollouts of all kinds: turns, tool calls, reasoning, branches, errors, cut replies,
groups that a filter rejected, evaluations, two environments.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np

from verifiers_rl.report.rollouts import RolloutWriter
from verifiers_rl.report.run_folder import METRICS, as_line, write_run

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


def sentence(rng: random.Random, num_words: int) -> str:
    words = rng.choices(WORDS, k=num_words)
    return " ".join(words).capitalize() + "."


class Invented:
    """Makes rollouts. `skill`, 0 to 1, says how good the policy is by now."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.numbers = np.random.default_rng(seed)

    def conversation(self, env: str, question: str) -> dict[str, Any]:
        rng = self.rng
        at = 0.0
        messages: list[dict[str, Any]] = [{"role": "system", "content": "Answer step by step."}]
        messages.append({"role": "user", "content": question})
        turns: list[dict[str, Any]] = []
        num_turns = rng.choice((1, 1, 1, 2, 3)) if env == "calculator" else 1
        num_prompt = 12 + len(question) // 4
        for turn in range(num_turns):
            is_last = turn == num_turns - 1
            num_sampled = rng.randint(10, 120)
            duration = num_sampled * rng.uniform(0.01, 0.03)
            reply: dict[str, Any] = {
                "role": "assistant",
                "content": sentence(rng, num_sampled // 2),
            }
            if rng.random() < 0.3:
                reply["reasoning_content"] = sentence(rng, rng.randint(8, 40))
            turns.append(
                {
                    "message": len(messages),
                    "begin_s": round(at, 3),
                    "end_s": round(at + duration, 3),
                    "num_prompt_tokens": num_prompt,
                    "num_sampled_tokens": num_sampled,
                    "policy_version": 0,
                    "finish_reason": "stop" if is_last else "tool_calls",
                }
            )
            at += duration
            num_prompt += num_sampled
            messages.append(reply)
            if is_last:
                break
            a, b = rng.randint(2, 999), rng.randint(2, 999)
            arguments = json.dumps({"expression": f"{a} * {b}"})
            function = {"name": "calculate", "arguments": arguments}
            call = {"id": f"call_{turn}", "type": "function", "function": function}
            reply["tool_calls"] = [call]
            messages.append({"role": "tool", "content": str(a * b), "tool_call_id": call["id"]})
            at += rng.uniform(0.002, 0.4)
        return {"messages": messages, "turns": turns, "generation_s": round(at, 3)}

    def group(self, step: int, number: int, split: str, example: int, skill: float) -> list[Any]:
        rng = self.rng
        env = ("calculator", "trivia")[rng.random() < 0.4]
        question = f"Question {example}: {sentence(rng, 14)}"
        num_rollouts = 1 if split == "eval" else GROUP
        is_hard = rng.random()
        rows = []
        for _ in range(num_rollouts):
            row = self.conversation(env, question)
            version = step if split == "eval" else max(step - 1 - (rng.random() < 0.5), 0)
            for turn in row["turns"]:
                turn["policy_version"] = version
            correct = float(rng.random() < skill * (1.2 - is_hard))
            style = round(rng.random(), 3)
            has_error, is_cut = rng.random() < 0.01, rng.random() < 0.03
            if is_cut:
                row["turns"][-1]["finish_reason"] = "length"
            if rng.random() < 0.02 and len(row["messages"]) > 3:
                row["other_branches"] = [row["messages"][:3]]
            num_sampled = sum(turn["num_sampled_tokens"] for turn in row["turns"])
            num_tokens = row["turns"][-1]["num_prompt_tokens"]
            num_tokens += row["turns"][-1]["num_sampled_tokens"]
            rows.append(
                {
                    "step": step,
                    "split": split,
                    "env": env,
                    "role": "agent",
                    "example": example,
                    "group": number,
                    "reward": None if has_error else correct + 0.1 * style,
                    "rewards": []
                    if has_error
                    else [{"name": "correct", "value": correct}, {"name": "style", "value": style}],
                    "advantage": None,
                    "is_truncated": is_cut,
                    "in_loss": split == "train",
                    "error": "TimeoutError: a tool took longer than 30 s" if has_error else None,
                    "num_turns": len(row["turns"]),
                    "num_tokens": num_tokens,
                    "num_sampled_tokens": num_sampled,
                    "oldest_version": version,
                    "newest_version": version,
                    "begun_at": BEGUN_AT + STEP_S * (step - 1) + round(rng.uniform(0, 9), 3),
                    "has_tokens": False,
                    **row,
                }
            )
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        is_rejected = len(set(rewards)) < 2
        for row in rows:
            if row["reward"] is None or split == "eval" or is_rejected:
                row["in_loss"] = False
            if row["reward"] is not None and split == "train":
                row["advantage"] = row["reward"] - sum(rewards) / len(rewards)
        return rows

    def tokens(self, row: dict[str, Any]) -> dict[str, Any]:
        """Columns for the tokens of this row, in which words stand for tokens."""
        numbers = self.numbers
        words: list[str] = []
        is_sampled: list[bool] = []
        for message in row["messages"]:
            text = f"<{message['role']}> {message.get('reasoning_content', '')}{message['content']}"
            own = [f"{word} " for word in text.split()]
            words += own
            is_sampled += [message["role"] == "assistant"] * len(own)
        size, sampled = len(words), np.array(is_sampled)
        logprobs = np.where(sampled, -numbers.exponential(0.6, size), 0).astype(np.float32)
        moved = logprobs + numbers.normal(0, 0.05, size).astype(np.float32)
        nan = np.float32(math.nan)
        return {
            "sample": np.zeros(size, np.int32),
            "token_ids": numbers.integers(0, 2**15, size, dtype=np.int32),
            "token_texts": words,
            "loss_mask": sampled, "inference_logprobs": logprobs,
            "trainer_logprobs": np.where(sampled, np.minimum(moved, 0), nan),
            "entropy": np.where(sampled, numbers.exponential(0.5, size).astype(np.float32), nan),
            "advantages": np.where(sampled, row["advantage"] or 0.0, 0.0).astype(np.float32),
            "policy_versions": np.where(sampled, row["oldest_version"], -1).astype(np.int32),
            "is_masked": sampled & (numbers.random(size) < 0.01),
        }  # fmt: skip


def metrics_row(rows: list[Any], step: int, rng: random.Random) -> dict[str, float]:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    train_s, wait_s, sync_s = rng.uniform(14, 16), rng.uniform(3, 8), rng.uniform(0.4, 0.6)
    return {
        "step": step, "loss": rng.gauss(0, 0.01), "grad_norm": rng.uniform(0.2, 0.5),
        "learning_rate": 1e-5, "reward": float(np.mean(rewards)),
        "reward_std": float(np.std(rewards)), "entropy": 0.9 * 0.995**step,
        "importance_ratio": 1 + rng.gauss(0, 0.002), "mismatch_kl": rng.uniform(5e-4, 2e-3),
        "error_share": sum(row["error"] is not None for row in rows) / len(rows),
        "truncated_share": float(np.mean([row["is_truncated"] for row in rows])),
        "completion_tokens": float(np.mean([row["num_sampled_tokens"] for row in rows])),
        "num_turns": float(np.mean([row["num_turns"] for row in rows])),
        "num_tokens": float(sum(row["num_tokens"] for row in rows)),
        "generation_s": rng.uniform(15, 22), "wait_s": wait_s, "sync_s": sync_s,
        "train_s": train_s, "step_s": train_s + wait_s + sync_s + 0.3, "epoch": step,
    }  # fmt: skip


def write_fake_run(
    folder: Path, num_rollouts: int, num_steps: int, seed: int = 0, tokens_of: float = 0.05
) -> None:
    """Write run.json, metrics.jsonl and the files of rollouts into a folder.

    Args:
        num_rollouts: about so many, evaluations included.
        tokens_of: share of the groups whose tokens are written.
    """
    invented = Invented(seed)
    rng = invented.rng
    num_evaluations = num_steps // EVERY
    num_groups = max((num_rollouts - num_evaluations * NUM_EVAL) // (GROUP * num_steps), 1)
    folder.mkdir(parents=True, exist_ok=True)
    write_run(
        folder,
        {
            "format": 2, "run_name": f"fake-{seed}", "model": "Qwen/Qwen3-0.6B",
            "args": {"learning_rate": 1e-5 * (1 + seed), "batch_size": num_groups * GROUP},
            "max_steps": num_steps, "begun_at": BEGUN_AT, "status": "finished", "pid": 1,
            "ended_at": BEGUN_AT + STEP_S * num_steps,
            "versions": {"verifiers_rl": "0.1.0", "torch": "2.11.0", "transformers": "5.5.0",
                         "vllm": "0.31.0", "verifiers": "0.4.0"},
        },
    )  # fmt: skip
    writer = RolloutWriter(folder, 1)
    num_with_tokens = 0
    with (folder / METRICS).open("w") as metrics:
        for step in range(1, num_steps + 1):
            skill = 0.2 + 0.7 * (1 - math.exp(-2 * step / num_steps))
            rows: list[Any] = []
            for number in range(num_groups):
                example = rng.randrange(5000)
                group = invented.group(step, number, "train", example, skill)
                total = ((step - 1) * num_groups + number + 1) * tokens_of
                if total >= num_with_tokens + 1:
                    num_with_tokens += 1
                    for row in group:
                        if row["error"] is None:
                            row |= {"has_tokens": True, **invented.tokens(row)}
                rows += group
            metrics.write(as_line(metrics_row(rows, step, rng)) + "\n")
            writer.append(rows, step)
            if step % EVERY == 0:
                groups = [invented.group(step, n, "eval", n, skill) for n in range(NUM_EVAL)]
                rewards = [row["reward"] or 0.0 for (row,) in groups]
                writer.append([row for group in groups for row in group])
                of_evaluation = {"step": step, "eval_reward": float(np.mean(rewards))}
                metrics.write(as_line(of_evaluation) + "\n")
            writer.flush()  # as where steps are long


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens-of", type=float, default=0.05)
    options = parser.parse_args()
    write_fake_run(options.folder, options.rollouts, options.steps, options.seed, options.tokens_of)


if __name__ == "__main__":
    main()
