"""Tiny models of the families that people train: the real classes of transformers with random
weights, in the kind of checkpoint that the hub has.

Sizes are the smallest that vLLM's CPU kernels take. Windows and chunks are shorter than the test's
sequences, so that they matter. Nothing is downloaded.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from tests.helpers import make_tokenizer

EOS, PAD = 257, 256
VOCABULARY = 272


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        title: as people call it.
        like: the checkpoint of the hub that the tiny one is like.
        traits: what is particular about it, a few words.
        write: writes the checkpoint into a folder.
        tokens: its own special tokens, and the attributes of the tokenizer that name them.
        has_experts: whether its layers have experts, which vLLM serves without adapters on a CPU.
        server_dtype: in which vLLM's CPU build has kernels for it.
    """

    title: str
    like: str
    traits: str
    write: Callable[[Path], None]
    tokens: dict[str, str] = field(default_factory=dict)
    has_experts: bool = False
    server_dtype: str = "float32"


def write_family(name, folder):
    """Write model and tokenizer of this family into a folder, which exists."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    family.write(folder)
    plain = make_tokenizer(*family.tokens.values())
    named = {name: token for name, token in family.tokens.items() if name.endswith("_token")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens=named,
        chat_template=plain.chat_template,
    )
    assert len(tokenizer) <= VOCABULARY
    tokenizer.save_pretrained(folder)
    return family


# --- Models --------------------------------------------------------------------------------------

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def save(model, folder):
    """Save in bfloat16, as the hub has it, with a correction bias of routers in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    for name, buffer in list(model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            module = model.get_submodule(name.rpartition(".")[0])
            module.e_score_correction_bias = torch.randn(buffer.shape) * 0.1
    model.save_pretrained(folder)


def causal_lm(kind, **changes):
    """What writes a text model, of `{kind}ForCausalLM` and `{kind}Config`."""

    def write(folder):
        config = getattr(transformers, f"{kind}Config")(**TEXT | changes)
        save(getattr(transformers, f"{kind}ForCausalLM")(config), folder)

    return write


def with_tower(kind, text, vision, files, **top):
    """What writes a text model beside a vision tower.

    Args:
        text, vision, top: fields of the configs.
        files: of the processor of images, by name.
    """

    def write(folder):
        config = getattr(transformers, f"{kind}Config")(
            text_config=TEXT | text, vision_config=dict(vision), **top
        )
        save(getattr(transformers, f"{kind}ForConditionalGeneration")(config), folder)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))

    return write


