"""A run on several machines: the four variables, the meeting of the nodes, and machines that are
network namespaces.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import free_port
from tests.helpers import ROOT
from tests.machines import REACH_SERVERS, STAND_INS, machines
from verifiers_rl.cli import node_meeting, nodes, plan, rl
from verifiers_rl.cli.config import EnvTable, RunConfig, TomlError, load_run_config
from verifiers_rl.cli.node_meeting import (
    GuestMeeting,
    Hello,
    HostMeeting,
    NodeError,
    hello_of,
)
from verifiers_rl.cli.nodes import Node
from verifiers_rl.cli.servers import WORKERS_LOST
from verifiers_rl.inference.client import TOKEN_VARIABLE

FOUR = {"MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "29500", "WORLD_SIZE": "3", "RANK": "1"}


def make_config(**options):
    return RunConfig(Path("/somewhere/rl.toml"), "m", [EnvTable("e")], **options)


def read_toml(tmp_path, text):
    path = tmp_path / "rl.toml"
    path.write_text('model = "m"\n[env]\nid = "e"\n' + text)
    return load_run_config(path, checks_model=False)


# --- The four variables, and [cluster] ------------------------------------------------------------


def test_the_four_variables_are_read_and_not_handed_on():
    environment = {**FOUR, "OTHER": "1"}
    assert nodes.take_variables(environment) == (1, 3, "10.0.0.5", 29500)
    assert environment == {"OTHER": "1"}
    assert nodes.take_variables({"OTHER": "1"}) is None
    alone = {**FOUR, "WORLD_SIZE": "1", "RANK": "0"}
    assert nodes.take_variables(alone) is None and not alone


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": None}, "MASTER_ADDR, MASTER_PORT, WORLD_SIZE set, RANK not: .* set all four"),
        ({"RANK": "3"}, r"RANK='3' must be a whole number from 0 to 2 .*the first has RANK=0"),
        ({"RANK": "-1"}, "RANK='-1' must be a whole number from 0 to 2"),
        ({"RANK": "one"}, "RANK='one' must be a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' must be a whole number of at least 1"),
        ({"WORLD_SIZE": "2.5"}, "WORLD_SIZE='2.5' must be a whole number"),
        ({"MASTER_PORT": "65534"}, "MASTER_PORT='65534' must be a whole number from 1 to 65533"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "set, MASTER_ADDR, MASTER_PORT not"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is set, as by torchrun.* without a launcher"),
    ],
)
def test_variables_that_cannot_be_are_one_clear_error(changes, message):
    given = {name: value for name, value in {**FOUR, **changes}.items() if value is not None}
    with pytest.raises(TomlError, match=message):
        nodes.take_variables(given)


@pytest.mark.parametrize(
    ("table", "variables", "message"),
    [
        ("trainer_nodes = 2", None, r"trainer_nodes=2 is about several machines: set MASTER_ADDR"),
        ("trainer_nodes = 4", (0, 3), r"trainer_nodes=4 is more than the 3 machines"),
        ("trainer_nodes = 1\ninference_nodes = 1", (0, 3), "leave machines without work"),
        ('engine = "ray"', (0, 3), "engine='ray': Ray gives each process its place, and MASTER_"),
        ('engine = "slurm"', None, "engine='slurm' must be 'ray'"),
        ('address = "a:1"', None, "address='a:1' is of a Ray cluster; add engine"),
        ('engine = "ray"\naddress = 3', None, "address=3 must be 'auto', or the host:port"),
        ("trainer_nodes = 0", None, r"\[cluster\] trainer_nodes=0 must be an integer >= 1"),
        ("env_nodes = 1", None, r"env_nodes=1 is about several machines: set MASTER_ADDR"),
        ("env_nodes = 3", (0, 3), r"env_nodes=3 needs as many machines that do not train, of 3"),
        ("trainer_nodes = 3\nenv_nodes = 1", (0, 3), r"set trainer_nodes \(it is 3\) to at most 2"),
        ("env_nodes = 0", None, r"env_nodes=0 must be an integer >= 1"),
        (
            "env_nodes = 1\n[trainer.args]\nenv_workers = 0",
            (0, 3),
            r"env_workers=0 runs all .* so \[cluster\] env_nodes has no effect; remove one",
        ),
        ("nodes = 2", None, r"\[cluster\] has an unknown key 'nodes'"),
        ("[trainer.args]\nvllm_server_host = 'h'", (0, 3), "vllm_server_host is of one machine"),
        (
            "inference_nodes = 1\n[trainer.args]\nvllm_servers = ['h:1']",
            (0, 3),
            r"so \[cluster\] inference_nodes has no effect",
        ),
    ],
)
def test_a_cluster_that_contradicts_itself_is_one_clear_error(
    tmp_path, monkeypatch, table, variables, message
):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    with pytest.raises(TomlError, match=message):
        config = read_toml(tmp_path, f"[cluster]\n{table}\n")
        nodes.node_of(config, variables and (*variables, "10.0.0.5", 29500))


def test_several_machines_need_one_token(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(TomlError, match=f"{TOKEN_VARIABLE} is not set.* same value on each"):
        nodes.node_of(make_config(), (0, 2, "10.0.0.5", 29500))


@pytest.mark.parametrize(
    ("table", "train", "serve", "roll_out"),
    [
        ("", [0, 1, 2], [0, 1, 2], []),
        ("trainer_nodes = 1", [0], [0, 1, 2], []),
        ("inference_nodes = 1", [0, 1, 2], [2], []),
        ("trainer_nodes = 2\ninference_nodes = 2", [0, 1], [1, 2], []),
        ("[trainer.args]\nvllm_servers = ['h:1']", [0, 1, 2], [], []),
        ("env_nodes = 1", [0, 1], [0, 1, 2], [2]),
        ("trainer_nodes = 1\nenv_nodes = 1\ninference_nodes = 1", [0], [2], [1]),
        ("trainer_nodes = 1\nenv_nodes = 2\ninference_nodes = 1", [0], [2], [1, 2]),
    ],
)
def test_the_first_nodes_train_the_next_roll_out_and_the_last_ones_serve(
    tmp_path, monkeypatch, table, train, serve, roll_out
):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    config = read_toml(tmp_path, f"[cluster]\n{table}\n")
    found = [nodes.node_of(config, (rank, 3, "127.0.0.1", 29500)) for rank in range(3)]
    assert [node.rank for node in found if node.trains] == train
    assert [node.rank for node in found if node.serves] == serve
    assert [node.rank for node in found if node.does_roll_out(node.rank)] == roll_out


def test_a_node_starts_its_own_part_on_its_own_address(monkeypatch):
    from accelerate.commands.launch import launch_command_parser

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    options = SimpleNamespace(overwrite=False, resume=None)
    gpus, commands, servers = [], [], []
    config_of_two = make_config(trainer_gpus=2)
    for rank in range(3):
        node = Node(rank, 3, "127.0.0.1", 29500, num_trainers=2, num_servers=2)
        config = make_config(trainer_gpus=2, inference_gpus=1, inference_replicas=2)
        nodes.fit_to_node(config, node)
        gpus.append(plan.assign_gpus(config))
        commands.append(" ".join(plan.trainer_command(config, options, node)))
        servers.append(plan.servers_to_start(config))
    assert gpus == [("", "0,1"), ("0,1", "2,3"), ("0,1", "")]
    assert servers == [[], *[[("127.0.0.1", 8000), ("127.0.0.1", 8001)]] * 2]
    for rank in range(2):
        assert "--num_processes 4 --num_machines 2" in commands[rank]
        assert f"--machine_rank {rank} --main_process_ip 127.0.0.1" in commands[rank]
        assert "--main_process_port 29501" in commands[rank]
        words = plan.trainer_command(
            config_of_two, options, Node(rank, 3, "127.0.0.1", 29500, 2, 2)
        )
        read = launch_command_parser().parse_args(
            words[words.index("accelerate.commands.launch") + 1 :]
        )
        assert (read.num_machines, read.machine_rank, read.main_process_port) == (2, rank, 29501)
    on_cpus = make_config(trainer_gpus=0)
    command = " ".join(plan.trainer_command(on_cpus, options, node))
    assert "torch.distributed.run --nproc-per-node 1 --nnodes 2 --node-rank 2" in command
    assert "--master-addr 127.0.0.1 --master-port 29501" in command
    one = Node(0, 3, "127.0.0.1", 29500, num_trainers=1, num_servers=3)
    assert "torch.distributed" not in " ".join(plan.trainer_command(on_cpus, options, one))


def test_ranks_of_several_machines_use_the_interface_of_the_nodes(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    node = Node(0, 2, "127.0.0.1", 29500, num_trainers=2, num_servers=2)
    env = plan.trainer_env(make_config(trainer_gpus=0), "", node, ["10.0.0.5:8000"])
    assert env["GLOO_SOCKET_IFNAME"] == "lo" and env["ACCELERATE_USE_CPU"] == "true"
    assert env["VERIFIERS_RL_SERVERS"] == "10.0.0.5:8000"  # one, which others may join
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "120"
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")  # what is set stays
    env = plan.trainer_env(make_config(), "0", node, [])
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in env
    assert not {"GLOO_SOCKET_IFNAME", "ACCELERATE_USE_CPU", "VERIFIERS_RL_SERVERS"} & env.keys()


def test_the_trainer_and_rollout_workers_of_other_nodes_meet_two_ports_further():
    own, other = (Node(n, 3, "127.0.0.1", 29500, 1, 1, num_envs=1) for n in range(2))
    assert plan.trainer_env(make_config(), "", own, ["a:1"])["VERIFIERS_RL_WORKERS_AT"] == (
        "127.0.0.1:29502"
    )
    without = Node(0, 2, "127.0.0.1", 29500, 1, 1)
    assert "VERIFIERS_RL_WORKERS_AT" not in plan.trainer_env(make_config(), "", without, ["a:1"])
    words = plan.workers_command(make_config(), other)
    assert words[1:] == ["-m", "verifiers_rl.cli.env_workers", "127.0.0.1:29502", "@",
                         "/somewhere/rl.toml"]  # fmt: skip


def test_a_name_that_is_loopback_here_is_refused(monkeypatch):
    found = [(2, 2, 17, "", ("127.0.1.1", 29500))]
    monkeypatch.setattr(nodes.socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(TomlError, match=r"MASTER_ADDR='me' is 127.0.1.1 on this machine"):
        nodes.own_address(Node(0, 2, "me", 29500, num_trainers=2, num_servers=2))


# --- The meeting ----------------------------------------------------------------------------------


class Meeting:
    """Node 0 of three, of which two train, and makers of the others. All on loopback."""

    def __init__(self):
        self.port = free_port()
        self.host = HostMeeting(self.node(0), self.hello("a:0"), "token", "vf-rl --resume", 0.2)
        self.guests = []
        self.results = queue.Queue()

    def node(self, rank):
        return Node(rank, 3, "127.0.0.1", self.port, num_trainers=2, num_servers=3)

    def hello(self, *servers, model="m"):
        return Hello(list(servers), {"model": model})

    def come(self, rank, *servers, token="token", model="m"):
        guest = GuestMeeting(self.node(rank), self.hello(*servers, model=model), token)
        self.guests.append(guest)

        def begin():
            try:
                guest.begin(20.0)
                self.results.put(None)
            except NodeError as error:
                self.results.put(str(error))

        threading.Thread(target=begin, daemon=True).start()
        return guest

    def all_come(self):
        guests = [self.come(1, "b:1"), self.come(2, "c:2")]
        self.host.begin(20.0)
        assert self.results.get(timeout=20) is None and self.results.get(timeout=20) is None
        return guests

    def look_until(self, done):
        deadline = time.monotonic() + 20
        while not done():
            assert time.monotonic() < deadline
            self.host.look(0.1)

    def leave(self, guest):
        guest._connection.shutdown(2)

    def close(self):
        self.host.end(1, 1.0)
        for connection in self.host._connections.values():
            connection.close()
        for guest in self.guests:
            if guest._connection is not None:
                guest._connection.close()


@pytest.fixture
def meeting():
    made = Meeting()
    yield made
    made.close()


def test_all_nodes_learn_where_the_servers_are_and_how_the_run_has_ended(meeting):
    guests = meeting.all_come()
    assert meeting.host.servers == ["a:0", "b:1", "c:2"]
    assert all(guest.servers == meeting.host.servers for guest in guests)
    assert all(guest.look() is None and guest.join is None for guest in guests)
    meeting.host.end(3, 7.0)
    for guest in guests:
        end = guest.look(10.0)
        assert (end.status, end.grace_s) == (3, 7.0)


def test_a_node_with_another_token_is_refused(meeting):
    meeting.come(1, token="other")
    assert "set VERIFIERS_RL_TOKEN to the same value on all nodes" in meeting.results.get(
        timeout=20
    )
    with pytest.raises(NodeError, match=r"node 1, 2 of 3 did not come to .* within 0 s"):
        meeting.host.begin(0.0)


def test_an_environment_that_differs_between_nodes_is_found(tmp_path):
    def same(text):
        path = tmp_path / "rl.toml"
        path.write_text(f'model = "m"\n[[env]]\nid = "e"\n{text}')
        return hello_of(
            load_run_config(path, checks_model=False), Node(0, 2, "h", 1, 1, 1), []
        ).same

    plain, weighted = same(""), same("weight = 2.0")
    assert [name for name in plain if plain[name] != weighted[name]] == ["[[env]] 0 (e)"]
    two = same('[[env]]\nid = "f"')
    assert [name for name in plain if plain[name] != two[name]] == ["number of [[env]]"]


def test_a_node_with_another_configuration_or_rank_is_refused(meeting):
    meeting.come(1, model="other")
    with pytest.raises(NodeError, match="node 1 has model='other', node 0 has model='m'; start"):
        meeting.host.begin(20.0)
    assert "start the same configuration on all nodes" in meeting.results.get(timeout=20)
    meeting.come(1)
    meeting.look_until(lambda: 1 in meeting.host._connections)
    meeting.come(1)
    with pytest.raises(NodeError, match="there is a node with RANK=1 already"):
        meeting.host.begin(20.0)


def test_a_node_that_cannot_go_on_says_why(meeting):
    guest, _ = meeting.all_come()
    guest.tell({"error": "no GPU"})
    with pytest.raises(NodeError, match="node 1: no GPU"):
        meeting.look_until(lambda: False)


def test_a_failed_trainer_elsewhere_ends_ours_after_some_patience(meeting):
    guest, _ = meeting.all_come()
    guest.tell({"ended": 3})
    with pytest.raises(NodeError, match=r"trainer ended on another node: \{1: 3\}"):
        meeting.look_until(lambda: False)
    assert meeting.host.status(0) == 3 and meeting.host.status(5) == 5


def test_a_lost_node_with_ranks_ends_the_run_with_the_command_to_go_on(meeting):
    guest, _ = meeting.all_come()
    meeting.leave(guest)
    with pytest.raises(NodeError, match=r"node 1 is lost.* on all nodes: vf-rl --resume") as lost:
        meeting.look_until(lambda: False)
    assert lost.value.is_lost
    meeting.come(1)
    meeting.look_until(lambda: not meeting.results.empty())
    assert "node 1 has ranks of the trainer, which cannot join" in meeting.results.get()


def test_a_lost_node_with_servers_alone_may_come_again(meeting, monkeypatch, capsys):
    _, guest = meeting.all_come()
    meeting.leave(guest)
    meeting.look_until(lambda: 2 not in meeting.host._connections)
    assert "node 2 is lost; the run goes on with the other servers. Start" in (
        capsys.readouterr().out
    )
    again = meeting.come(2, "c:2")
    meeting.look_until(lambda: not meeting.results.empty())
    assert meeting.results.get() is None and again.join is None  # the trainer knows the address
    assert again.is_late and not guest.is_late

    class Answers:
        """Of the servers, the one of node 1 answers."""

        def __init__(self, host, port):
            self.base_url = f"http://{host}:{port}"

        def status(self):
            if self.base_url != "http://b:1":
                raise node_meeting.InferenceServerError("none")

        def close(self):
            pass

    monkeypatch.setattr(node_meeting, "InferenceClient", Answers)
    moved = meeting.come(2, "d:3")
    meeting.look_until(lambda: not meeting.results.empty())
    assert meeting.results.get() is None and moved.join == "http://b:1"


def test_the_end_of_node_0_is_heard(meeting):
    guest, _ = meeting.all_come()
    for connection in meeting.host._connections.values():
        connection.shutdown(2)
    with pytest.raises(NodeError, match="node 0 is lost, and the run with it"):
        guest.look(20.0)


@pytest.fixture
def supervise(monkeypatch):
    """Runs the part of a node with servers alone, with a server that does not start."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}

    def supervise(num_servers=1, num_envs=0, **of_meeting):
        node = Node(1, 2, "127.0.0.1", free_port(), 1, num_servers, num_envs)
        guest, told = GuestMeeting(node, Hello(), "token"), []
        guest.__dict__.update(begin=lambda s: None, tell=told.append, **of_meeting)
        command = [sys.executable, "-c", "import sys; print('words', *sys.argv[1:])"]
        monkeypatch.setattr(rl, "make_meeting", lambda *_: guest)
        monkeypatch.setattr(rl, "server_command", lambda *_: list(command))
        port = {"vllm_server_port": free_port()}
        config = make_config(inference_gpus=0, trainer_gpus=0, trainer_args=port)
        config.inference_replicas = num_servers
        options = SimpleNamespace(server_log=None)
        return rl.supervise(config, ("", ""), options, node), told

    yield supervise
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_server_that_does_not_start_ends_a_new_run_but_not_one_that_has_begun(supervise, capfd):
    status, told = supervise()
    assert status == 1 and "ended with status 0 before it was ready" in told[0]["error"]
    assert supervise(is_late=True) == (1, [])
    capfd.readouterr()
    supervise(is_late=True, join="http://10.0.0.5:8000")
    assert "[inference] words --join http://10.0.0.5:8000" in capfd.readouterr().out


