"""A server that takes part in a run which has begun: `vf-vllm --join URL`."""

from __future__ import annotations

import logging
import threading
import time
from urllib.parse import urlsplit

from verifiers_rl.inference.client import LOOPBACK, InferenceClient, InferenceServerError

logger = logging.getLogger("verifiers_rl.vf-vllm")

AGAIN_S = 20.0  # also after a success, because the other server may start anew
LOOK_S = 1.0  # between two looks whether we are ready ourselves


def join_error(url: str, host: str) -> str | None:
    """Return why a server that listens on this host cannot join the run of that URL, or None."""
    try:
        parts = urlsplit(url)
        is_fine = parts.scheme == "http" and parts.hostname and parts.port
    except ValueError:  # the port
        is_fine = False
    if not is_fine:
        return f"--join {url}: must be of the form http://host:port, the address of a vf-vllm"
    if parts.hostname not in LOOPBACK and host in LOOPBACK:
        return (
            f"--join {url}: that trainer may be on another machine, which cannot reach {host}; "
            "set --host to the address at which it reaches this server"
        )
    if host in ("0.0.0.0", "::"):
        return (
            f"--join {url}: --host {host} stands for all addresses of this machine, and is none at "
            "which the trainer could reach it; set --host to one of them"
        )
    return None


def announce(url: str, host: str, port: int) -> None:
    """As soon as this server is ready, tell the server at `url` where it is, and again from time to
    time. In the background.
    """
    parts = urlsplit(url)
    there = InferenceClient(parts.hostname or "", parts.port or 0)
    here = InferenceClient(host, port)

    def run() -> None:
        is_told = False
        while True:
            try:
                here.status()
            except InferenceServerError:
                time.sleep(LOOK_S)
                continue
            try:
                there.join(host, port)
                if not is_told:
                    print(f"vf-vllm: joined the run at {url}", flush=True)
                is_told = True
            except InferenceServerError as error:
                logger.warning("--join: %s; trying again in %g s", error, AGAIN_S)
            time.sleep(AGAIN_S)

    threading.Thread(target=run, name="join", daemon=True).start()
