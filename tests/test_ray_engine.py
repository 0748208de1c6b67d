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
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers import ROOT, make_tiny_model, write_environment
from tests.machines import REACH_SERVERS, STAND_INS, machines
from verifiers_rl.cli import children, ray_engine, resolved, rl, supervise
from verifiers_rl.cli.config import TomlError, load_run_config
from verifiers_rl.cli.plan import SERVERS_VARIABLE
from verifiers_rl.inference.client import TOKEN_VARIABLE, InferenceClient

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
    ("text", "trainers", "servers"),
    [
        ("", 1, 1),
        ("trainer_nodes = 3\ninference_nodes = 2\n", 3, 2),
        ("inference_nodes = 2\n[inference]\nreplicas = 3\n", 1, 6),
    ],
)
def test_each_replica_gets_a_place_of_its_own(tmp_path, text, trainers, servers):
    config = load_run_config(read_toml(tmp_path, text))
    found = ray_engine.RayMachines(None, config, None)
    assert (found.num_trainers, found.num_servers) == (trainers, servers)


def test_servers_that_run_already_need_their_token(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    config = load_run_config(read_toml(tmp_path, '[trainer.args]\nvllm_servers = ["h:1"]\n'))
    with pytest.raises(TomlError, match=r"\[trainer.args\] has vllm_servers, .*set it to their t"):
        ray_engine.RayMachines(None, config, None)
    monkeypatch.setenv(TOKEN_VARIABLE, "t")
    assert ray_engine.RayMachines(None, config, None).num_servers == 0


class StubRay:
    """Ray as far as a run uses it. Actors are played: each reads what `script` gives it, a queue of
    lists of lines and exit statuses for the process of its place: its strategy and its index.
    """

    class exceptions:
        class RayError(Exception):
            pass

        class GetTimeoutError(RayError):
            pass

    def __init__(self):
        self.script = defaultdict(queue.Queue)
        self.signals, self.started = [], []
        self.groups = []
        self.silent = set()  # places whose processes do not start
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
        at = (group.strategy, self.groups.index(group), index)
        address = f"10.0.0.{len(self.started)}", 7000

        def read():
            said = self.script[at].get(timeout=20)
            if said == "lost":
                raise self.exceptions.RayError
            return said

        def find_address(wanted):
            if at in self.silent:
                raise self.exceptions.GetTimeoutError
            return address

        def start(words, variables, host):
            self.started.append((at, options["num_gpus"], words, variables))

        def send(number):
            self.signals.append((at, number))
            self.script[at].put(([], 128 + number))

        methods = {"find_address": find_address, "start": start, "read": read}
        actor = SimpleNamespace(
            at=at,
            **{k: SimpleNamespace(remote=partial(partial, v)) for k, v in methods.items()},
            signal=SimpleNamespace(remote=send),
        )
        return SimpleNamespace(remote=lambda: actor)

    def get(self, call, timeout=None):
        return call()

    def nodes(self):
        return [{"NodeID": "n-SPREAD", "NodeManagerAddress": "10.0.0.9", "Alive": True}]

    def kill(self, actor):
        pass


TRAINER, SERVER = ("PACK", 0, 0), ("SPREAD", 1, 0)


@pytest.fixture
def run_with(tmp_path, monkeypatch):
    """Returns the stub and a function that runs a TOML on it."""
    monkeypatch.setenv(TOKEN_VARIABLE, "of the run")
    monkeypatch.setattr(supervise, "POLL_S", 0.01)
    monkeypatch.setattr(children, "BACKOFF_S", 0.0)
    monkeypatch.setattr(ray_engine, "answers", lambda host, port: True)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    ray = StubRay()

    def run(text="", tables="[inference]\ngpus = 4\n[trainer]\ngpus = 2\n"):
        config = load_run_config(read_toml(tmp_path, text + tables))
        options = SimpleNamespace(resume=None, overwrite=False)
        return supervise.supervise(config, ray_engine.RayMachines(ray, config, options))

    yield ray, run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_processes_get_their_gpus_and_variables_and_their_output_comes_here(run_with, capfd):
    ray, run = run_with
    ray.script[TRAINER].put((["hello"], None))
    ray.script[TRAINER].put((["bye"], 3))
    assert run() == 3
    (server, server_gpus, server_words, server_env), (trainer, gpus, words, env) = ray.started
    assert (server, server_gpus, trainer, gpus) == (SERVER, 4, TRAINER, 2)
    assert [(g.strategy, g.bundles) for g in ray.groups] == [
        ("PACK", [{"CPU": 1, "GPU": 2}]),
        ("SPREAD", [{"CPU": 1, "GPU": 4}]),
    ]
    assert " ".join(server_words).endswith("--host 10.0.0.0 --port 7000")
    assert "--nproc-per-node=2" in words and "verifiers_rl.cli.train" in words
    assert env[SERVERS_VARIABLE] == "10.0.0.0:7000"
    for variables in (env, server_env):
        assert variables[TOKEN_VARIABLE] == "of the run"
        assert "CUDA_VISIBLE_DEVICES" not in variables  # which Ray has set
    said = capfd.readouterr().out
    assert "[trainer] hello" in said and "[trainer] bye" in said


def test_ranks_of_several_machines_meet_at_the_first(run_with):
    ray, run = run_with
    for index in range(2):
        ray.script["PACK", 0, index].put(([], 5 * index))
    assert run("trainer_nodes = 2\n") == 5
    for index in range(2):
        words = next(words for at, _, words, _ in ray.started if at == ("PACK", 0, index))
        assert {"--nnodes=2", f"--node-rank={index}", "--master-addr=10.0.0.1"} <= set(words)


def test_replicas_without_gpus_choose_their_cores_on_their_own_machines(run_with):
    ray, run = run_with
    ray.script[TRAINER].put(([], 0))
    assert run(tables="[inference]\nreplicas = 3\ngpus = 0\n[trainer]\ngpus = 0\n") == 0
    servers = [env for at, _, _, env in ray.started if at != TRAINER]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in servers] == ["", "", ""]
    assert not any("VLLM_CPU_OMP_THREADS_BIND" in env for env in servers)