def test_rollout_workers_that_have_run_and_only_die_now_end_their_node_alone(
    supervise, monkeypatch, capfd
):
    command = [sys.executable, "-c", f"raise SystemExit({WORKERS_LOST})"]
    monkeypatch.setattr(rl, "workers_command", lambda *_: command)
    assert supervise(num_envs=1, num_servers=0, servers=["a:1"]) == (1, [])
    assert (
        f"rollout workers of this node ended with status {WORKERS_LOST}" in capfd.readouterr().err
    )


def test_rollout_workers_that_a_signal_ends_start_again_and_others_end_the_node(
    supervise, monkeypatch, tmp_path, capfd
):
    """They print where the servers are; the first is killed, the second fails."""
    script = (
        "import os, sys\nfrom pathlib import Path\n"
        "print('at', os.environ['VERIFIERS_RL_SERVERS'])\n"
        f"was = Path('{tmp_path}/was')\nif not was.exists(): was.touch(); os.kill(0, 9)\n"
        "sys.exit(1)"
    )
    monkeypatch.setattr(rl, "workers_command", lambda *_: [sys.executable, "-c", script])
    status, told = supervise(num_envs=1, num_servers=0, servers=["a:1", "b:2"])
    assert status == 1
    assert "rollout workers of this node ended with status 1; see their output" in told[0]["error"]
    said = capfd.readouterr().out
    assert "[env] at a:1 b:2" in said
    assert "a signal (9) ended the rollout workers; starting them again" in said
    assert supervise(num_envs=1, num_servers=0, is_late=True) == (1, [])


