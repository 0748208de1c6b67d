"""A run on a Ray cluster: of no machines, and of machines that are network namespaces."""

import itertools
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import tomllib
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import Started
from tests.helpers import ROOT, make_tiny_model, write_environment
from tests.machines import REACH_SERVERS, STAND_INS, machines
from verifiers_rl.cli.config import TomlError, load_run_config
from verifiers_rl.cli.plan import ServerPlan, plan_servers
from verifiers_rl.cluster import ray_engine
from verifiers_rl.inference.client import TOKEN_VARIABLE, ServerLostError

HAS_RAY = shutil.which("ray", path=str(Path(sys.executable).parent)) is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="needs the ray extra")


def read_toml(tmp_path, text="", env='[env]\nid = "e"\n'):
    make_tiny_model().save_pretrained(tmp_path / "model")
    path = tmp_path / "config.toml"
    path.write_text(f'model = "./model"\n{env}[cluster]\naddress = "auto"\n{text}')
    return path


def test_what_travels_is_a_toml_and_the_modules_beside_it(tmp_path, capsys):
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source / "outputs", source / "package", target):
        folder.mkdir(parents=True)
    for name in ("mine.py", "package/data.json", "outputs/big", ".hidden", "keys", "b.env"):
        (source / name).write_text("KEY=x")
    path = read_toml(source, "trainer_nodes = 2\n[trainer.args]\nmax_steps = 7\n")
    path.write_text(f'env_file = "keys"\n{path.read_text()}[env.args]\napi_key = "hf_0123"\n')
    config = load_run_config([path], ["--trainer.args.batch_size=24"])
    ray_engine.write_code(config, f"{tmp_path}/run", target)
    sent = {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()}
    weights = {"code0/model/config.json", "code0/model/generation_config.json"}
    assert sent - weights == {"config.toml", "code0/mine.py", "code0/package/data.json"}
    assert not [name for name in sent if "hf_0123" in (target / name).read_text()]
    assert "not sent to the machines of the cluster: Left out" in capsys.readouterr().out
    data = tomllib.loads((target / "config.toml").read_text())
    assert data["import_from"] == ["./code0"] and "cluster" not in data
    assert data["model"] == f"{source}/model"
    wanted = {"max_steps": 7, "batch_size": 24, "output_dir": f"{tmp_path}/run"}
    assert wanted.items() <= data["trainer"]["args"].items()


def placed(name, ray, place, plan, timeout_s, wanted=None):
    """In place of a `RayChild`: one that runs where Ray has placed it, at an address of its own."""
    address = f"10.0.0.{next(ray.numbers)}", 7000
    words, env = plan(address)
    given = {"name": name, "place": place, "wanted": wanted, "address": address}
    return SimpleNamespace(**given, words=words, env=env, find_address=lambda: address)


@pytest.fixture
def machines_of(tmp_path, monkeypatch):
    """Returns the machines of a TOML, with places. Their processes are noted, and not started."""
    monkeypatch.setenv(TOKEN_VARIABLE, "of the run")
    monkeypatch.setattr(ray_engine, "RayChild", placed)

    def group(bundles, strategy):
        groups.append((strategy, bundles))
        return SimpleNamespace(wait=lambda seconds: True)

    groups, util = [], SimpleNamespace(placement_group=group)
    nodes = lambda: [{"Alive": True}] * 2  # noqa: E731
    ray = SimpleNamespace(nodes=nodes, util=util, numbers=itertools.count())

    def machines_of(text, num_machines=1):
        config = load_run_config(read_toml(tmp_path, text))
        plans = plan_servers(config)
        return ray_engine.RayMachines(ray, config, plans, num_machines), plans, groups

    return machines_of


GPUS = "[inference]\ngpus = 4\n[trainer]\ngpus = 2\n"


def test_processes_get_their_gpus_and_variables_and_ranks_meet_at_the_first(machines_of):
    found, plans, groups = machines_of(f"trainer_nodes = 2\ninference_nodes = 2\n{GPUS}")
    found.open()
    of_trainer, of_server = {"CPU": 1, "GPU": 2}, {"CPU": 1, "GPU": 4}
    assert groups == [("PACK", [of_trainer] * 2), ("SPREAD", [of_server] * 2)]
    trainers = [*found.start_trainers({"A": "1"})]
    server = found.start_server(plans[0])
    assert server.place[1:] == (0, 4)
    assert " ".join(server.words).endswith("--host 10.0.0.2 --port 7000")
    for number, trainer in enumerate(trainers):
        assert (trainer.name, *trainer.place[1:]) == (f"trainer-{number}", number, 2)
        words = {"--nnodes=2", f"--node-rank={number}", "--master-addr=10.0.0.0"}
        words |= {"--nproc-per-node=2", "verifiers_rl.cli.train"}
        assert words <= set(trainer.words) and trainer.env["A"] == "1"
    for child in (server, *trainers):
        assert child.env[TOKEN_VARIABLE] == "of the run"
        assert "CUDA_VISIBLE_DEVICES" not in child.env  # which Ray has set


