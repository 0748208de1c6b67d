"""A wrong configuration ends vf-rl with one line, which names the file, the key, the value and the
fix.
"""

import sys

import pytest

from tests.helpers import check_lines
from verifiers_rl.cli import rl

HEAD = 'model = "org/model"\n[env.taskset]\nid = "number_guess"\n'
OURS = HEAD + "[trainer.args]\n"
ENVS = 'model = "org/model"\n[[env]]\nid = "e"\n[[env]]\n'
FLAT = 'model = "org/model"\n{}\n[[env]]\nid = "number_guess"\n'
TEACHER = '[[teacher]]\nname = "big"\nmodel = "org/big"\n'
LEARNS = ENVS + 'id = "f"\nalgorithm = "opd"\nteacher = "big"\n'

# What is in mine.toml, and the words behind it. The lines are in wrong_configs.txt.
WRONG = {
    "a key at the top": ('modle = "x"\n', ""),
    "a table at the top": (HEAD + "[trainr]\ngpus = 1\n", ""),
    "a key of the trainer": (HEAD + "[trainer]\ngpu = 1\n", ""),
    "an option in the wrong table": (HEAD + "[trainer]\nmax_steps = 1\n", ""),
    "an option": (OURS + "batchsize = 8\n", ""),
    "an option of another library": (OURS + "num_generations = 8\n", ""),
    "a key of an environment": (ENVS + 'id = "f"\nwight = 2\n', ""),
    "a flat key": (FLAT.format("[sampling]\ntemprature = 0.5"), ""),
    "a key of the command line": (OURS, "--trainer.args.max_stepz 3"),
    "an option of vf-rl": (OURS, "--overwite"),
    "a number as text": (OURS + 'max_steps = "ten"\n', ""),
    "text on the command line": (OURS + "max_steps = 5\n", "--trainer.args.max_steps=ten"),
    "true in quotes": (OURS + 'use_lora = "true"\n', ""),
    "a batch that groups do not fill": (OURS + "batch_size = 100\n", ""),
    "a number out of range": (OURS + "temperature = 0\n", ""),
    "a name of a loss": (OURS + 'loss = "grpo"\n', ""),
    "an option that does nothing": (OURS + "kl_target = 0.1\n", ""),
    "a stop string": (OURS + 'stop = [""]\n', ""),
    "GPUs": (HEAD + "[inference]\ngpus = -1\n", ""),
    "a trainer's class": (HEAD + '[trainer]\nclass = "MyTrainer"\n', ""),
    "no model": (HEAD.partition("\n")[2], ""),
    "no environment": ('model = "m"\n', ""),
    "a weight": (ENVS + 'id = "f"\nweight = 0\n', ""),
    "two names": (ENVS + 'id = "e"\n', ""),
    "what an environment is for": (ENVS + 'id = "f"\nonly = "test"\n', ""),
    "a flag that has its own place": (HEAD + "[inference.args]\nport = 3\n", ""),
    "a file of secrets": ('env_file = "none.env"\n' + HEAD, ""),
    "a folder of modules": ('import_from = ["none"]\n' + HEAD, ""),
    "an item that is not there": (ENVS + 'id = "f"\n', "--env.2.weight 3"),
    "a key of one of several environments": (ENVS + 'id = "f"\n', "--env.args.n 3"),
    "an empty table for one of several environments": (ENVS + 'id = "f"\n', "--env.args {}"),
    "a taskset without an id": ('model = "m"\n[env.taskset]\nsize = 3\n', ""),
    "a taskset that is no table": ('model = "m"\n[env]\ntaskset = "t"\n', ""),
    "an empty list of environments": ('model = "m"\nenv = []\n', ""),
    "an environment that is no table": ('model = "m"\nenv = 3\n', ""),
    "an id that is no text": (ENVS + "id = 2\n", ""),
    "flags that are no table": (HEAD + "[inference]\nargs = 3\n", ""),
    "a table that is not closed": ("[env\n", ""),
    "a word": (OURS, "mine.toml"),
    "lists in lists": ("model = " + "[" * 9999 + "]" * 9999, ""),
    "tables in tables": (OURS + "loss_args = {a" + ".a" * 60 + " = 1}\n", ""),
    "a table of a command line": (OURS, "--trainer.args.loss_args." + "a." * 60 + "a=1"),
    "a folder that no system can have": (f'import_from = ["{"a" * 256}"]\n' + HEAD, ""),
    "a file with a NUL": ('env_file = "a\\u0000b"\n' + HEAD, ""),
    "a name that leads out": (OURS + 'run_name = "../../x"\n', ""),
    "a folder with a NUL": (OURS + 'output_dir = "a\\u0000b"\n', ""),
    "no TOML": (OURS + "max_steps 5\n", ""),
    "two layouts": (
        FLAT.format("batch_size = 64") + "[sampling]\nmax_tokens = 5\n[trainer]\ngpus = 1\n",
        "",
    ),
    "a flat value": (FLAT.format("[sampling]\ntop_p = 1.5"), ""),
    "a flat value of another name here": (FLAT.format("oversampling_factor = 2.0"), ""),
    "two keys for one option": (FLAT.format("lora_alpha = 16\n[lora]\nalpha = 32"), ""),
    "a penalty without a weight": (FLAT.format("[kl_penalty]\ntarget_kl = 0.1"), ""),
    "neither true nor false": (FLAT.format('[difficulty_filter]\nenabled = "yes"'), ""),
    "all examples": (FLAT.format("[eval]\nnum_examples = -1"), ""),
    "a flat table that is not read": (FLAT.format("[buffer]\neasy_threshold = 0.8"), ""),
    "a teacher that is not there": (LEARNS.replace('"big"', '"bigg"') + TEACHER + "gpus = 1\n", ""),
    "no teacher at all": (LEARNS, ""),
    "a teacher of nobody": (OURS + TEACHER + "gpus = 1\n", ""),
    "a teacher that runs and is started": (
        LEARNS + TEACHER + 'base_url = "http://a:1"\ngpus = 1\n',
        "",
    ),
    "a key of a teacher": (LEARNS + TEACHER + 'baseurl = "http://a:1"\n', ""),
    "GPUs of a teacher": (LEARNS + TEACHER + "gpus = -1\n", ""),
    "a teacher's URL": (LEARNS + TEACHER + 'base_url = "a:1"\n', ""),
    "a teacher's key": (LEARNS + TEACHER + 'gpus = 1\nkey_variable = "KEY"\n', ""),
    "a key on a command line": (
        LEARNS + TEACHER + 'gpus = 1\n[teacher.args]\n"api-key" = "k"\n',
        "",
    ),
    "a teacher without a model": (LEARNS + '[[teacher]]\nname = "big"\ngpus = 1\n', ""),
    "a teacher without a name": (LEARNS + '[[teacher]]\nmodel = "m"\ngpus = 1\n', ""),
    "a name that is no name of a file": (
        LEARNS + TEACHER.replace("big", "org/big") + "gpus = 1\n",
        "",
    ),
    "two teachers of one name": (LEARNS + 2 * (TEACHER + "gpus = 1\n"), ""),
    "one [teacher]": (LEARNS + TEACHER.replace("[[", "[").replace("]]", "]"), ""),
    "a key of one of several teachers": (LEARNS + TEACHER + "gpus = 1\n", "--teacher.timeout_s 3"),
    "learning of the only environment": (
        HEAD.replace("[env.taskset]", '[env]\nalgorithm = "opd"\n[env.taskset]'),
        "",
    ),
    "an algorithm": (ENVS + 'id = "f"\nalgorithm = "grpo"\n', ""),
    "an algorithm without its teacher": (ENVS + 'id = "f"\nalgorithm = "opd"\n', ""),
    "a hint": (LEARNS + "hint = 3\n" + TEACHER + "gpus = 1\n", ""),
    "a key about learning": (LEARNS + "distil_coef = 1\n" + TEACHER + "gpus = 1\n", ""),
    "a teacher of a flat file": (
        FLAT.format("max_steps = 3") + 'name = "f"\nteacher = "big"\n',
        "",
    ),
    "a teacher of evaluations": (
        FLAT.format('[[eval.env]]\nid = "e"\nteacher = "big"') + TEACHER + "gpus = 1\n",
        "",
    ),
}


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """What vf-rl says to a TOML and words, without its name; it must be one line."""
    monkeypatch.chdir(tmp_path)

    def said(text, words):
        (tmp_path / "mine.toml").write_text(text)
        monkeypatch.setattr(sys, "argv", ["vf-rl", "--dry-run", "@", "mine.toml", *words.split()])
        with pytest.raises(SystemExit) as ended:
            rl.main()
        stdout, stderr = capsys.readouterr()
        assert ended.value.code == 1 and stdout == ""
        (line,) = stderr.splitlines()
        assert not (tmp_path / "outputs").exists()
        return line.removeprefix("vf-rl: error: ").replace(f"{tmp_path}/", "")

    return said


