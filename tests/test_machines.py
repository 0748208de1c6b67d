"""The four variables of a run on several machines: read, and two machines that become a cluster."""

import os
import re
import signal
import socket
import sys
from contextlib import ExitStack

import pytest

from tests.conftest import Started, wait_until
from tests.helpers import write_environment
from tests.machines import machines
from tests.test_ray_engine import DRIVER, needs_ray, ray_folder
from verifiers_rl.cli.children import ChildError
from verifiers_rl.cli.config import TomlError
from verifiers_rl.cluster import machines as cluster
from verifiers_rl.cluster.machines import Machine, find_head, machine_of, take_variables
from verifiers_rl.inference.client import TOKEN_VARIABLE

FOUR = {"MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "29500", "WORLD_SIZE": "3", "RANK": "1"}


def test_the_four_variables_are_read_and_not_handed_on():
    environment = {**FOUR, "OTHER": "1"}
    assert take_variables(environment) == Machine(1, 3, "10.0.0.5", 29500)
    assert environment == {"OTHER": "1"}
    assert take_variables({"OTHER": "1"}) is None
    alone = {**FOUR, "WORLD_SIZE": "1", "RANK": "0"}
    assert take_variables(alone) is None and not alone


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"RANK": ""}, "WORLD_SIZE='3', RANK='': must be .* set all four"),
        ({"RANK": "3"}, r"WORLD_SIZE='3', RANK='3': must be .* from 0 to WORLD_SIZE - 1"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT='65536', .*must be the host and the port"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is set, as by torchrun.* without a launcher"),
    ],
)
def test_variables_that_cannot_be_are_one_clear_error(changes, message):
    with pytest.raises(TomlError, match=message):
        take_variables(FOUR | changes)


@pytest.fixture
def machine_with(compose, monkeypatch):
    """The machine of a TOML and these variables, and the configuration."""

    def machine_with(text, **variables):
        monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        config = compose(f'model = "m"\n[env]\nid = "e"\n[cluster]\n{text}\n')
        return machine_of(config), config

    return machine_with


@pytest.mark.parametrize(
    "table, variables, message",
    [
        ("trainer_nodes = 2", {}, r"\[cluster\]: is about several machines: set MASTER_ADDR"),
        ('address = "auto"', FOUR, "address='auto': is of a Ray cluster that runs already"),
        ("", FOUR, f"{TOKEN_VARIABLE} is not set.* same value on each"),
    ],
)
def test_a_cluster_that_cannot_be_is_one_clear_error(machine_with, table, variables, message):
    with pytest.raises(TomlError, match=message):
        machine_with(table, **variables)


@pytest.mark.parametrize(
    "table, num_servers",
    [
        ("", 2),
        ("trainer_nodes = 3", 1),
        ("inference_nodes = 3", 3),
        ("[trainer.args]\nvllm_servers = ['h:1']", None),
    ],
)
def test_what_neither_trains_nor_rolls_out_serves(machine_with, table, num_servers):
    machine, config = machine_with(table, **{TOKEN_VARIABLE: "secret"}, **FOUR)
    assert (machine.rank, config.cluster.address) == (1, "10.0.0.5:29500")
    assert config.cluster.inference_nodes == num_servers


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_two_machines_become_a_cluster_and_end_with_the_trainer_or_the_head(tmp_path, is_killed):
    """vf-rl with the four variables on two machines, with stand-ins for server and trainer."""
    env = write_environment(tmp_path, "tiny_env", {"a": "b"})
    path = tmp_path / "rl.toml"
    path.write_text(
        f'model = "./model"\n{env}[inference]\ngpus = 0\n[trainer]\ngpus = 0\n'
        f'[trainer.args]\noutput_dir = "{tmp_path}/run"\nvllm_server_timeout = 120\n'
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    with ray_folder() as (_, environment, apart), machines(2) as found, ExitStack() as stack:
        environment |= {"MASTER_ADDR": found[0].address, "MASTER_PORT": "29500"}
        environment |= {"WORLD_SIZE": "2", TOKEN_VARIABLE: "of this run"}
        environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = "5"
        runs = []
        for rank, machine in enumerate(found):
            command = [*machine.words, *(apart if rank else []), sys.executable, "-c", DRIVER]
            command += [f"{tmp_path}/end", "7", "@", path]
            run = Started(command, {**environment, "RANK": str(rank)}, tmp_path / f"log{rank}")
            runs.append(stack.enter_context(run))
        first, second = runs
        first.wait_for(r"\(trainer.*\)\S* trains with 1 servers")
        places = dict(re.findall(r"vf-rl: (\S+) is on ([\d.]+)", first.said()))
        assert set(places) == {"inference", "trainer"}
        assert "joins Ray's head at 10.77.0.1:29500" in second.said()
        if is_killed:
            os.kill(first.process.pid, signal.SIGKILL)
            assert second.process.wait(120) == 1, second.said()
            assert "Ray's head at 10.77.0.1:29500 is lost, and the run with it" in second.said()
        else:
            (tmp_path / "end").touch()
            for run in runs:
                assert run.process.wait(120) == 7, run.said()
        # What a killed one has started ends with it.
        wait_until(lambda: not any(one.pids() for one in found), 90.0)


def test_a_machine_waits_for_the_name_of_the_head(monkeypatch, tmp_path):
    def connect(address, timeout):
        asked.append(address)
        if len(asked) == 1:  # on Kubernetes the name of a pod comes with the pod
            raise socket.gaierror(-2, "Name or service not known")
        return real(head.getsockname(), timeout)

    def ray_here(words, *others):
        raise ChildError(" ".join(words))

    real, asked = socket.create_connection, []
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(cluster, "ray_here", ray_here)
    joins = pytest.raises(ChildError, match=r"--address 127\.0\.0\.1:29500")
    with socket.create_server(("127.0.0.1", 0)) as head, joins:
        cluster.join(Machine(1, 2, "head", 29500), 10.0, tmp_path)
    assert asked == [("head", 29500)] * 2


def test_a_name_that_is_loopback_here_is_refused(monkeypatch):
    found = [(2, 2, 17, "", ("127.0.1.1", 29500))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    with pytest.raises(TomlError, match=r"MASTER_ADDR='here' is 127.0.1.1 .* cannot reach; set it"):
        find_head(Machine(0, 2, "here", 29500))
