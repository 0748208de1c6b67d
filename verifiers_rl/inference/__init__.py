"""The inference server `vf-vllm`, and all HTTP to it. Nothing else imports vLLM."""

from typing import TYPE_CHECKING

from verifiers_rl.lazy import load_on_first_use

if TYPE_CHECKING:
    from verifiers_rl.inference.client import ControlRequest as ControlRequest
    from verifiers_rl.inference.client import InferenceClient as InferenceClient
    from verifiers_rl.inference.client import InferenceServerError as InferenceServerError
    from verifiers_rl.inference.client import ServerLostError as ServerLostError
    from verifiers_rl.inference.client import generation_key as generation_key
    from verifiers_rl.inference.client import wait_for_servers as wait_for_servers
    from verifiers_rl.inference.packed_tokens import allowed_tokens as allowed_tokens
    from verifiers_rl.inference.packed_tokens import pack_ids as pack_ids
    from verifiers_rl.inference.packed_tokens import unpack_experts as unpack_experts
    from verifiers_rl.inference.packed_tokens import unpack_mask as unpack_mask
    from verifiers_rl.inference.packed_tokens import unpack_sampled as unpack_sampled
    from verifiers_rl.inference.rollout_client import ServerClient as ServerClient
    from verifiers_rl.inference.session import RolloutSession as RolloutSession
    from verifiers_rl.inference.session import SessionLostError as SessionLostError
    from verifiers_rl.inference.session import derive_seed as derive_seed

HOME = {
    "InferenceClient": "client",
    "InferenceServerError": "client",
    "RolloutSession": "session",
    "SessionLostError": "session",
    "derive_seed": "session",
    "ServerClient": "rollout_client",
    "ServerLostError": "client",
    "ControlRequest": "client",
    "generation_key": "client",
    "pack_ids": "packed_tokens",
    "wait_for_servers": "client",
    "unpack_experts": "packed_tokens",
    "allowed_tokens": "packed_tokens",
    "unpack_mask": "packed_tokens",
    "unpack_sampled": "packed_tokens",
}
__getattr__, __dir__ = load_on_first_use(__name__, HOME)
