"""A tiny model for a machine without a GPU or without the hub."""

from __future__ import annotations

import os
import subprocess
import sys


def tiny_model(folder: str) -> str:
    """Make the model of `make demo` and its tokenizer, unless the folder is there already. That
    takes about a minute on 2 CPU cores. A line shows every 50 steps.

    The model can do one thing, with mistakes: a message of 3 to 8 lowercase letters gives the same
    letters reversed, so "abc" gives "cba". It knows no words and no instructions. It has 0.9 M
    parameters in float32, a token for each byte, and room for 512 tokens. RL on another task finds
    nothing to reward in its replies; `examples/warm_start.py`, which this function runs, makes a
    model from demonstrations of your own.

    Args:
        folder: for model and tokenizer.

    Returns:
        The folder's absolute path, for `RLTrainer(model=...)`.

    Raises:
        subprocess.CalledProcessError: the model was not made; the output above says why.
    """
    # Not above: on a machine of a cluster the package has no examples beside it.
    from verifiers_rl.cli.setup import EXAMPLES

    target = os.path.abspath(folder)
    if not os.path.exists(target):
        task = EXAMPLES / "reverse_text/reverse_text.py"
        subprocess.run([sys.executable, EXAMPLES / "warm_start.py", task, target], check=True)
    return target