def test_a_process_that_does_not_start_in_time_is_one_error_that_names_its_machine(run_with, capfd):
    ray, run = run_with
    ray.silent.add(SERVER)
    assert run() == 1
    assert "inference has a place on 10.0.0.9, but Ray started no process" in capfd.readouterr().err


def test_a_server_whose_machine_is_lost_joins_elsewhere_a_few_times_only(run_with, capfd):
    (ray, run), told = run_with, []
    second = ("SPREAD", 1, 1)

    def lose(times):
        for _ in range(times):
            started = len(ray.started)
            ray.script[second].put("lost")
            while len(ray.started) == started:
                time.sleep(0.01)

    def play():
        while len(ray.started) < 3:
            time.sleep(0.01)
        time.sleep(0.5)  # they are looked at, and answer
        with pytest.MonkeyPatch.context() as patch:  # from here on only the first answers
            patch.setattr(ray_engine, "answers", lambda host, port: host == "10.0.0.0")
            patch.setattr(InferenceClient, "join", lambda known, *new: told.append((known, new)))
            lose(children.MAX_RESTARTS)
            ray.script[second].put("lost")
            time.sleep(0.5)
            ray.script[TRAINER].put(([], 0))
            time.sleep(0.5)

    playing = threading.Thread(target=play)
    playing.start()
    assert run("inference_nodes = 2\n") == 0
    playing.join()
    again = [at for at, *_ in ray.started if at == second][1:]
    assert len(again) == children.MAX_RESTARTS
    # The trainer hears of each new address from the other server.
    assert {known.base_url for known, _ in told} == {"http://10.0.0.0:7000"}
    assert len({new for _, new in told}) == children.MAX_RESTARTS
    said = capfd.readouterr()
    assert "inference-1 is lost with its machine, 10.0.0." in said.out
    assert "and is not restarted" in said.err


def test_a_lost_machine_with_ranks_ends_the_run_with_the_command_to_resume(run_with, capfd):
    ray, run = run_with
    ray.script[TRAINER].put("lost")
    assert run() == 1
    said = capfd.readouterr().err
    assert "trainer is lost with its machine, 10.0.0.1. Go on from the last checkpoint: vf-rl" in (
        said
    )
    assert "config.toml --resume" in said


def test_a_signal_lets_the_trainer_save_and_then_ends_the_servers(run_with):
    ray, run = run_with

    def send():
        while len(ray.started) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    assert run() == 143
    asked = [at for at, number in ray.signals if number == signal.SIGTERM]
    assert asked == [TRAINER, SERVER]


# --- Machines -------------------------------------------------------------------------------------

# vf-rl with stand-ins for the server, and for the trainer, which reaches all servers and then waits
# for a file.
PLAY_TRAINER = f"""
{REACH_SERVERS}
print("trains with", len(servers), "servers", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
sys.exit(int(sys.argv[2]))
"""
DRIVER = f"""
{STAND_INS}
from verifiers_rl.cli import rl
end, status = sys.argv[1:3]
sys.argv[:3] = ["vf-rl"]
ray_engine.trainer_command = lambda *_: ["-c", {PLAY_TRAINER!r}, end, status]
rl.main()
"""
# So that Ray takes a machine for lost after seconds, not half a minute.
FAST = {"initial_delay_ms": 0, "period_ms": 500, "timeout_ms": 1000, "failure_threshold": 4}


class Started:
    """A process with its output in a file."""

    def __init__(self, command, environment, log):
        self.command, self.environment, self.log = command, environment, log

    def __enter__(self):
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=self.environment, stdout=output, stderr=output
            )
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def said(self):
        return self.log.read_text()

    def wait_for(self, pattern, seconds=240):
        deadline = time.monotonic() + seconds
        while not (hit := re.search(pattern, self.said())):
            assert time.monotonic() < deadline and self.process.poll() is None, self.said()
            time.sleep(0.1)
        return hit


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
    text = "inference_nodes = 2\n"
    text += "[inference]\ngpus = 0\n[trainer]\ngpus = 0\n[trainer.args]\n"
    path = read_toml(tmp_path / "code", f'{text}output_dir = "{tmp_path}/run"\n', env)
    with machines(3) as found, ray_cluster(found) as environment:
        command = [*found[0].words, sys.executable, "-c", DRIVER, str(tmp_path / "end"), "0"]
        command += ["@", str(path), "--cluster.address", f"{found[0].address}:6379"]
        with Started(command, environment, tmp_path / "log") as run:
            run.wait_for(r"\[trainer\] trains with 2 servers")
            places = dict(re.findall(r"vf-rl: (\S+) is on ([\d.]+)", run.said()))
            servers = {name: places[name] for name in ("inference-0", "inference-1")}
            assert len(set(servers.values())) == 2 and found[0].address not in places.values()
            lost = next(name for name, at in servers.items() if at != places["trainer"])
            other = next(at for name, at in servers.items() if name != lost)
            machine = next(one for one in found if one.address == servers[lost])
            machine.set_link("down")
            run.wait_for(rf"{lost} is lost with its machine, {machine.address}; starting it again")
            run.wait_for(rf"\[{lost}\] serving at {other}")
            (tmp_path / "end").touch()
            assert run.process.wait(60) == 0, run.said()
