"""A run on a Ray cluster: of no machines, and of machines that are network namespaces."""

import builtins
import os
import queue
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers import ROOT, make_tiny_model, write_environment
from tests.machines import REACH_SERVERS, STAND_INS, machines
from verifiers_rl.cli import ray_engine, resolved, rl
from verifiers_rl.cli.config import TomlError, load_run_config
from verifiers_rl.inference.client import TOKEN_VARIABLE

HAS_RAY = shutil.which("ray", path=str(Path(sys.executable).parent)) is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="needs the ray extra")


def read_toml(tmp_path, text="", env='[env]\nid = "e"\n'):
    make_tiny_model().save_pretrained(tmp_path / "model")
    path = tmp_path / "config.toml"
    path.write_text(f'model = "./model"\n{env}[cluster]\nengine = "ray"\n{text}')
    return path


def test_without_ray_the_error_names_the_extra(tmp_path, monkeypatch, capsys):
    find = builtins.__import__

    def without_ray(name, *args, **kwargs):
        if name == "ray":
            raise ImportError(name)
        return find(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    monkeypatch.setattr(sys, "argv", ["vf-rl", "@", str(read_toml(tmp_path))])
    with pytest.raises(SystemExit):
        rl.main()
    said = capsys.readouterr().err
    assert "[cluster] engine='ray' needs Ray, which is not installed" in said
    assert "pip install 'verifiers-rl[ray]'" in said


def test_what_travels_is_a_toml_and_the_modules_beside_it(tmp_path, capsys):
    source = tmp_path / "source"
    (source / "outputs").mkdir(parents=True)
    (source / "package").mkdir()
    for name in ("mine.py", "package/data.json", "outputs/big", ".hidden", "keys", "b.env"):
        (source / name).write_text("KEY=x")
    path = read_toml(source, "trainer_nodes = 2\n[trainer.args]\nmax_steps = 7\n")
    path.write_text(f'env_file = "keys"\n{path.read_text()}hub_token = "hf_0123456789abcdef0"\n')
    config = load_run_config([path], [("trainer.args.batch_size", "24")])
    target = tmp_path / "target"
    target.mkdir()
    resolved.write_code(config, "runs/a", target)
    sent = {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()}
    modules = {"code0/mine.py", "code0/package/data.json"}
    assert sent >= {"config.toml", *modules}
    assert not [name for name in sent if "hf_0123" in (target / name).read_text()]
    left = ("outputs", "hidden", "safetensors", "keys", ".env")
    assert not [name for name in sent for one in left if one in name]
    assert "not sent to the machines of the cluster: Left out" in capsys.readouterr().out
    data = tomllib.loads((target / "config.toml").read_text())
    assert data["import_from"] == ["./code0"] and "cluster" not in data
    assert data["model"] == str(source / "model")
    wanted = {"max_steps": 7, "batch_size": 24, "output_dir": str(Path("runs/a").absolute())}
    assert wanted.items() <= data["trainer"]["args"].items()


def test_a_folder_too_large_to_travel_is_one_clear_error(tmp_path, monkeypatch):
    config = load_run_config(read_toml(tmp_path))
    monkeypatch.setattr(resolved, "MAX_CODE_MB", 1e-6)
    with pytest.raises(TomlError, match=r"this folder travels to the machines .* folder of their"):
        resolved.write_code(config, "runs/a", tmp_path / "target")


@pytest.mark.parametrize(
    ("text", "trainers", "servers", "words"),
    [
        ("", 1, 1, []),
        ("trainer_nodes = 3\ninference_nodes = 2\n", 3, 2, []),
        ("inference_nodes = 2\n[inference]\nreplicas = 3\n", 1, 6, ["--inference.replicas=1"]),
        ('[trainer.args]\nvllm_servers = ["h:1"]\n', 1, 0, []),
    ],
)
def test_each_replica_gets_a_place_of_its_own(tmp_path, text, trainers, servers, words):
    config = load_run_config(read_toml(tmp_path, text))
    run = ray_engine.RayRun(None, config, [], "vf-rl")
    assert (run.num_trainers, run.num_servers, run.size) == (trainers, servers, trainers + servers)
    assert ray_engine.replica_words(config) == words


def test_servers_that_run_already_need_their_token(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    config = load_run_config(read_toml(tmp_path, '[trainer.args]\nvllm_servers = ["h:1"]\n'))
    with pytest.raises(TomlError, match=r"\[trainer.args\] has vllm_servers, .*set it to their t"):
        ray_engine.RayRun(None, config, [], "vf-rl")


class StubRay:
    """Ray as far as a run uses it. Actors are played: each reads what `script` gives it, a queue of
    lists of lines and exit statuses for its rank.
    """

    class exceptions:
        class RayError(Exception):
            pass

        class GetTimeoutError(RayError):
            pass

    def __init__(self, script):
        self.script, self.signals, self.killed, self.started = script, [], [], []
        self.groups = []
        self.silent = set()  # nodes whose processes do not start
        self.util = SimpleNamespace(
            placement_group=self.group,
            remove_placement_group=lambda group: None,
            placement_group_table=lambda group: {"bundles_to_node_id": {0: f"n-{group.strategy}"}},
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *a: a),
        )

    def group(self, bundles, strategy):
        self.groups.append(SimpleNamespace(bundles=bundles, strategy=strategy, wait=lambda s: True))
        return self.groups[-1]

    def remote(self, kind):
        return SimpleNamespace(options=lambda **options: self.actor(options))

    def actor(self, options):
        group, index = options["scheduling_strategy"]
        rank = index + sum(len(one.bundles) for one in self.groups[: self.groups.index(group)])

        def read():
            said = self.script[rank].get(timeout=20)
            if said == "lost":
                raise self.exceptions.RayError
            return said

        def find_place(num_ports):
            if rank in self.silent:
                raise self.exceptions.GetTimeoutError
            return f"10.0.0.{len(self.started)}", 7000

        def start(words, variables):
            self.started.append((rank, options["num_gpus"], words, variables))

        methods = {
            "find_place": find_place,
            "start": start,
            "read": read,
            "signal": lambda number: self.signals.append((rank, number)),
        }
        actor = SimpleNamespace(
            rank=rank,
            **{k: SimpleNamespace(remote=partial(partial, v)) for k, v in methods.items()},
        )
        actor.signal.remote = methods["signal"]
        return SimpleNamespace(remote=lambda: actor)

    def get(self, call, timeout=None):
        return call()

    def nodes(self):
        return [{"NodeID": "n-SPREAD", "NodeManagerAddress": "10.0.0.9"}]

    def kill(self, actor):
        self.killed.append(actor.rank)


def make_stub_run(tmp_path, text="", size=2):
    script = {rank: queue.Queue() for rank in range(size)}
    text += "[inference]\ngpus = 4\n[trainer]\ngpus = 2\n"
    config = load_run_config(read_toml(tmp_path, text))
    ray = StubRay(script)
    run = ray_engine.RayRun(ray, config, ["@", "config.toml"], "vf-rl @ mine.toml")
    run.place(1.0)
    return SimpleNamespace(ray=ray, run=run, script=script)


@pytest.fixture
def stub_run(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)  # so the run draws one
    return make_stub_run(tmp_path)


def test_nodes_get_their_gpus_and_variables_and_their_output_comes_here(stub_run, capfd):
    stub_run.script[0].put((["hello"], None))
    stub_run.script[0].put((["bye"], 3))
    stub_run.script[1].put(([], 3))
    assert stub_run.run.run() == 3
    (rank, gpus, words, variables), (_, server_gpus, server_words, server) = stub_run.ray.started
    assert (rank, gpus, server_gpus) == (0, 2, 4)
    groups = stub_run.run._groups
    assert [(g.strategy, g.bundles) for g in groups] == [
        ("PACK", [{"CPU": 1, "GPU": 2}]),
        ("SPREAD", [{"CPU": 1, "GPU": 4}]),
    ]
    assert "--trainer.args.vllm_server_port=7000" in server_words and "--trainer" not in words
    for found, own in ((variables, "0"), (server, "1")):
        assert found["MASTER_ADDR"] == "10.0.0.0" and found["MASTER_PORT"] == "7000"
        assert (found["WORLD_SIZE"], found["RANK"]) == ("2", own)
    assert variables[TOKEN_VARIABLE] == server[TOKEN_VARIABLE] and len(server[TOKEN_VARIABLE]) > 30
    said = capfd.readouterr().out
    assert "[node 0] hello" in said and "[node 0] bye" in said


@pytest.mark.parametrize(("workers", "cpus"), [("", 1), ("[trainer.args]\nenv_workers = 6\n", 6)])
def test_rollout_workers_get_places_of_their_own_with_a_cpu_each(tmp_path, workers, cpus):
    stub = make_stub_run(tmp_path, f"env_nodes = 2\n{workers}", 4)
    for rank in range(4):
        stub.script[rank].put(([], 0))
    assert stub.run.run() == 0
    assert [(g.strategy, g.bundles) for g in stub.run._groups] == [
        ("PACK", [{"CPU": 1, "GPU": 2}]),
        ("SPREAD", [{"CPU": cpus}] * 2),
        ("SPREAD", [{"CPU": 1, "GPU": 4}]),
    ]
    assert [(rank, gpus) for rank, gpus, *_ in stub.ray.started] == [(0, 2), (1, 0), (2, 0), (3, 4)]
    for rank, _, words, variables in stub.ray.started:
        assert variables["WORLD_SIZE"] == "4" and variables["RANK"] == str(rank)
        assert "--cluster.env_nodes=2" in words
        assert ("--trainer.args.vllm_server_port=7000" in words) == (rank == 3)


def test_a_node_that_does_not_start_in_time_is_one_error_that_names_its_machine(stub_run):
    stub_run.script[0].put(([], 0))
    stub_run.ray.silent.add(1)
    with pytest.raises(TomlError, match=r"node 1 of 2 has a place on 10.0.0.9, but Ray started no"):
        stub_run.run.run()


def test_a_node_that_does_not_start_again_in_time_is_given_up(stub_run, capfd):
    stub_run.script[1].put("lost")
    stub_run.run.start_node(1)
    stub_run.ray.silent.add(1)
    assert stub_run.run._events.get(timeout=20) == (1, None)
    for _ in range(ray_engine.MAX_RESTARTS):
        assert stub_run.run._restart(1)
        assert stub_run.run._events.get(timeout=20) == (1, None)
    assert not stub_run.run._restart(1)
    said = capfd.readouterr().err
    assert said.count("vf-rl: node 1: node 1 of 2 has a place on 10.0.0.9") == (
        ray_engine.MAX_RESTARTS
    )


def test_a_replica_is_placed_again_a_few_times_only(stub_run, capfd):
    for _ in range(ray_engine.MAX_RESTARTS + 1):
        stub_run.script[1].put("lost")

    def end_when_given_up():
        while stub_run.run._restarts[1] <= ray_engine.MAX_RESTARTS:
            time.sleep(0.01)
        stub_run.script[0].put(([], 0))

    threading.Thread(target=end_when_given_up, daemon=True).start()
    assert stub_run.run.run() == 0
    ranks = [started[0] for started in stub_run.ray.started]
    assert ranks.count(1) == ray_engine.MAX_RESTARTS + 1 and ranks.count(0) == 1
    said = capfd.readouterr()
    assert said.out.count("node 1 is lost; Ray places it again") == ray_engine.MAX_RESTARTS
    assert "node 1 is lost again, and is not placed again" in said.err


def test_a_lost_machine_with_ranks_ends_the_run_with_the_command_to_resume(stub_run, capfd):
    stub_run.script[0].put("lost")
    stub_run.script[1].put(([], 1))
    assert stub_run.run.run() == 1
    assert "is lost. Go on from the last checkpoint: vf-rl @ mine.toml --resume" in (
        capfd.readouterr().err
    )


def test_a_signal_while_ray_seeks_a_place_starts_nothing(stub_run, monkeypatch):
    find = stub_run.ray.get

    def interrupted(call, timeout=None):
        if stub_run.run._stopped is None:
            stub_run.run.on_signal(signal.SIGTERM, None)
        return find(call)

    monkeypatch.setattr(stub_run.ray, "get", interrupted)
    assert stub_run.run.run() == 143
    assert not stub_run.ray.started


def test_a_signal_ends_node_0_in_good_order_and_a_second_one_all_at_once(stub_run):
    def signal_twice():
        while len(stub_run.ray.started) < 2:
            time.sleep(0.01)
        stub_run.run.on_signal(signal.SIGINT, None)
        assert stub_run.ray.signals == [(0, signal.SIGTERM)] and not stub_run.ray.killed
        stub_run.run.on_signal(signal.SIGINT, None)
        stub_run.script[0].put(([], 143))
        stub_run.script[1].put(([], 143))

    signalling = threading.Thread(target=signal_twice, daemon=True)
    signalling.start()
    assert stub_run.run.run() == 130
    signalling.join()
    assert sorted(stub_run.ray.killed) == [0, 1]


# --- Machines -------------------------------------------------------------------------------------

# vf-rl in an actor, with stand-ins for the server, for the trainer, which reaches all servers and
# then waits for a file, and for the rollout workers.
TRAINER = f"""
import socket
{REACH_SERVERS}
print("trains with", len(servers), "servers", flush=True)
host, port = os.environ["VERIFIERS_RL_WORKERS_AT"].split(":")
came, (address, _) = socket.create_server((host, int(port))).accept()
print("rollout workers come from", address, flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""
WORKERS = """
import socket, sys, time
while True:
    try:
        socket.create_connection(sys.argv[1].split(":"), 60).recv(1)
    except OSError:
        time.sleep(0.1)
"""
NODE = f"""
{STAND_INS}
rl.trainer_command = lambda *_: [sys.executable, "-c", {TRAINER!r}, "FOLDER/end"]
make = rl.workers_command
rl.workers_command = lambda *given: [sys.executable, "-c", {WORKERS!r}, *make(*given)[3:]]
rl.main()
"""
DRIVER = """
import sys
from verifiers_rl.cli import ray_engine, rl

ray_engine.PROGRAM = ("code0/node.py",)
sys.argv[0] = "vf-rl"
rl.main()
"""
# So that Ray takes a machine for lost after seconds, not half a minute.
FAST = {"initial_delay_ms": 0, "period_ms": 500, "timeout_ms": 1000, "failure_threshold": 4}


@contextmanager
def ray_cluster(found):
    """Ray on these machines; the first is the head, and gets no process of a run."""
    folder = tempfile.mkdtemp(prefix="vfray", dir="/tmp")  # a longer name is too long for sockets
    environment = {f"RAY_health_check_{key}": str(value) for key, value in FAST.items()}
    environment |= {"RAY_DISABLE_IMPORT_WARNING": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_TMPDIR": folder, "PYTHONWARNINGS": "ignore"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment = {**os.environ, **environment}
    program = [str(Path(sys.executable).parent / "ray"), "start"]
    program += ["--object-store-memory", "80000000", "--num-gpus", "0", "--disable-usage-stats"]

    # Machines have files of Ray's of their own, but the driver must find those of the head.
    apart = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', folder]

    def start(machine, *words):
        own = apart if machine is not found[0] else []
        command = [*machine.words, *own, *program, "--node-ip-address", machine.address, *words]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    head = ["--head", "--port", "6379", "--num-cpus", "0", "--include-dashboard", "false"]
    try:
        starting = [start(found[0], *head, "--temp-dir", folder)]
        assert starting[0].wait(60) == 0, starting[0].stdout.read()
        address = f"{found[0].address}:6379"
        starting += [start(one, "--address", address, "--num-cpus", "4") for one in found[1:]]
        for process in starting[1:]:
            assert process.wait(60) == 0, process.stdout.read()
        yield environment
    finally:
        for process in starting:
            process.kill()  # what it has started ends with its machine
            process.wait()
            process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


@needs_ray
@pytest.mark.slow
def test_ray_places_a_run_and_places_a_replica_again_whose_machine_is_lost(tmp_path):
    (tmp_path / "code").mkdir()
    env = write_environment(tmp_path / "code", "tiny_env", {"a": "b"})
    text = "inference_nodes = 2\nenv_nodes = 1\n"
    text += "[inference]\ngpus = 0\n[trainer]\ngpus = 0\n[trainer.args]\n"
    path = read_toml(tmp_path / "code", f'{text}output_dir = "{tmp_path}/run"\n', env)
    (tmp_path / "code" / "node.py").write_text(NODE.replace("FOLDER", str(tmp_path)))
    with machines(3) as found, ray_cluster(found) as environment:
        log = tmp_path / "log"
        command = [*found[0].words, sys.executable, "-c", DRIVER, "@", str(path)]
        command += ["--cluster.address", f"{found[0].address}:6379"]
        with log.open("wb") as output:
            run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)

        def wait_for(pattern):
            deadline = time.monotonic() + 120
            while not (hit := re.search(pattern, log.read_text())):
                assert time.monotonic() < deadline and run.poll() is None, log.read_text()
                time.sleep(0.1)
            return hit

        try:
            wait_for(r"\[node 0\] \[trainer\] trains with 2 servers")
            places = dict(re.findall(r"node (\d) of 4 is on ([\d.]+)", log.read_text()))
            assert places["2"] != places["3"] and found[0].address not in places.values()
            wait_for(rf"\[node 0\] \[trainer\] rollout workers come from {places['1']}")
            lost = next(rank for rank in "23" if places[rank] != places["0"])
            machine = next(one for one in found if one.address == places[lost])
            machine.set_link("down")
            wait_for(rf"node {lost} is lost; Ray places it again")
            again = wait_for(rf"node {lost} is lost; Ray(?s:.*)node {lost} of 4 is on ([\d.]+)")
            assert again.group(1) != machine.address
            other = places["3" if lost == "2" else "2"]
            joined = (
                rf"\[node {lost}\] \[inference\] serving at {again.group(1)} --join http://{other}"
            )
            wait_for(joined)
            if places["1"] == machine.address:
                wait_for(r"\[node 0\] vf-rl: node 1 is here again")
            (tmp_path / "end").touch()
            assert run.wait(60) == 0, log.read_text()
        finally:
            if run.poll() is None:
                run.kill()
                run.wait()
