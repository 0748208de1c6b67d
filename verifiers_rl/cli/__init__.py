"""The commands `vf-rl`, `vf-train` and `vf-setup`; `vf-vllm` is in `inference/server.py`."""
