"""A harness that asks for a stream, and for more tokens than there is room for."""

import aiohttp
import verifiers.v1 as vf

__all__ = ["StreamingHarness"]


class StreamingConfig(vf.HarnessConfig):
    pass


class StreamingHarness(vf.Harness[StreamingConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        body |= {"stream": True, "max_completion_tokens": 10_000}
        headers = {"Authorization": f"Bearer {secret}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{endpoint}/chat/completions", json=body) as reply,
        ):
            text = await reply.text()
        assert reply.status == 200 and text.startswith("data: "), text
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