def test_a_wrong_configuration_is_one_line_that_says_what_to_change(said, tmp_path):
    lines = [f"{what}: {said(*given)}" for what, given in WRONG.items()]
    check_lines([line.replace(str(tmp_path), "FOLDER") for line in lines], "wrong_configs.txt")


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (
            '[env]\nid = "someone/no-such-game"\n',
            "taskset 'someone/no-such-game' not found (tried to import 'no_such_game') nor beside "
            "the TOML in {folder}: No module named 'no_such_game'; install it: prime env install "
            "someone/no-such-game",
        ),
        (
            '[env.taskset]\nid = "someone/no-such-game@1.2"\n',
            "[env]: taskset 'someone/no-such-game@1.2' not found (tried to import 'no_such_game') "
            "nor beside the TOML in {folder}: No module named 'no_such_game'; install it: prime "
            "env install someone/no-such-game@1.2",
        ),
        (
            '[[env]]\nid = "small_tasks"\n[[env]]\nname = "b"\n[env.taskset]\nid = "small_tasks"\n'
            "num_taks = 3\n",
            "[[env]] 2: [env.taskset] has an unknown key 'num_taks'; did you mean 'num_tasks'?",
        ),
        (
            '[env]\nid = "small_tasks"\nargs = { num_taks = 3 }\n',
            "[env.taskset] has an unknown key 'num_taks'; did you mean 'num_tasks'?",
        ),
        (
            '[env.taskset]\nid = "small_tasks"\nnum_tasks = "many"\n',
            "[env.taskset] num_tasks='many': Input should be a valid integer",
        ),
    ],
)
def test_a_wrong_environment_is_one_line_with_its_file(tmp_path, monkeypatch, table, expected):
    from tests.helpers import ROOT
    from verifiers_rl.cli.config import load_run_config
    from verifiers_rl.envs.base import InvalidEnvironmentError

    monkeypatch.syspath_prepend(str(ROOT / "tests" / "v1"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    path = tmp_path / "mine.toml"
    path.write_text('model = "org/model"\n' + table)
    with pytest.raises(InvalidEnvironmentError) as caught:
        load_run_config(path, checks_model=False).load_envs()
    line = str(caught.value)
    assert line.startswith(f"{path}: ") and "\n" not in line
    assert expected.format(folder=tmp_path) in line
