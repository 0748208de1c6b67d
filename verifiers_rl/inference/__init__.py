"""The inference server `vf-vllm` and the client of its control routes.

Nothing else imports vLLM.
"""
