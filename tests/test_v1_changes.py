"""What we change inside verifiers."""

import asyncio
from pathlib import Path

import pytest
import verifiers.v1 as vf
from verifiers.v1.runtimes import Runtime, make_runtime

from verifiers_rl.envs import v1_changes

USES = {
    "a program": lambda runtime: runtime.run(["sh", "-c", "echo hi > file"], {}),
    "a file": lambda runtime: runtime.write("file", b"hi\n"),
}
if hasattr(Runtime, "with_env"):  # from verifiers 0.4 on
    USES["a view"] = lambda runtime: runtime.with_env({"A": "b"}).write("file", b"hi\n")


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_runtime_makes_its_folder_when_it_is_used(use, tmp_path, monkeypatch):
    monkeypatch.setattr(v1_changes.local_runtime, "CACHE_DIR", tmp_path / "cache")

    async def run():
        runtime = make_runtime(vf.SubprocessConfig(), name="one")
        await runtime.start()
        assert not (tmp_path / "cache").exists()
        await use(runtime)
        folder = Path(runtime.info.id)
        assert await runtime.read("file") == b"hi\n" and (folder / "file").exists()
        await runtime.stop()
        assert not folder.exists()

    asyncio.run(run())


def test_a_runtime_that_is_not_used_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(v1_changes.local_runtime, "CACHE_DIR", tmp_path / "cache")

    async def run():
        runtime = make_runtime(vf.SubprocessConfig())
        await runtime.start()
        await runtime.stop()
        runtime.cleanup()

    asyncio.run(run())
    assert not (tmp_path / "cache").exists()