def in_mxfp4(folder):
    """Write gpt-oss with its experts in MXFP4: for 32 weights, 16 bytes of two and a scale."""
    write_gpt_oss(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_in, num_out = tensors.pop(name).shape
        blocks = (num_experts, num_out, num_in // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*blocks, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 125, blocks, dtype=torch.uint8)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [*plain, "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))


write_gpt_oss = causal_lm(
    "GptOss",
    num_local_experts=4,
    num_experts_per_tok=2,
    intermediate_size=64,
    head_dim=64,
    sliding_window=32,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
}
SMALL_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 1024, "longest_edge": 4096},
}
QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "patch_size": 16,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
QWEN_FILES = {
    "preprocessor_config.json": QWEN_IMAGES,
    "video_preprocessor_config.json": QWEN_IMAGES
    | {"video_processor_type": "Qwen3VLVideoProcessor"},
}
QWEN_IDS = {
    "image_token_id": 261,
    "video_token_id": 261,
    "vision_start_token_id": 262,
    "vision_end_token_id": 263,
    "tie_word_embeddings": True,
}
DELTA_NET = {
    "num_hidden_layers": 4,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
QWEN_TOKENS = {"image": "<|image_pad|>", "start": "<|vision_start|>", "end": "<|vision_end|>"}

FAMILIES = {
    "qwen3": Family(
        "Qwen3", "Qwen3-0.6B", "tied head", causal_lm("Qwen3", tie_word_embeddings=True),
    ),
    "qwen3_moe": Family(
        "Qwen3 MoE", "Qwen3-30B-A3B", "experts",
        causal_lm("Qwen3Moe", **EXPERTS, num_experts=4, norm_topk_prob=True),
        has_experts=True,
    ),
    "qwen3_5": Family(
        "Qwen3.5", "Qwen3.5-4B", "gated delta net, vision tower, tied head",
        with_tower("Qwen3_5", DELTA_NET, QWEN_TOWER, QWEN_FILES, **QWEN_IDS),
        tokens=QWEN_TOKENS, server_dtype="bfloat16",
    ),
    "qwen3_5_moe": Family(
        "Qwen3.5 MoE", "Qwen3.5-35B-A3B", "gated delta net, experts, vision tower",
        with_tower(
            "Qwen3_5Moe",
            {**DELTA_NET, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
            QWEN_TOWER, QWEN_FILES, **QWEN_IDS,
        ),
        tokens=QWEN_TOKENS, has_experts=True, server_dtype="bfloat16",
    ),
    "qwen3_vl": Family(
        "Qwen3-VL", "Qwen3-VL-4B-Instruct", "vision tower, tied head",
        with_tower(
            "Qwen3VL",
            {
                "tie_word_embeddings": True,
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5],
                    "mrope_interleaved": True,
                },
            },
            QWEN_TOWER | {"deepstack_visual_indexes": [0]},
            QWEN_FILES, **QWEN_IDS,
        ),
        tokens=QWEN_TOKENS,
    ),
    "llama3": Family(
        "Llama 3.2", "Llama-3.2-1B-Instruct", "tied head, scaled rope",
        causal_lm("Llama", tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
    ),
    "llama4": Family(
        "Llama 4", "Llama-4-Scout-17B-16E-Instruct",
        "experts in one tensor, layers without rope, vision tower",
        with_tower(
            "Llama4",
            {
                "num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 1,
                "intermediate_size": 64, "intermediate_size_mlp": 128,
            },
            SMALL_TOWER
            | {
                "intermediate_size": 256, "vision_output_dim": 64,
                "projector_input_dim": 64, "projector_output_dim": 64,
            },
            {
                "preprocessor_config.json": {
                    "image_processor_type": "Llama4ImageProcessorFast", "max_patches": 1,
                    "size": {"height": 28, "width": 28},
                },
                "processor_config.json": {"processor_class": "Llama4Processor", "patch_size": 14},
            },
            boi_token_index=262, eoi_token_index=263, image_token_index=264,
        ),
        tokens={
            "image": "<|image|>", "start": "<|image_start|>", "end": "<|image_end|>",
            "patch": "<|patch|>", "x": "<|tile_x_separator|>", "y": "<|tile_y_separator|>",
        },
        has_experts=True,
    ),
    "gemma3": Family(
        "Gemma 3", "gemma-3-4b-it", "sliding windows, vision tower, tied head",
        with_tower(
            "Gemma3",
            {"num_hidden_layers": 6, "query_pre_attn_scalar": 32, "sliding_window": 32},
            SMALL_TOWER,
            {
                "preprocessor_config.json": {
                    "image_processor_type": "Gemma3ImageProcessor",
                    "size": {"height": 28, "width": 28},
                },
                "processor_config.json": {
                    "processor_class": "Gemma3Processor",
                    "image_seq_length": 1,
                },
            },
            mm_tokens_per_image=1, boi_token_index=261, eoi_token_index=262, image_token_index=263,
        ),
        tokens={"boi_token": "<img>", "eoi_token": "</img>", "image_token": "<soft>"},
    ),
    "gpt_oss": Family(
        "gpt-oss", "gpt-oss-20b in bfloat16", "experts in one tensor, sinks, sliding windows",
        write_gpt_oss, has_experts=True,
    ),
    "gpt_oss_mxfp4": Family(
        "gpt-oss, MXFP4", "gpt-oss-20b", "as above, and experts quantised in MXFP4", in_mxfp4,
        has_experts=True, server_dtype="bfloat16",
    ),
    "glm4_moe": Family(
        "GLM-4.7", "GLM-4.7", "experts with a correction bias, part of each head with rope",
        causal_lm(
            "Glm4Moe", **EXPERTS, num_hidden_layers=3, n_routed_experts=4, n_shared_experts=1,
            first_k_dense_replace=1, use_qk_norm=True, attention_bias=True,
            rope_parameters={
                "rope_type": "default", "rope_theta": 1e6,
                "partial_rotary_factor": 0.5,
            },
        ),
        has_experts=True,
    ),
    "nemotron_h": Family(
        "Nemotron 3", "NVIDIA-Nemotron-3-Nano-30B-A3B",
        "Mamba-2, attention and experts in turns",
        causal_lm(
            "NemotronH",
            **EXPERTS,
            layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
            num_hidden_layers=4, ssm_state_size=64, mamba_num_heads=4, mamba_head_dim=32,
            n_groups=2, chunk_size=64, n_routed_experts=4, n_shared_experts=1,
            moe_shared_expert_intermediate_size=64,
        ),
        has_experts=True,
    ),
    "nemotron_h_dense": Family(
        "Nemotron Nano 2", "NVIDIA-Nemotron-Nano-9B-v2",
        "Mamba-2, attention and dense layers in turns",
        causal_lm(
            "NemotronH",
            layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"],
            num_hidden_layers=4, ssm_state_size=64, mamba_num_heads=4, mamba_head_dim=32,
            n_groups=2, chunk_size=64, n_routed_experts=0,
        ),
    ),
    "olmo3": Family(
        "Olmo 3", "Olmo-3-7B-Instruct", "sliding windows, norms behind layers",
        causal_lm("Olmo3", num_hidden_layers=4, sliding_window=32),
    ),
    "mistral3": Family(
        "Mistral Small 3.2", "Mistral-Small-3.2-24B-Instruct", "vision tower",
        with_tower(
            "Mistral3",
            {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False},
            SMALL_TOWER | {"model_type": "pixtral", "image_size": 32, "patch_size": 16},
            {
                "preprocessor_config.json": {
                    "image_processor_type": "PixtralImageProcessorFast",
                    "patch_size": {"height": 16, "width": 16},
                    "size": {"longest_edge": 32},
                },
                "processor_config.json": {
                    "processor_class": "PixtralProcessor", "patch_size": 16,
                    "spatial_merge_size": 2,
                },
            },
            image_token_index=261, spatial_merge_size=2, tie_word_embeddings=False,
        ),
        tokens={"image": "[IMG]", "break": "[IMG_BREAK]", "end": "[IMG_END]"},
    ),
    "smollm3": Family(
        "SmolLM3", "SmolLM3-3B", "layers without rope, tied head",
        causal_lm("SmolLM3", num_hidden_layers=4, tie_word_embeddings=True),
    ),
    "deepseek_v3": Family(
        "DeepSeek V3", "DeepSeek-V3-0324 in bfloat16",
        "latent attention, experts with a correction bias in groups",
        causal_lm(
            "DeepseekV3", **EXPERTS, num_hidden_layers=3, num_key_value_heads=2,
            n_routed_experts=4, n_shared_experts=1, n_group=2, topk_group=1,
            first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=64, qk_rope_head_dim=32,
            qk_nope_head_dim=32, v_head_dim=32, rope_parameters=YARN, topk_method="noaux_tc",
        ),
        has_experts=True,
    ),
}  # fmt: skip
