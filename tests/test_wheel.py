"""The wheel: what it holds, and that its programs run where there is no repository."""

import os
import re
import subprocess
import sysconfig
import zipfile

import httpx
import pytest

from tests.conftest import Started
from tests.helpers import ROOT, run_python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run_python("-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    (path,) = folder.glob("*.whl")
    return path


def test_it_holds_the_package_and_the_examples_and_nothing_else(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    there = set()
    for folder, home in {"verifiers_rl": ROOT, "examples": ROOT / "verifiers_rl"}.items():
        for path in (ROOT / folder).rglob("*"):
            relative = path.relative_to(ROOT)
            if path.is_file() and not {"__pycache__", "outputs"} & {*relative.parts}:
                there.add((home / relative).relative_to(ROOT).as_posix())
    assert held == there


@pytest.fixture
def installed(wheel, tmp_path):
    """The programs of the wheel, in an environment that finds all else in that of the tests."""
    venv = tmp_path / "venv"
    run_python("-m", "venv", "--without-pip", venv)
    run_python("-m", "uv", "pip", "install", "--offline", "--no-deps", "--python", venv, wheel)
    (packages,) = venv.glob("lib/python*/site-packages")
    # Python reads no .pth file there, so the repository of an editable install is not found.
    packages.joinpath("dev.pth").write_text(sysconfig.get_path("purelib"))
    return venv / "bin"


def test_its_programs_run_without_the_repository(installed, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (work := tmp_path / "work").mkdir()

    def run(program, *words):
        command = [installed / program, *words]
        return subprocess.run(
            command, cwd=work, check=True, stdout=subprocess.PIPE, text=True, timeout=100
        ).stdout

    home = run("python", "-c", "import verifiers_rl; print(verifiers_rl.__file__)")
    assert home.startswith(str(installed.parent))
    run("vf-setup", ".")
    assert 'id = "my_env"' in run("vf-rl", "--dry-run", "@", "rl.toml")
    run("vf-rl", "--eject", "fork")
    assert {path.name for path in work.glob("fork/*")} == {"my_trainer.py", "my_orchestrator.py"}
    command = [str(installed / "vf-rl"), "view", str(work)]
    with Started(command, os.environ, tmp_path / "log") as page, httpx.Client() as client:
        page.wait_for("token=.*\n")
        (address,) = re.findall("http://.*", page.said())
        text = client.get(address).text
        parts = re.findall('"(/static/.*?)"', text)
        assert len(parts) > 4
        for part in parts:
            assert client.get(httpx.URL(address).join(part)).status_code == 200, part
