"""How evenly tokens go to experts, counted by hand; what the auxiliary loss of routers needs."""

import numpy as np
import pytest
import torch

from tests.helpers import make_tiny_model, make_tiny_moe
from tests.test_router_replay import make
from verifiers_rl import expert_balance
from verifiers_rl.expert_balance import expert_load, keep_router_logits
from verifiers_rl.router_replay import routers_of
from verifiers_rl.types import Sample


def with_experts(*of_layers):
    """A sample of these experts: for each layer, for each token, the ids."""
    experts = np.array(of_layers, np.int16).swapaxes(0, 1)
    zeros = np.zeros(len(experts))
    return Sample(zeros, zeros, zeros, zeros - 1, extras={"routed_experts": experts})


def test_the_load_of_experts_is_counted_layer_by_layer():
    uneven, even = [[0, 1]] * 4, [[0, 1], [2, 3]] * 2
    load = expert_load(make_tiny_moe(), [with_experts(uneven, even)])
    # Of 4 experts, two have twice their share and two none; in the other layer all are equal.
    assert load["expert_load_max"] == (2 + 1) / 2 and load["expert_load_cv"] == (1 + 0) / 2
    assert load["expert_bytes"] == 2 * 2 * 2  # two choices in two layers, two bytes each
    # A token that the server returned no experts for counts for none.
    unknown = [[-1, -1]] * 2
    samples = [with_experts(uneven, even), with_experts(unknown, unknown)]
    assert expert_load(make_tiny_moe(), samples) == load
    nothing = expert_load(make_tiny_moe(), samples[1:])
    assert (nothing["expert_load_max"], nothing["expert_load_cv"]) == (0, 0)
    plain = Sample([1, 2], [0, 1], [0, -1], [-1, 0])
    assert expert_load(make_tiny_moe(), [plain]) == {}
    assert expert_load(make_tiny_model(), []) == {}


def test_layers_without_experts_do_not_count():
    model = make("glm4")  # its first layer is dense, of which a server returns zeros
    dense, even = [[0, 0]] * 4, [[0, 1], [2, 3], [4, 5], [6, 7]]
    load = expert_load(model, [with_experts(dense, even)])
    assert (load["expert_load_max"], load["expert_load_cv"]) == (1, 0)


def test_of_a_large_batch_every_kth_sample_is_counted(monkeypatch):
    uneven, even = [[0, 1]] * 4, [[0, 1], [2, 3]] * 2
    samples = [with_experts(even, even), with_experts(uneven, uneven)] * 3
    assert expert_load(make_tiny_moe(), samples)["expert_load_max"] == 1.5
    monkeypatch.setattr(expert_balance, "MAX_COUNTED", 12)
    assert expert_load(make_tiny_moe(), samples)["expert_load_max"] == 1


def test_a_model_whose_auxiliary_loss_is_not_known_draws_one_warning(caplog):
    model = make("glm4")
    keep_router_logits(model)
    assert not caplog.messages  # its config asks for none
    model.config.output_router_logits = True
    keep_router_logits(model)
    (message,) = caplog.messages
    assert "no auxiliary loss of Glm4MoeForCausalLM is known here; none is computed" in message


def test_logits_are_kept_wherever_a_router_returns_them():
    model = make("granite")  # its routers return them last, behind indices and weights
    model.config.output_router_logits = True
    keep_router_logits(model)
    kept = []
    for _, router in routers_of(model):
        router.register_forward_hook(lambda router, inputs, outputs: kept.append(outputs[2]))
    model(input_ids=torch.arange(5)[None])
    balance = model.model.verifiers_rl_balance
    assert len(balance.logits) == len(kept) == 2
    for found, expected in zip(balance.logits, kept, strict=True):
        assert found.shape == (5, 8) and torch.equal(found, expected)
    # transformers itself takes no loss of them; this is 8 * sum_e f_e P_e over both layers' tokens.
    logits = torch.cat(kept)
    counts = torch.bincount(logits.topk(2).indices.flatten(), minlength=8)
    expected = 8 * (counts / 10 * logits.softmax(-1).mean(0)).sum()
    loss = balance.loss_of(tuple(balance.logits), balance.num_experts, balance.top_k)
    assert loss.item() == pytest.approx(expected.item())


def test_the_model_itself_computes_no_auxiliary_loss_beside_a_mask_of_four_dimensions():
    model = make_tiny_moe()
    model.config.output_router_logits = True
    ids, mask = torch.arange(4)[None], torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    with pytest.raises(RuntimeError):  # as transformers does
        model(input_ids=ids, attention_mask=mask)
    expected = model(input_ids=ids).logits
    for _ in range(2):  # also where the model is loaded twice
        keep_router_logits(model)
    assert torch.allclose(model(input_ids=ids, attention_mask=mask).logits, expected, atol=1e-5)
    balance = model.model.verifiers_rl_balance
    assert [logits.shape for logits in balance.logits] == [(4, 4)] * 2
    with torch.no_grad():  # as a reference, or an evaluation
        model(input_ids=ids.repeat(2, 1))
    assert [logits.shape for logits in balance.logits] == [(4, 4)] * 2
