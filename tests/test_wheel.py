"""The wheel: what it holds, and that its programs run where there is no repository."""

import subprocess
import sysconfig
import zipfile

import pytest

from tests.helpers import ROOT, run_python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run_python("-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    (path,) = folder.glob("*.whl")
    return path


def test_it_holds_the_package_and_the_examples_and_nothing_else(wheel):
    names = (name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name)
    assert {name.replace("verifiers_rl/examples/", "examples/") for name in names} == {
        path.relative_to(ROOT).as_posix()
        for folder in ("verifiers_rl", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not {"__pycache__", "outputs", "venv"} & {*path.parts}
    }


def test_its_programs_run_without_the_repository(wheel, tmp_path, monkeypatch):
    """In an environment that finds all else in that of the tests."""
    run_python("-m", "venv", "--without-pip", tmp_path)
    run_python("-m", "uv", "pip", "install", "--offline", "--no-deps", "--python", tmp_path, wheel)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    # Python reads no .pth file there, so the repository of an editable install is not found.
    packages.joinpath("dev.pth").write_text(sysconfig.get_path("purelib"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (work := tmp_path / "work").mkdir()

    def run(program, *words):
        command = [tmp_path / "bin" / program, *words]
        return subprocess.check_output(command, cwd=work, text=True, timeout=200)

    home = run("python", "-c", "import verifiers_rl; print(verifiers_rl.__file__)")
    assert home.startswith(str(packages))
    run("vf-setup", ".")
    assert 'id = "my_env"' in run("vf-rl", "--dry-run", "@", "rl.toml")
    run("vf-rl", "--eject", "fork")
    assert {path.name for path in work.glob("fork/*")} == {"my_trainer.py", "my_orchestrator.py"}