def test_a_foreign_address_is_one_clear_error():
    node = Node(0, 2, "192.0.2.1", free_port(), num_trainers=2, num_servers=2)
    with pytest.raises(NodeError, match=r"cannot listen on 192.0.2.1:.* machine with RANK=0"):
        HostMeeting(node, Hello(), "token", "", 1.0)


# --- Machines -------------------------------------------------------------------------------------

# vf-rl with stand-ins for the server and the trainer. The trainer's ranks are
# connected by torch, meet, reach all servers, and then meet again and again until a file exists.
NODE = f"""
{STAND_INS}
from pathlib import Path
from types import SimpleNamespace
make = rl.trainer_command

def trainer_command(config, options, node=None):
    command = make(config, options, node)
    at = command.index("verifiers_rl.cli.train")
    return [*command[: at - 1], sys.argv[1], sys.argv[2]]

rl.trainer_command = trainer_command
sys.argv[1:], words = sys.argv[1:3], sys.argv[3:]
options = SimpleNamespace(server_log=None, overwrite=False, resume=None)
config = rl.RunConfig(Path("/a/rl.toml"), "m", [], inference_gpus=0, trainer_gpus=0)
config.cluster.trainer_nodes = config.cluster.inference_nodes = 2
node = rl.node_of(config, rl.take_variables())
rl.fit_to_node(config, node)
sys.exit(rl.supervise(config, ("", ""), options, node))
"""
TRAINER = f"""
from datetime import timedelta
import torch
from torch import distributed

distributed.init_process_group("gloo", timeout=timedelta(seconds=300))
ranks = torch.tensor(distributed.get_rank() + 1)
distributed.all_reduce(ranks)
{REACH_SERVERS}
print("ranks", int(ranks), "servers", *servers, flush=True)
has_ended = torch.tensor(0)
while not has_ended:
    time.sleep(0.05)
    has_ended = torch.tensor(int(os.path.exists(sys.argv[1])))
    distributed.all_reduce(has_ended)
"""


