"""Several machines on this one: network namespaces with addresses of their own, behind a switch.
Nothing of them touches this machine's own network.
"""

import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import pytest


@dataclass
class Machine:
    """One of them. `words` before a command run the command there."""

    name: str
    address: str
    switch: str
    port: str

    @property
    def words(self):
        return ["ip", "netns", "exec", self.name]

    def pids(self):
        """Return the processes that run there."""
        return _pids_in(self.name)

    def set_link(self, state):
        """Cut its link to all others with "down"; neither side hears of that."""
        _ip("-n", self.switch, "link", "set", self.port, state)


def _ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr}")


def _pids_in(name):
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    return found.stdout.split()


def _end_all_in(name):
    """End what still runs there, and remove the namespace."""
    for pid in _pids_in(name):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(int(pid), 9)
    _ip("netns", "del", name)


@contextmanager
def machines(number):
    """Make so many machines; a test that cannot have them is skipped."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip (iproute2)")
    with ExitStack() as stack:
        switch = f"vf{os.getpid()}-switch"
        try:
            _ip("netns", "add", switch)
            stack.callback(_end_all_in, switch)
            _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        _ip("-n", switch, "link", "set", "br0", "up")
        found = []
        for n in range(number):
            one = Machine(f"vf{os.getpid()}-{n}", f"10.77.0.{n + 1}", switch, f"port{n}")
            _ip("netns", "add", one.name)
            stack.callback(_end_all_in, one.name)
            _ip("link", "add", "eth0", "netns", one.name, "type", "veth",
                "peer", "name", one.port, "netns", switch)  # fmt: skip
            _ip("-n", one.name, "addr", "add", f"{one.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", one.name, "link", "set", link, "up")
            _ip("-n", switch, "link", "set", one.port, "master", "br0", "up")
            found.append(one)
        yield found


# --- Stand-ins for what runs on them --------------------------------------------------------------

_SERVER = """
import http.server, os, sys
from verifiers_rl.process.ending import end_with_starter
end_with_starter()
host, port = sys.argv[1:3]
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
    def log_message(self, *args):
        pass
print("serving at", host, *sys.argv[3:], flush=True)
http.server.HTTPServer((host, int(port)), Answer).serve_forever()
"""
# Before `rl.main()`: servers that answer any request, and children that are looked at often.
STAND_INS = f"""
import sys
from verifiers_rl.cli import plan, supervise
from verifiers_rl.cluster import ray_engine
supervise.answers = lambda address: address is not None
supervise.POLL_S, supervise.BACKOFF_S = 0.1, 0.1
command = ["-c", {_SERVER!r}]
plan.ServerPlan.command = lambda self, host, port: [*command, host, str(port)]
"""
# The beginning of a stand-in for the trainer: it has reached all servers.
REACH_SERVERS = """
import json, os, sys, time, urllib.request
def reach(server):
    try:
        urllib.request.urlopen(f"http://{server}", timeout=20).close()
    except OSError:
        return False
    return True
servers = json.loads(os.environ["VERIFIERS_RL_SERVERS"]).values()
for server in servers:
    while not reach(server):
        time.sleep(0.1)
"""