def test_a_server_that_starts_elsewhere_joins_through_one_that_answers(machines_of, monkeypatch):
    found, plans, _ = machines_of(f"inference_nodes = 3\n{GPUS}")
    plans.append(ServerPlan("teacher-big", ("teacher", "0"), "m", {}, 0, is_needed=True))
    found.open()
    for plan in reversed(plans):
        found.start_server(plan)
    up = ("10.0.0.0", "10.0.0.1")  # the teacher, and the last server
    told = []
    request = SimpleNamespace(begin=lambda: SimpleNamespace(answer=lambda: None))

    def post(known, path):
        if known.host not in up:
            raise ServerLostError("no answer")
        told.append(known.base_url + path)
        return request

    monkeypatch.setattr("verifiers_rl.inference.client.ControlRequest", post)
    again = found.start_server(plans[0])
    assert again.wanted == ("10.0.0.3", 7000)
    # The trainer hears of the new address from a server that it knows.
    assert again.address == ("10.0.0.4", 7000)
    found.start_server(plans[3])
    assert told == ["http://10.0.0.1:7000/weight_sync/join?host=10.0.0.4&port=7000"]


def test_a_cluster_that_is_too_small_is_one_clear_error(machines_of, monkeypatch):
    found, _, _ = machines_of(f"{GPUS}[trainer.args]\nvllm_server_timeout = 0.1\n", 3)
    with pytest.raises(TomlError, match=r"2 of WORLD_SIZE=3 machines joined within 0\.1 s"):
        found.open()
    found._num_machines = 1
    group = SimpleNamespace(wait=lambda seconds: False)
    monkeypatch.setattr(found._ray.util, "placement_group", lambda *_, **__: group)
    found._ray.available_resources = lambda: {"GPU": 1.0, "CPU": 8.0}
    with pytest.raises(TomlError, match=r"trainer-0 2; free are 1 GPUs and 8 CPUs"):
        found.open()


# --- Machines -------------------------------------------------------------------------------------

# vf-rl with stand-ins for the server, and for the trainer, which reaches all servers and then waits
# for a file.
PLAY_TRAINER = f"""
{REACH_SERVERS}
from verifiers_rl.process.ending import end_with_starter
end_with_starter()
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


@contextmanager
def ray_folder():
    """A folder for Ray's files, an environment of its processes, and words before a command that
    give its machine a folder of its own in this place.
    """
    folder = tempfile.mkdtemp(prefix="vfray", dir="/tmp")  # a longer name is too long for sockets
    variables = {f"RAY_health_check_{key}": str(value) for key, value in FAST.items()}
    variables["RAY_TMPDIR"] = folder
    apart = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', folder]
    try:
        yield folder, os.environ | variables, apart
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_cluster(found):
    """Ray on these machines; the first is the head, and gets no process of a run."""
    program = [str(Path(sys.executable).parent / "ray"), "start", "--num-gpus", "0"]
    program += ["--object-store-memory", "80000000", "--disable-usage-stats"]
    starting = []
    with ray_folder() as (folder, environment, apart):
        environment |= {"RAY_DISABLE_IMPORT_WARNING": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        environment |= {"PYTHONWARNINGS": "ignore", "RAY_AUTH_MODE": "token"}
        environment |= {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
        head = ["--head", "--port", "6379", "--num-cpus", "0", "--include-dashboard", "false"]
        head += ["--temp-dir", folder]
        other = ["--address", f"{found[0].address}:6379", "--num-cpus", "4"]
        try:
            for machine in found:
                # The driver must find the files of the head.
                own, words = ([], head) if machine is found[0] else (apart, other)
                command = [*machine.words, *own, *program, "--node-ip-address", machine.address]
                process = subprocess.Popen(
                    [*command, *words], env=environment, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, text=True,
                )  # fmt: skip
                starting.append(process)
                assert process.wait(60) == 0, process.stdout.read()
            yield environment
        finally:
            for process in starting:
                process.kill()  # what it has started ends with its machine
                process.wait()
                process.stdout.close()


@needs_ray
@pytest.mark.slow
def test_ray_places_a_run_and_places_a_replica_again_whose_machine_is_lost(tmp_path):
    (tmp_path / "code").mkdir()
    env = write_environment(tmp_path / "code", "tiny_env", ["a"])
    text = "inference_nodes = 2\n"
    text += "[inference]\ngpus = 0\n[trainer]\ngpus = 0\n[trainer.args]\n"
    path = read_toml(tmp_path / "code", f'{text}output_dir = "{tmp_path}/run"\n', env)
    with machines(3) as found, ray_cluster(found) as environment:
        command = [*found[0].words, sys.executable, "-c", DRIVER, f"{tmp_path}/end", "0"]
        command += ["@", path, "--cluster.address", f"{found[0].address}:6379"]
        with Started(command, environment, tmp_path / "log") as run:
            run.wait_for(r"\(trainer.*\)\S* trains with 2 servers")
            places = dict(re.findall(r"vf-rl: (\S+) is on ([\d.]+)", run.said()))
            of_trainer = places.pop("trainer")
            assert sorted(places.values()) == [one.address for one in found[1:]]
            (lost, at), (_, other) = sorted(places.items(), key=lambda one: one[1] == of_trainer)
            next(one for one in found if one.address == at).set_link("down")
            run.wait_for(rf"is lost with its machine, {at}; starting it again")
            run.wait_for(rf"\({lost}.*\)\S* serving at {other}")
            (tmp_path / "end").touch()
            assert run.process.wait(60) == 0, run.said()


def test_the_package_as_it_travels_has_all_its_names(tmp_path):
    """verifiers asks for each of them on another machine, where no examples are beside it."""
    shutil.copytree(ROOT / "verifiers_rl", tmp_path / "verifiers_rl")
    code = "import verifiers_rl as v; print(v.__file__, [getattr(v, n) for n in v.__all__])"
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.startswith(str(tmp_path)), done.stderr
