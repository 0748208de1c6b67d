"""Loads the environments of a configuration and the code that it names, and writes what is wrong
with them, or nothing, into a file.

`vf-rl` runs this module before it starts the server: an environment may start threads or CUDA, and
hold memory, so it is loaded in a process that ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from verifiers_rl.cli.config import TomlError, load_run_config, overrides_of, toml_arguments


def main() -> None:
    if parent := os.environ.pop("VERIFIERS_RL_DIE_WITH_PARENT", None):
        from verifiers_rl.process.parent import die_with_parent

        die_with_parent(int(parent))
    answer = Path(sys.argv[1])
    from verifiers_rl.envs.base import InvalidEnvironmentError

    files, words = toml_arguments(sys.argv[2:])
    config = load_run_config(files, overrides_of(words), checks_model=False)  # vf-rl has loaded it
    problem = ""
    try:
        what = "the code that [trainer] names"
        config.load_own_code()
        what = "the environment's own code"
        config.load_envs(with_teachers=False)
    except (InvalidEnvironmentError, TomlError) as error:
        problem = str(error)
    except Exception as error:  # of the environment's own code
        import traceback

        from verifiers_rl.data import describe_error

        traceback.print_exc()
        problem = f"{config.source('env')}: {what} fails: {describe_error(error)}"
    unfinished = answer.with_suffix(".unfinished")
    unfinished.write_text(" ".join(problem.split()))
    unfinished.rename(answer)
    # Not os._exit: environments clean up behind themselves as their process ends.


if __name__ == "__main__":
    main()
