"""The inference server `vf-vllm`, and all HTTP to it. Nothing else imports vLLM."""

from typing import TYPE_CHECKING

from verifiers_rl.lazy import load_on_first_use

if TYPE_CHECKING:
    from verifiers_rl.inference.client import (
        ControlRequest,
        InferenceClient,
        InferenceServerError,
        ServerLostError,
        generation_key,
    )
    from verifiers_rl.inference.packed_tokens import allowed_tokens
    from verifiers_rl.inference.rollout_client import ChatReply, ServerClient
    from verifiers_rl.inference.session import RolloutSession, SessionLostError, derive_seed

HOME = {
    "InferenceClient": "client",
    "InferenceServerError": "client",
    "RolloutSession": "session",
    "SessionLostError": "session",
    "derive_seed": "session",
    "ChatReply": "rollout_client",
    "ServerClient": "rollout_client",
    "ServerLostError": "client",
    "ControlRequest": "client",
    "generation_key": "client",
    "allowed_tokens": "packed_tokens",
}
__getattr__, __dir__ = load_on_first_use(__name__, HOME)
