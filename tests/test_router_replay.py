"""The trainer's routers use given experts, and their gradients are those of their own scores."""

import copy

import numpy as np
import pytest
import torch
import transformers

from tests.helpers import in_base64, make_tiny_model, make_tiny_moe, sent
from verifiers_rl.config import ConfigError, RLConfig
from verifiers_rl.inference.packed_tokens import unpack_experts
from verifiers_rl.models import check_policy, load_policy
from verifiers_rl.packing import collate
from verifiers_rl.router_replay import replay_experts, routers_of
from verifiers_rl.types import ROUTED_EXPERTS, Sample

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 50, "intermediate_size": 48, "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip
MOE = {"moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2}
MOE |= {"topk_group": 1, "first_k_dense_replace": 1}


CLASSES = {
    "gpt_oss": ("GptOss", {"num_local_experts": 8, "head_dim": 16}),
    "glm4": ("Glm4Moe", MOE | {"head_dim": 16}),
}


def make(name):
    if name == "qwen3":
        return make_tiny_moe()
    torch.manual_seed(0)
    kind, options = CLASSES[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES | options)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def chosen_by(model, ids):
    """(B, T, layers, top_k), as a server returns them: 0 for layers without experts."""
    found, hooks = {}, []
    for layer, router in routers_of(model):

        def keep(router, inputs, outputs, layer=layer):
            (found[layer],) = (o for o in outputs if not o.is_floating_point())

        hooks.append(router.register_forward_hook(keep))
    model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    nothing = torch.zeros_like(found[layer])
    layers = [found.get(i, nothing) for i in range(model.config.num_hidden_layers)]
    return torch.stack(layers, 1).unflatten(0, ids.shape)


@pytest.mark.parametrize("name", ["qwen3", *CLASSES])
def test_replayed_experts_are_used_and_weighed_by_the_models_own_scores(name):
    model = make(name).eval()
    ids = torch.randint(3, 50, (2, 40))
    with torch.no_grad():
        experts = chosen_by(model, ids)
        expected = model(input_ids=ids).logits
        other = copy.deepcopy(model)
        replay_experts(other, experts)
        assert (other(input_ids=ids).logits - expected).abs().max() < 1e-6
        # Other experts give other logits, and -1 the router's own.
        routers = routers_of(other)
        others = (experts + 1) % routers[0][1].num_experts
        replay_experts(other, others)
        assert (other(input_ids=ids).logits - expected).abs().max() > 1e-4
        layers = [layer for layer, _ in routers]
        assert torch.equal(chosen_by(other, ids)[:, :, layers], others[:, :, layers])
        replay_experts(other, torch.full_like(experts, -1))
        assert torch.equal(other(input_ids=ids).logits, expected)


def test_replayed_experts_are_used_again_where_backward_computes_again():
    model = make_tiny_moe().train()
    ids, gradients = torch.randint(3, 250, (2, 30)), []
    replay_experts(model, torch.tensor([0, 1]).expand(2, 30, 2, 2))
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(input_ids=ids).logits[..., 7].sum().backward()
        gradients.append([router.weight.grad.clone() for _, router in routers_of(model)])
    assert all(gradient.abs().max() > 0 for gradient in gradients[0])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_gradients_reach_the_router_through_its_own_scores_of_the_replayed_experts():
    """R3: softmax over all experts, taken at the replayed ones and normalised over these."""
    model = make_tiny_moe()
    ((_, router), *_) = routers_of(model)
    hidden, factors = torch.randn(5, 64), torch.randn(5, 2)
    given = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [0, 2]])
    replay_experts(model, given[None, :, None].expand(1, 5, 2, 2))
    _, weights, chosen = router(hidden)
    assert torch.equal(chosen, given)
    (found,) = torch.autograd.grad((weights * factors).sum(), router.weight)
    weight = router.weight.detach().double().requires_grad_()
    scores = (hidden.double() @ weight.T).softmax(-1).gather(1, given)
    scores = scores / scores.sum(-1, keepdim=True)
    (expected,) = torch.autograd.grad((scores * factors).sum(), weight)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    replay_experts(model, None)
    assert not torch.equal(router(hidden)[2], given)


def with_experts(tokens, experts):
    """A sample without loss. `experts`: for each layer, for each token, the ids."""
    zeros = np.zeros(len(tokens))
    experts = np.array(experts, np.int16).swapaxes(0, 1)
    return Sample(tokens, zeros, zeros, zeros - 1, extras={ROUTED_EXPERTS: experts})


PLAIN = Sample([8, 9], [0, 1], [0, -1], [-1, 0])


def test_experts_stand_in_rows_with_shared_prefixes_where_their_tokens_do():
    def first_experts(samples, *rows):
        microbatch = collate(samples, rows, [1.0] * len(samples), 0, num_shared=[0, 2, 0])
        return microbatch.extras and microbatch.extras[ROUTED_EXPERTS][..., 0, 0].tolist()

    long, other = (
        with_experts(tokens, [[[first + t] for t in range(len(tokens))]])
        for tokens, first in (([1, 2, 3, 4], 0), ([1, 2, 5], 100))
    )
    samples = sent([long, other, PLAIN])
    assert first_experts(samples, [0, 1], [2]) == [[0, 1, 2, 3, 102], [-1] * 5]
    assert not first_experts([PLAIN], [0])
    # The last token of a reply has none, but a longer sample goes on behind it.
    short = with_experts([1, 2], [[[0], [-1]]])
    assert first_experts([short, other], [0, 1]) == [[0, 101, 102]]
    with pytest.raises(ValueError, match=r"extras\['routed_experts'\] of shape \(1, 1, 1\) for 2"):
        with_experts([8, 9], [[[0]]])


def test_experts_of_a_reply_come_as_a_file_of_numpy_and_no_other_object():
    experts = np.arange(12, dtype=np.uint16).reshape(3, 2, 2)
    unpacked = unpack_experts(in_base64(experts))
    assert unpacked.tolist() == experts.tolist() and unpacked.dtype == np.int16
    with pytest.raises(ValueError, match="Object arrays cannot be loaded"):
        unpack_experts(in_base64(np.array([{}], object)))


def test_what_cannot_replay_is_refused_at_the_start():
    args = RLConfig(use_cpu=True, router_replay=True)
    assert args.sampling_args()["routed_experts"] is True
    assert "routed_experts" not in args.eval_sampling_args()
    with pytest.raises(ConfigError, match="router_replay=True: Qwen3ForCausalLM has no router"):
        check_policy(make_tiny_model(), args)
    check_policy(make_tiny_moe(), args)


def test_a_model_whose_config_asks_for_router_logits_is_trained_without(caplog):
    model = make_tiny_moe()
    model.config.output_router_logits = True
    policy = load_policy(model, RLConfig(use_cpu=True, use_lora=False))
    assert not policy.config.output_router_logits
    assert "the routers' auxiliary loss is not used" in caplog.text
