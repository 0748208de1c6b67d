"""Makes a torchvision importable whose compiled operators do not load beside the installed torch.

The package index's torchvision is built for CUDA. Beside a CPU build of torch its library does not
load, and `import torchvision` ends in "operator torchvision::nms does not exist", on which
`from transformers import Trainer` ends as well. Only image models' box operators need that library;
what vLLM and transformers import of torchvision does not. So where it is missing, the operators are
declared without a kernel, and torchvision's own error says that they are when one is called.

`verifiers_rl.pth` imports this module in each process of an environment with this package, because
transformers may be imported before it. Nothing happens there until torchvision is imported.
"""

import sys
from typing import Any

# What torchvision's Python modules add gradients and shapes to when they are imported.
OPERATORS = (
    *("nms", "qnms", "qroi_align"),
    *("roi_align", "_roi_align_backward", "roi_pool", "_roi_pool_backward"),
    *("ps_roi_align", "_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward"),
    *("deform_conv2d", "_deform_conv2d_backward"),
)
_declared: list[Any] = []  # the end of a Library would take its declarations back
_USERS = ("torchvision._autograd_registrations", "torchvision._meta_registrations")


class _OperatorsFirst:
    """A finder of modules that finds none: it acts when torchvision has tried to load its library
    and the first module that needs the operators is looked for.
    """

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        if name in _USERS and cls in sys.meta_path:
            sys.meta_path.remove(cls)
            if not sys.modules["torchvision.extension"]._has_ops():
                declare()


def declare() -> None:
    """Declare those of the operators that torch does not know."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    _declared.append(library)
    for name in OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor input) -> Tensor")


if _OperatorsFirst not in sys.meta_path:
    sys.meta_path.insert(0, _OperatorsFirst)
