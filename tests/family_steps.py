"""What a trainer does with a model, one function for each step, without a server."""

import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from tests.helpers import StubSink, StubSource, weights_of
from verifiers_rl import RLConfig, RLTrainer
from verifiers_rl.forward import (
    check_head,
    reason_against_rows,
    reason_against_sharing_prefixes,
)
from verifiers_rl.inference.expected import as_served, check_plan, trained_model
from verifiers_rl.logprobs import (
    chunked_logprobs_and_entropy,
    hidden_states_in_place_of_logits,
    token_logprobs_and_entropy,
)
from verifiers_rl.models import auto_class, load_policy
from verifiers_rl.packing import ModelSupport
from verifiers_rl.sync.plan import TransferPlan
from verifiers_rl.sync.sources import what_to_send

IDS = torch.randint(256, (1, 40), generator=torch.Generator().manual_seed(1))
RANK = 4


def load(folder, use_lora=False):
    """The policy, as a run loads it, in float32."""
    torch.manual_seed(1)
    return load_policy(str(folder), RLConfig(use_cpu=True, use_lora=use_lora, lora_rank=RANK))


def shared_rows(model):
    """Why samples do not share rows, or None."""
    attention = model.config.get_text_config()._attn_implementation
    return reason_against_rows(model, model, ModelSupport(attention=attention))


def shared_prefixes(model, max_seq_len=32):
    """Why samples of a row do not share what they begin with, or None."""
    return reason_against_sharing_prefixes(model, model, max_seq_len)


@torch.no_grad()
def chunked_head(model):
    """The largest difference between logprobs by chunks and from whole logits, in nats."""
    check_head(model, model)
    targets = IDS[0, 1:]
    logits = model(input_ids=IDS, use_cache=False).logits[0, :-1]
    expected = token_logprobs_and_entropy(logits, targets, 0.7)
    with hidden_states_in_place_of_logits(model) as to_logits:
        hidden = model(input_ids=IDS, use_cache=False).logits[0, :-1]
    given = chunked_logprobs_and_entropy(hidden, to_logits, targets, 0.7, chunk_size=7)
    return max((a - b).abs().max().item() for a, b in zip(given, expected, strict=True))


def options_of_a_step(output, use_lora, **others):
    """The options of one step on 8 rollouts, 4 of an example, with nothing beside."""
    return RLConfig(
        output_dir=output,
        use_cpu=True,
        use_lora=use_lora,
        batch_size=8,
        rollouts_per_example=4,
        max_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **others,
    )


def one_step(folder, output, use_lora):
    """Train one step on given samples, and save. What is not trained stays as it was."""
    args = options_of_a_step(
        output, use_lora, lora_rank=RANK, max_seq_len=32, learning_rate=1e-2,
        save_final="merged" if use_lora else "adapter",
    )  # fmt: skip
    trainer = RLTrainer(
        str(folder),
        None,
        args,
        processing_class=AutoTokenizer.from_pretrained(folder),
        orchestrator=StubSource(),
        weight_sync=StubSink(),
    )
    model = trainer.model
    before = weights_of(model)
    trainer.train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert moved and moved <= trained, sorted(moved - trained)[:3]
    missed = {name for name in trained - moved if "lora_" not in name and "experts" not in name}
    assert not missed, f"no gradient: {sorted(missed)[:5]}"
    return trainer


@torch.no_grad()
def loads_as_saved(trainer, folder, output):
    """The largest difference of logits between the trained model and the saved one, loaded by
    transformers. If an adapter was trained, PEFT loads it onto the base model of `folder`, and
    transformers the merged model.
    """
    loaded = []
    plain = output
    if hasattr(trainer.model, "peft_config"):
        loaded.append(PeftModel.from_pretrained(load(folder), output))
        plain = output / "merged"
    kind = auto_class(AutoConfig.from_pretrained(plain).model_type)
    loaded.append(kind.from_pretrained(plain, dtype=torch.float32))
    expected = trainer.model.eval()(input_ids=IDS, use_cache=False).logits
    given = [model.eval()(input_ids=IDS, use_cache=False).logits for model in loaded]
    return max((logits - expected).abs().max().item() for logits in given)


def what_travels(folder, model, lora_sync="merged"):
    """Names under which the server gets what this model sends; it expects all of them."""
    sources, adapter = what_to_send(model, lora_sync)
    shapes = {name: source.shape for name, source in sources.items()}
    plan = TransferPlan(tensors=shapes, dtype="float32", bucket_bytes=2**20, adapter=adapter)
    config = AutoConfig.from_pretrained(folder)
    served = trained_model(config)
    check_plan(plan, served)
    return {*as_served(plan, served, config).tensors}


def text_names(folder):
    """Names of the checkpoint's tensors that are trained."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    towers = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.")
    others = (*towers, "e_score_correction_bias")
    return {name for name in names if not any(other in name for other in others)}
