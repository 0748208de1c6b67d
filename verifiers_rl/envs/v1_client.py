"""Model calls of agents of `verifiers.v1`: from verifiers' interception endpoint to `vf-vllm`."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects import Dialect
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn

from verifiers_rl.envs.base import Turn
from verifiers_rl.envs.chat_harness import IN_PROCESS
from verifiers_rl.inference import RolloutSession

if TYPE_CHECKING:
    from verifiers_rl.envs.v1 import V1Environment
    from verifiers_rl.requests import GroupRequest

logger = logging.getLogger(__name__)

# Request options that only take tokens away. With a mask, the trainer knows which they left.
_OF_MASK = {"top_p", "top_k", "min_p", "bad_words", "allowed_token_ids", "min_tokens", "ignore_eos"}
# These too make vLLM sample from another distribution than the softmax of the logits.
_OTHERS = {
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "tool_choice",
    "response_format",
    "structured_outputs",
}
# All that an agent usually sets; vLLM knows more.
SAMPLING = {
    *vf.SamplingConfig.model_fields,
    *_OF_MASK,
    *_OTHERS,
    "chat_template_kwargs",
    "stop",
    "stop_token_ids",
    "repetition_detection",
}
CONTEXT = "context length"  # by these words, harnesses recognize a prompt that is too long
_NEUTRAL: tuple[Any, ...] = (None, 0, {}, [], "auto", "none", {"type": "text"})


class Said(NamedTuple):
    """A reply of the policy: what it was asked, its message in the trace, and its tokens."""

    asked: PendingTurn
    message: vf.AssistantMessage
    turn: Turn


class TokenClientConfig(vf.TrainClientConfig):
    """Names our client to verifiers. Each episode has one of its own, by which a model call finds
    what its tokens depend on. verifiers takes them for equal, so they share one `TokenClient`.
    """

    _runner: V1Environment
    _sampling: dict[str, Any]  # options of the run
    _session: RolloutSession
    _said: dict[str, list[Said]]  # by the id of its trace

    def of_episode(self, request: GroupRequest, session: RolloutSession) -> TokenClientConfig:
        client = self.model_copy()  # to check its fields takes longer
        client._sampling, client._session = request.sampling_args, session
        client._said = defaultdict(list)
        return client

    def warn_of_bias(self, agent: str, request: Mapping[str, Any]) -> None:
        """Warn once for each agent and option by which a request's tokens come from another
        distribution than the trainer's. `make_runner` warned of options equal to the run's.
        """
        names = _OTHERS if self._sampling.get("sampling_mask") else _OTHERS | _OF_MASK
        for name in names & request.keys():
            value, warned = request[name], self._runner.warned
            if (agent, name) not in warned and value not in (*_NEUTRAL, self._sampling.get(name)):
                warned.add((agent, name))
                logger.warning(
                    f"environment {self._runner.name!r}: the agent {agent!r} samples with "
                    f"{name}={value!r}, from another distribution than the trainer's softmax; "
                    "importance ratios will be off, watch mismatch_kl"
                )

    def said_in(self, trace: vf.Trace) -> list[Said]:
        """Return all that the policy has said in a trace, also what the environment has put other
        replies in the place of.
        """
        return self._said[trace.id]

    def check(self, trace: vf.Trace, is_trained: bool) -> None:
        """Raise ValueError if a trace's tokens are not of the run's model and temperature. Nothing
        is trained on an evaluation, so its agents may sample at any temperature.
        """
        name, config = trace.agent.name, trace.agent.config
        if config.client is not self:
            raise ValueError(
                f"the agent {name!r} has a client of its own, so its tokens are not of the model "
                "that is trained; mark it trainable = False in the environment's setup()"
            )
        temperature, own = self._sampling["temperature"], config.sampling.temperature
        if is_trained and own not in (None, temperature):
            raise ValueError(
                f"the agent {name!r} samples at temperature={own:g}, and the trainer takes "
                f"logprobs at {temperature:g}; remove temperature from the agent's sampling"
            )


class TokenClient(vf.Client):
    """Passes model calls from the endpoint to `vf-vllm`'s `/v1/chat/completions/tokens`."""

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: vf.SamplingConfig,
        *,
        turn: PendingTurn,
        **_: Any,
    ) -> vf.Response:
        if not isinstance(dialect, ChatDialect):
            raise ProviderError(
                f"{type(dialect).__name__}: only chat completions can be trained on; use a harness "
                "that asks for them",
                status_code=400,
            )
        episode: TokenClientConfig = turn.trace.agent.config.client
        of_agent = sampling.model_dump(exclude_none=True)
        options = episode._sampling | of_agent
        template = {"tools": body.get("tools")}
        for layer in (body, episode._sampling, of_agent):  # a later one wins
            template |= layer.get("chat_template_kwargs") or {}
        options.pop("chat_template_kwargs", None)
        request = body | options
        if effort := request.get("reasoning_effort"):  # as vLLM passes it to a template
            template = {"enable_thinking": effort != "none", **template, "reasoning_effort": effort}
        try:
            prompt_ids = _prompt_ids(episode._runner, body["messages"], turn, template)
        except ValueError as error:  # the prompt has an image
            raise ProviderError(str(error), status_code=400) from error
        # A seed of the program or the agent would make the rollouts of a group alike. If a program
        # asks for a stream, verifiers makes one from the whole reply. The only limit is max_tokens
        # below.
        for name in ("seed", "stream", "stream_options", "max_completion_tokens"):
            request.pop(name, None)
        if request.get("sampling_mask") and request.get("top_k") in (None, -1, 0):
            request["top_k"] = episode._sampling["top_k"]  # an agent has taken the limit away
        episode.warn_of_bias(turn.trace.agent.name, request)
        max_seq_len = episode._runner.options.max_seq_len
        if (room := max_seq_len - len(prompt_ids)) < 1:
            # verifiers leaves it to the harness to end the trace then; for ours, this does.
            if turn.trace.agent.config.harness.id == IN_PROCESS:
                turn.trace.stop("context_length")
            raise ProviderError(
                f"maximum {CONTEXT}: {len(prompt_ids)} tokens fill max_seq_len={max_seq_len}",
                status_code=400,
            )
        request["max_tokens"] = room = min(options.get("max_tokens") or room, room)
        if least := request.get("min_tokens"):
            request["min_tokens"] = min(least, room)
        client = episode._runner.client.of_rollout(episode._session)
        try:
            reply = await client.reply_to(request, prompt_ids, is_first=not turn.prefix_node_ids)
        except openai.OpenAIError as error:
            status = getattr(error, "status_code", 503)
            raise ProviderError(str(error), status_code=status) from error
        response = dialect.parse_response(dialect.validate_response(reply.completion))
        response.raw = reply.completion
        token_ids, logprobs = (values.tolist() for values in reply.sampled)
        response.tokens = vf.TurnTokens(
            prompt_ids=prompt_ids, completion_ids=token_ids, completion_logprobs=logprobs
        )
        said = Said(turn, response.message, Turn(prompt_ids, reply))
        episode._said[turn.trace.id].append(said)
        return response


def _prompt_ids(
    runner: V1Environment, messages: list[Any], turn: PendingTurn, template: dict[str, Any]
) -> list[int]:
    """Return the tokens so far and those of new messages; render all again if that fails."""
    before = turn.previous_renderer_token_ids()
    if before is not None:  # prompt and reply of the turn before
        last = turn.prefix_node_ids[-1]
        was_cut = any(c.node == last and c.finish_reason == "length" for c in turn.trace.calls)
        so_far, num_new = [*before[0], *before[1]], 0 if was_cut else len(turn.tail)
        extended = runner.renderer.extend(so_far, messages, num_new, **template)
        if extended is not None:
            return extended
    return runner.renderer.render(messages, **template)
