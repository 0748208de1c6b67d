"""Python imports this first in each process that a vf-vllm starts, because its folder is on their
PYTHONPATH (server.py). One of them is vLLM's, which imports transformers to look at a model and
imports no plugin before.
"""

import verifiers_rl.torchvision_operators  # noqa: F401
