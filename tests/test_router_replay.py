"""The trainer's routers use given experts, and their gradients are those of their own scores."""

import copy
import io
from base64 import b64encode

import numpy as np
import pytest
import torch
import transformers

from tests.helpers import make_tiny_model, make_tiny_moe, sent
from verifiers_rl import router_replay
from verifiers_rl.config import ConfigError, RLConfig
from verifiers_rl.inference.packed_tokens import unpack_experts
from verifiers_rl.models import check_policy, load_policy
from verifiers_rl.packing import collate
from verifiers_rl.router_replay import RouterReplay, expert_load, replay_experts, routers_of
from verifiers_rl.types import ROUTED_EXPERTS, Sample

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 50, "intermediate_size": 48, "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip
MOE = {"moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2}
MOE |= {"topk_group": 1, "first_k_dense_replace": 1}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
MLA |= {"v_head_dim": 16, "num_key_value_heads": 2}


CLASSES = {
    "mixtral": ("Mixtral", {"num_local_experts": 8}),
    "gpt_oss": ("GptOss", {"num_local_experts": 8, "head_dim": 16}),
    "granite": ("GraniteMoe", {"num_local_experts": 8}),
    "glm4": ("Glm4Moe", MOE | {"head_dim": 16}),
    "deepseek": ("DeepseekV3", MOE | MLA),
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


def perturbed(model):
    """A copy whose routers make other choices now and then."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for _, router in routers_of(other):
            router.weight += 0.1 * router.weight.std() * torch.randn_like(router.weight)
    return other


@pytest.mark.parametrize("name", ["qwen3", *CLASSES])
def test_replayed_experts_are_used_and_weighed_by_the_models_own_scores(name):
    model = make(name).eval()
    ids = torch.randint(3, 50, (2, 40))
    with torch.no_grad():
        experts = chosen_by(model, ids)
        expected = model(input_ids=ids).logits
        other = copy.deepcopy(model)
        replay = RouterReplay(other)
        replay.experts = experts
        assert (other(input_ids=ids).logits - expected).abs().max() < 1e-6
        # Other experts give other logits, and -1 the router's own.
        replay.experts = (experts + 1) % replay.routers[0][1].num_experts
        assert (other(input_ids=ids).logits - expected).abs().max() > 1e-4
        replay.experts = torch.full_like(experts, -1)
        assert torch.equal(other(input_ids=ids).logits, expected)
        # A router whose weights differ uses them.
        other = perturbed(model)
        replay = RouterReplay(other)
        assert not torch.equal(chosen_by(other, ids), experts)
        replay.experts = experts
        assert torch.equal(chosen_by(other, ids)[experts > 0], experts[experts > 0])


def test_replayed_experts_are_used_again_where_backward_computes_again():
    model = make_tiny_moe().train()
    ids, gradients = torch.randint(3, 250, (2, 30)), []
    with torch.no_grad():
        experts = chosen_by(perturbed(model), ids)
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        replay_experts(model, experts)
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
    whole = torch.zeros(1, 5, 2, 2, dtype=torch.int16)
    whole[0, :, 0] = given
    replay_experts(model, whole)
    _, weights, chosen = router(hidden)
    assert chosen.tolist() == given.tolist()
    (found,) = torch.autograd.grad((weights * factors).sum(), router.weight)
    weight = router.weight.detach().double().requires_grad_()
    scores = (hidden.double() @ weight.T).softmax(-1).gather(1, given)
    scores = scores / scores.sum(-1, keepdim=True)
    (expected,) = torch.autograd.grad((scores * factors).sum(), weight)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    replay_experts(model, None)
    assert not torch.equal(router(hidden)[2], given)


def test_experts_stand_in_rows_with_shared_prefixes_where_their_tokens_do():
    def make_sample(tokens, first):
        experts = np.arange(first, first + 4 * len(tokens), dtype=np.int16).reshape(-1, 2, 2)
        zeros = np.zeros(len(tokens))
        return Sample(tokens, zeros, zeros, zeros, extras={ROUTED_EXPERTS: experts})

    def first_experts(samples, *rows):
        microbatch = collate(samples, rows, [1.0] * len(samples), 0, num_shared=[0, 2, 0])
        return microbatch.extras and microbatch.extras[ROUTED_EXPERTS][..., 0, 0].tolist()

    plain = Sample([8, 9], [0, 1], [0, -1], [-1, 0])
    samples = sent([make_sample([1, 2, 3, 4], 0), make_sample([1, 2, 5], 100), plain])
    assert first_experts(samples, [0, 1], [2]) == [[0, 4, 8, 12, 108], [-1] * 5]
    assert not first_experts([plain], [0])
    # The last token of a reply has none, but a longer sample goes on behind it.
    short, long = make_sample([1, 2], 0), make_sample([1, 2, 3], 100)
    short.extras[ROUTED_EXPERTS][-1] = -1
    assert first_experts([short, long], [0, 1]) == [[0, 104, 108]]
    with pytest.raises(ValueError, match=r"extras\['routed_experts'\] of shape \(1, 2, 2\) for 2"):
        Sample([8, 9], [0, 1], [0, -1], [-1, 0], extras={ROUTED_EXPERTS: np.zeros((1, 2, 2))})


def test_experts_of_a_reply_come_as_a_file_of_numpy_and_no_other_object():
    def packed(array):
        file = io.BytesIO()
        np.save(file, array)
        return b64encode(file.getvalue()).decode()

    for dtype in (np.uint8, np.uint16):
        experts = np.arange(12, dtype=dtype).reshape(3, 2, 2)
        unpacked = unpack_experts(packed(experts))
        assert unpacked.tolist() == experts.tolist() and unpacked.dtype == np.int16
    with pytest.raises(ValueError, match="Object arrays cannot be loaded"):
        unpack_experts(packed(np.array([{}], object)))


def test_what_cannot_replay_is_refused_at_the_start():
    args = RLConfig(use_cpu=True, router_replay=True)
    assert args.sampling_args()["extra_body"]["routed_experts"] is True
    assert "routed_experts" not in args.eval_sampling_args()["extra_body"]
    with pytest.raises(ConfigError, match="router_replay=True: Qwen3ForCausalLM has no router"):
        check_policy(make_tiny_model(), args)
    check_policy(make_tiny_moe(), args)


def with_experts(*of_layers):
    """A sample of these experts: for each layer, for each token, the ids."""
    experts = np.array(of_layers, np.int16).swapaxes(0, 1)
    zeros = np.zeros(len(experts))
    return Sample(zeros, zeros, zeros, zeros - 1, extras={"routed_experts": experts})


def load_of(model, *samples):
    return expert_load(model, [*samples]).get("expert_load_max")


def test_the_load_of_experts_is_counted_layer_by_layer(monkeypatch):
    uneven, even = [[0, 1]] * 4, [[0, 1], [2, 3]] * 2
    model, sample = make_tiny_moe(), with_experts(uneven, even)
    # Of 4 experts, two have twice their share and two none; in the other layer all are equal.
    assert load_of(model, sample) == (2 + 1) / 2
    # A token that the server returned no experts for counts for none.
    unknown = with_experts([[-1, -1]] * 2, [[-1, -1]] * 2)
    assert load_of(model, sample, unknown) == load_of(model, sample)
    assert load_of(model, unknown) == 0
    plain = Sample([1, 2], [0, 1], [0, -1], [-1, 0])
    assert load_of(model, plain) is load_of(make_tiny_model()) is None
    # The first layer of this model is dense, of which a server returns zeros.
    dense = with_experts([[0, 0]] * 4, [[0, 1], [2, 3], [4, 5], [6, 7]])
    assert load_of(make("glm4"), dense) == 1
    # Of a large batch, every kth sample is counted.
    samples = [with_experts(even, even), with_experts(uneven, uneven)] * 3
    assert load_of(model, *samples) == 1.5
    monkeypatch.setattr(router_replay, "MAX_COUNTED", 12)
    assert load_of(model, *samples) == 1


def test_a_model_whose_config_asks_for_router_logits_is_trained_without(caplog):
    model = make_tiny_moe()
    model.config.output_router_logits = True
    policy = load_policy(model, RLConfig(use_cpu=True, use_lora=False))
    assert not policy.config.output_router_logits
    assert "the routers' auxiliary loss is not used" in caplog.text
