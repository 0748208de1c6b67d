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
    from verifiers_rl.inference.rollout_client import ChatReply as ChatReply
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
    "ChatReply": "rollout_client",
    "ServerClient": "rollout_client",
    "ServerLostError": "client",
    "ControlRequest": "client",
    "generation_key": "client",
    "wait_for_servers": "client",
    "allowed_tokens": "packed_tokens",
}
__getattr__, __dir__ = load_on_first_use(__name__, HOME)
