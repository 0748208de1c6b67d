"""Makes torchvision importable if its compiled operators do not load with the installed torch.

The package index's torchvision is built for CUDA. With a CPU build of torch its library does not
load, and `import torchvision` fails with "operator torchvision::nms does not exist"; so does
`from transformers import Trainer`. Only the box operators of image models need that library; the
parts of torchvision that vLLM and transformers import do not. So if the library is missing, this
module declares the operators without a kernel. Calling one of them raises torchvision's own error
about missing operators.

This module goes when torchvision looks at its own `extension._has_ops()` before it adds gradients
and shapes (`_autograd_registrations`, `_meta_registrations`), or when the package index has a
torchvision for torch's CPU builds.

The package imports this module first. So does each process that a vf-vllm starts
(inference/startup). A script imports this package before transformers. The module does nothing
until torchvision is imported.
"""

import sys

# The operators to which torchvision's Python modules add gradients and shapes on import.
OPERATORS = (
    "nms",
    "qnms",
    "qroi_align",
    "roi_align",
    "_roi_align_backward",
    "roi_pool",
    "_roi_pool_backward",
    "ps_roi_align",
    "_ps_roi_align_backward",
    "ps_roi_pool",
    "_ps_roi_pool_backward",
    "deform_conv2d",
    "_deform_conv2d_backward",
)
_USERS = ("torchvision._autograd_registrations", "torchvision._meta_registrations")


class _OperatorsFirst:
    """A module finder that finds no module. It acts when Python looks for the first module that
    needs the operators; torchvision has tried to load its library by then.
    """

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        if name in _USERS and cls in sys.meta_path:
            sys.meta_path.remove(cls)
            if not sys.modules["torchvision.extension"]._has_ops():
                declare()


def declare() -> None:
    """Declare the operators that torch does not know."""
    import torch

    for name in OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor input) -> Tensor")


sys.meta_path.insert(0, _OperatorsFirst)
