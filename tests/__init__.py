"""verifiers_rl comes before transformers: see verifiers_rl/torchvision_operators.py."""

import verifiers_rl as verifiers_rl
