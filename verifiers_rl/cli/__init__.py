"""The commands `vf-rl` and `vf-train`; `vf-vllm` is in `inference/server.py`."""
