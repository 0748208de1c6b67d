"""What we change inside verifiers."""

import asyncio
from pathlib import Path

import pytest
import verifiers.v1 as vf
from verifiers.v1.runtimes import provision_runtime

USES = {
    "nothing": None,
    "a program": lambda runtime: runtime.run(["sh", "-c", "echo hi > file"], {}),
    "a file": lambda runtime: runtime.write("file", b"hi\n"),
    "a view": lambda runtime: runtime.with_env({"A": "b"}).write("file", b"hi\n"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_runtime_makes_its_folder_when_it_is_used(use, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setattr("verifiers_rl.envs.v1_changes.local_runtime.CACHE_DIR", cache)

    async def run():
        async with provision_runtime(vf.SubprocessConfig(), name="one") as runtime:
            assert not cache.exists()
            if use is not None:
                await use(runtime)
                assert await runtime.read("file") == b"hi\n"
                assert (Path(runtime.info.id) / "file").exists()
        assert not Path(runtime.info.id).exists()

    asyncio.run(run())
    assert cache.exists() == (use is not None)
