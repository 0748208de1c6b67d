import pytest

from tests.helpers import run_python

SCRIPT = """
import verifiers_rl
import torch
from transformers import AutoImageProcessor, Trainer
from torchvision import ops
from torchvision.transforms.v2 import functional

assert functional.resize(torch.rand(3, 8, 8), [4, 4]).shape == (3, 4, 4)
boxes, scores = torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.ones(1)
try:
    assert ops.nms(boxes, scores, 0.5).tolist() == [0]
except RuntimeError as error:  # only torchvision's own one
    assert "Couldn't load custom C++ ops" in str(error), error
"""


@pytest.mark.slow
def test_torchvision_works_beside_the_installed_torch_though_its_library_may_not_load():
    run_python("-W", "error::UserWarning", "-c", SCRIPT)
