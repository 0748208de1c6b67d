import json
import math

import torch

from verifiers_rl.losses import LossInputs
from verifiers_rl.metrics import (
    TokenMeans,
    device_metrics,
    peak_flops,
    plot_curves,
    print_rollouts,
)
from verifiers_rl.types import Rollout


def test_means_are_taken_over_loss_tokens_of_all_microbatches():
    means = TokenMeans()
    for logprobs, mask in (([-1.0, -9.0], [True, False]), ([-2.0, -2.0, -2.0], [True, True, True])):
        n = len(logprobs)
        inputs = LossInputs(
            trainer_logprobs=torch.tensor(logprobs),
            inference_logprobs=torch.full((n,), -2.0),
            advantages=torch.full((n,), -0.5),
            loss_mask=torch.tensor(mask),
            sequence_ids=torch.zeros(n, dtype=torch.int64),
        )
        means.add(inputs, {"mine": torch.arange(n).float()})
    result = means.reduce(num_loss_tokens=4, world_size=1)
    ratio = math.e
    assert math.isclose(result["importance_ratio"], (ratio + 3) / 4, rel_tol=1e-6)
    assert math.isclose(result["importance_ratio_max"], ratio, rel_tol=1e-6)
    assert math.isclose(result["mismatch_kl"], (ratio - 1 - 1) / 4, rel_tol=1e-6)
    assert (result["mine"], result["clamped_share"]) == (0.75, 0.0)


def test_ratios_beyond_the_clamp_are_counted():
    means = TokenMeans()
    inputs = LossInputs(
        trainer_logprobs=torch.tensor([0.0, -1.0, -1.0, -700.0]),
        inference_logprobs=torch.tensor([-700.0, -1.0, -math.inf, 0.0]),
        advantages=torch.ones(4),
        loss_mask=torch.tensor([True, True, True, True]),
        sequence_ids=torch.zeros(4, dtype=torch.int64),
    )
    means.add(inputs, {})
    assert means.reduce(num_loss_tokens=4, world_size=1)["clamped_share"] == 0.75


def test_the_peak_of_a_gpu_is_known_by_its_name():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("Some GPU 9000") is None


def test_the_peak_memory_of_a_process_is_logged():
    before = device_metrics(torch.device("cpu"), 0, 1.0)["peak_memory_gb"]
    block = torch.ones(50_000_000)  # 0.2 GB, which may have been used before
    after = device_metrics(torch.device("cpu"), 0, 1.0)["peak_memory_gb"]
    assert before <= after and after > block.nbytes / 1e9


def test_the_table_shows_text_as_it_is_from_lowest_to_highest_reward(capsys):
    rollouts = [
        Rollout(i, f"prompt {i}", f"[bold]answer {i}", reward=i / 4, advantage=i / 4 - 0.5)
        for i in range(5)
    ]
    print_rollouts(rollouts, step=7, num_rows=3)
    shown = capsys.readouterr().out
    assert "step 7" in shown
    places = [shown.index(f"[bold]answer {i}") for i in (0, 2, 4)]
    assert places == sorted(places) and "answer 1" not in shown
    assert "-0.500" in shown and "+0.500" in shown and "1.000" in shown


def test_no_rows_print_nothing(capsys):
    print_rollouts([Rollout(0, "p", "c", reward=1.0)], step=1, num_rows=0)
    assert capsys.readouterr().out == ""


def test_curves_are_drawn_from_the_file(tmp_path):
    source = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 0, "eval_reward": 0.1},
        {"step": 1, "reward": 0.2, "entropy": "nan", "mismatch_kl": 0.1, "step_s": 1},
    ]
    source.write_text("\n".join(map(json.dumps, rows)))
    plot_curves(source, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
