"""accelerate offers FSDP and DeepSpeed where there is a GPU, though both run over gloo. Importing
this takes that one check away: a trainer with `fsdp` or `deepspeed` on the CPU then goes the way
that it goes on GPUs.
"""

import os
from typing import Any

from accelerate import state
from accelerate.utils import DistributedType

original = state.AcceleratorState.__init__


def init(self: Any, *args: Any, fsdp_plugin: Any = None, deepspeed_plugin: Any = None, **kwargs):
    """As the original does it where there is a GPU."""
    is_new = not state.AcceleratorState._shared_state
    original(self, *args, fsdp_plugin=fsdp_plugin, deepspeed_plugin=deepspeed_plugin, **kwargs)
    if not is_new:
        return
    if deepspeed_plugin is not None:
        self.distributed_type = DistributedType.DEEPSPEED
        deepspeed_plugin.set_mixed_precision(self._mixed_precision)
        deepspeed_plugin.select(_from_accelerator_state=True)
        self.deepspeed_plugins = deepspeed_plugin
        self._mixed_precision = "no"
    elif fsdp_plugin is not None:
        self.distributed_type = DistributedType.FSDP
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin
    state.PartialState._shared_state["distributed_type"] = self.distributed_type


state.AcceleratorState.__init__ = init
os.environ["ACCELERATE_USE_CPU"] = "true"
os.environ["DS_ACCELERATOR"] = "cpu"
