# An image for a host with NVIDIA GPUs; docs/scaling.md, "Docker", says how to build and run it.
# nvcc, gcc and Python's headers are there because vLLM and torch compile kernels when they run.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends git python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH HF_HOME=/cache/huggingface
RUN python3 -m venv /opt/venv && /opt/venv/bin/pip install --no-cache-dir 'uv>=0.9.8,<1'
WORKDIR /src
COPY pyproject.toml README.md LICENSE .gitignore ./
COPY verifiers_rl verifiers_rl
COPY examples examples
RUN uv pip install --no-cache --compile-bytecode '.[vllm,ray]'
WORKDIR /work
CMD ["vf-rl", "--help"]