class Run:
    """vf-rl on three machines: ranks on the first two, servers on the last two."""

    def __init__(self, found, folder):
        self.found, self.folder, self.processes = found, folder, {}
        (folder / "train.py").write_text(TRAINER)
        for rank in range(3):
            self.start(rank)

    def start(self, rank):
        self.log = self.folder / "log"
        environment = {**os.environ, TOKEN_VARIABLE: "secret", "OMP_NUM_THREADS": "1"}
        environment |= {"MASTER_ADDR": self.found[0].address, "MASTER_PORT": "29500"}
        environment |= {"WORLD_SIZE": "3", "RANK": str(rank)}
        environment.pop("GLOO_SOCKET_IFNAME", None)
        words = [
            sys.executable,
            "-c",
            NODE,
            str(self.folder / "train.py"),
            str(self.folder / "end"),
        ]
        with (self.folder / f"log{rank}").open("ab") as log:
            self.processes[rank] = subprocess.Popen(
                [*self.found[rank].words, *words], cwd=ROOT, env=environment, stdout=log, stderr=log
            )

    def said(self, rank):
        return (self.folder / f"log{rank}").read_text()

    def wait_for(self, rank, text):
        deadline = time.monotonic() + 90
        while text not in self.said(rank):
            assert time.monotonic() < deadline, (rank, self.said(rank))
            time.sleep(0.1)

    def statuses(self):
        return [self.processes[rank].wait(60) for rank in range(3)]

    def end(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.mark.slow
def test_a_run_outlives_a_machine_with_servers_alone_and_ends_without_one_with_ranks(tmp_path):
    with machines(3) as found:
        run = Run(found, tmp_path)
        try:
            for rank in (0, 1):
                run.wait_for(rank, "[trainer] ranks 3 servers 10.77.0.2:8000 10.77.0.3:8000")
            assert "[inference]" not in run.said(0) and "[trainer]" not in run.said(2)
            assert "[inference] serving at 10.77.0.2" in run.said(1)
            found[2].set_link("down")
            run.wait_for(0, "node 2 is lost; the run goes on with the other servers")
            assert run.processes[2].wait(60) == 1
            assert "node 0 is lost, and the run with it" in run.said(2)
            found[2].set_link("up")
            run.start(2)
            run.wait_for(0, "node 2 is here again")
            found[1].set_link("down")
            assert run.statuses() == [1, 1, 1]
            assert "node 1 is lost, with ranks of the trainer. Go on from" in run.said(0)
            assert "on all nodes: vf-rl @ /a/rl.toml --resume" in run.said(0)
            assert "node 0 is lost, and the run with it" in run.said(1)
        finally:
            run.end()
