"""Would a server that merges the adapter itself be faster than merged weights that travel?

    python benchmarks/merge_on_server.py [--layers 28] [--rank 16]

Such a server keeps a copy of the adapted layers, in float32 on a CPU and in pinned host memory (as
bfloat16) beside a GPU. For each push it computes W + scale * B A in float32, and rounds the result
to what it computes in. This prints the seconds of that for the adapted layers of Qwen3-0.6B, and
the rate of a link that sends the merged weights in the same time. On a faster link, sending is
faster.
"""

import argparse
import statistics
import time

import torch

HIDDEN, INNER, OF_HEADS, OF_KEYS = 1024, 3072, 2048, 1024
SHAPES = [
    (OF_HEADS, HIDDEN), (OF_KEYS, HIDDEN), (OF_KEYS, HIDDEN), (HIDDEN, OF_HEADS),
    (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    kept_dtype, served_dtype = (torch.bfloat16,) * 2 if on_gpu else (torch.float32,) * 2
    kept, served, factors = [], [], []
    for out_size, in_size in SHAPES * options.layers:
        base = torch.randn(out_size, in_size, dtype=kept_dtype)
        kept.append(base.pin_memory() if on_gpu else base)
        served.append(torch.empty(out_size, in_size, dtype=served_dtype, device=device))
        a = torch.randn(options.rank, in_size, device=device)
        factors.append((torch.randn(out_size, options.rank, device=device), a))

    def merge() -> None:
        for base, target, (b, a) in zip(kept, served, factors, strict=True):
            merged = torch.addmm(base.to(device, torch.float32, non_blocking=True), b, a)
            target.copy_(merged)

    seconds = []
    for _ in range(options.rounds + 1):
        start = time.perf_counter()
        merge()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    merge_s = statistics.median(seconds[1:])
    num_bytes = sum(target.numel() * target.element_size() for target in served)
    of_adapter = sum(4 * (a.numel() + b.numel()) for b, a in factors)
    print("| device | merged weights GB | adapter MB | merge s | as fast as a link of GB/s |")
    print("| --- | --- | --- | --- | --- |")
    print(
        f"| {device} | {num_bytes / 1e9:.2f} | {of_adapter / 1e6:.0f} | {merge_s:.2f} | "
        f"{num_bytes / 1e9 / merge_s:.2f} |"
    )


if __name__ == "__main__":
    main()
