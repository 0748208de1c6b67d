"""A wrong configuration ends vf-rl with one line, which names the file, the key, the value and the
fix.
"""

import sys

import pytest

from verifiers_rl.cli import rl

HEAD = 'model = "org/model"\n[env.taskset]\nid = "number_guess"\n'
OURS = HEAD + "[trainer.args]\n"
ENVS = 'model = "org/model"\n[[env]]\nid = "e"\n[[env]]\n'
FLAT = 'model = "org/model"\n{}\n[[env]]\nid = "number_guess"\n'
TEACHER = '[[teacher]]\nname = "big"\nmodel = "org/big"\n'
LEARNS = ENVS + 'id = "f"\nalgorithm = "opd"\nteacher = "big"\n'

# What is in mine.toml, the words behind it, and what the line must have.
WRONG = {
    # Keys that do not exist, at every level.
    "a key at the top": (
        'modle = "x"\n', "", "mine.toml: the top level has an unknown key 'modle'; did you mean "
        "'model'?",
    ),
    "a table at the top": (
        HEAD + "[trainr]\ngpus = 1\n", "", "mine.toml: the top level has an unknown key 'trainr'; "
        "did you mean 'trainer'?",
    ),
    "a key of the trainer": (
        HEAD + "[trainer]\ngpu = 1\n", "", "mine.toml: [trainer] has an unknown key 'gpu'; did you "
        "mean 'gpus'?",
    ),
    "an option in the wrong table": (
        HEAD + "[trainer]\nmax_steps = 1\n", "", "mine.toml: [trainer] has an unknown key "
        "'max_steps'; known: args, class, gpus; options of the trainer belong into [trainer.args]",
    ),
    "an option": (
        OURS + "batchsize = 8\n", "", "mine.toml: [trainer.args] has an unknown key 'batchsize'; "
        "did you mean 'batch_size'?",
    ),
    "an option of another library": (
        OURS + "num_generations = 8\n", "", "mine.toml: [trainer.args] has an unknown key "
        "'num_generations'; docs/reference.md lists the options",
    ),
    "a key of an environment": (
        ENVS + 'id = "f"\nwight = 2\n', "", "mine.toml: [[env]] 2 has an unknown key 'wight'; did "
        "you mean 'weight'?",
    ),
    "a flat key": (
        FLAT.format("[sampling]\ntemprature = 0.5"), "", "mine.toml: [sampling] has an unknown key "
        "'temprature'; did you mean 'temperature'?",
    ),
    "a key of the command line": (
        OURS, "--trainer.args.max_stepz 3", "the command line: [trainer.args] has an unknown key "
        "'max_stepz'; did you mean 'max_steps'?",
    ),
    "an option of vf-rl": (
        OURS, "--overwite", "the command line: the top level has an unknown key '--overwite'; did "
        "you mean '--overwrite'?",
    ),
    # Values that cannot be.
    "a number as text": (
        OURS + 'max_steps = "ten"\n', "", "mine.toml: [trainer.args] max_steps='ten': must be an "
        "integer",
    ),
    "text on the command line": (
        OURS + "max_steps = 5\n", "--trainer.args.max_steps=ten", "the command line: "
        "[trainer.args] max_steps='ten': must be an integer",
    ),
    "true in quotes": (
        OURS + 'use_lora = "true"\n', "", "mine.toml: [trainer.args] use_lora='true': must be true "
        "or false without quotes",
    ),
    "a batch that groups do not fill": (
        OURS + "batch_size = 100\n", "", "mine.toml: [trainer.args] batch_size=100 is not a "
        "multiple of rollouts_per_example=16; try batch_size=112",
    ),
    "a number out of range": (
        OURS + "temperature = 0\n", "", "mine.toml: [trainer.args] temperature=0: must be a number "
        "> 0",
    ),
    "a name of a loss": (
        OURS + 'loss = "grpo"\n', "", "mine.toml: [trainer.args] loss='grpo': must be one of cispo",
    ),
    "an option that does nothing": (
        OURS + "kl_target = 0.1\n", "", "mine.toml: [trainer.args] kl_target=0.1: without effect "
        "if kl_beta=0; set kl_beta",
    ),
    "a stop string": (
        OURS + 'stop = [""]\n', "", "mine.toml: [trainer.args] stop=['']: must be a list of "
        "strings, none of them empty",
    ),
    "GPUs": (
        HEAD + "[inference]\ngpus = -1\n", "", "mine.toml: [inference] gpus=-1: must be an "
        "integer >= 0",
    ),
    "a trainer's class": (
        HEAD + '[trainer]\nclass = "MyTrainer"\n', "", "mine.toml: [trainer] class='MyTrainer': "
        "must be of the form module:name",
    ),
    "no model": (HEAD.partition("\n")[2], "", "mine.toml: model is missing; set it to a string"),
    "no environment": ('model = "m"\n', "", "mine.toml: [env]: id is missing; set it to a string"),
    "a weight": (
        ENVS + 'id = "f"\nweight = 0\n', "", "mine.toml: [[env]] 2: weight=0: must be a number > 0",
    ),
    "two names": (ENVS + 'id = "e"\n', "", "two [[env]] are named 'e'; give one another name"),
    "what an environment is for": (
        ENVS + 'id = "f"\nonly = "test"\n', "", "mine.toml: [[env]] 2: only='test': must be one of "
        "train, eval, or left out",
    ),
    "a flag that has its own place": (
        HEAD + "[inference.args]\nport = 3\n", "", "mine.toml: [inference.args] has 'port'; set "
        "vllm_server_port in [trainer.args] instead",
    ),
    "a file of secrets": (
        'env_file = "none.env"\n' + HEAD, "", "mine.toml: env_file='none.env': there is no file ",
    ),
    "a folder of modules": (
        'import_from = ["none"]\n' + HEAD, "", "mine.toml: import_from='none': there is no folder ",
    ),
    "an item that is not there": (
        ENVS + 'id = "f"\n', "--env.2.weight 3", "the command line: env.2.weight: there is no item "
        "2; the last one of the 2 env is 1",
    ),
    "a key of one of several environments": (
        ENVS + 'id = "f"\n', "--env.args.n 3", "the command line: env.args.n: there are 2 [[env]]; "
        "begin with the number of one, such as --env.0.args",
    ),
    "an empty table for one of several environments": (
        ENVS + 'id = "f"\n', "--env.args {}", "there are 2 [[env]]; begin with the number of one",
    ),
    "a word": (
        OURS, "mine.toml", "the command line: 'mine.toml' belongs to no key; files are given as",
    ),
    "no TOML": (OURS + "max_steps 5\n", "", "mine.toml: Expected '=' after a key in a key/value"),
    # The flat layout.
    "two layouts": (
        FLAT.format("batch_size = 64") + "[sampling]\nmax_tokens = 5\n[trainer]\ngpus = 1\n", "",
        "mine.toml: two layouts are mixed: batch_size (in ours [trainer.args] batch_size), "
        "[sampling] of the flat one with [trainer] of ours; write one of them",
    ),
    "a flat value": (
        FLAT.format("[sampling]\ntop_p = 1.5"), "", "mine.toml: [sampling] top_p=1.5: must be > 0 "
        "and <= 1",
    ),
    "a flat value of another name here": (
        FLAT.format("oversampling_factor = 2.0"), "", "mine.toml: oversampling_factor=2.0: without "
        "effect unless min_reward_variance, min_reward or max_reward is set",
    ),
    "accumulation": (
        FLAT.format("gradient_accumulation_steps = 4"), "", "mine.toml: "
        "gradient_accumulation_steps=4: a batch is one optimizer step, which is split as memory "
        "allows; set batch_size to all rollouts of a step (batch_size * 4), and remove it",
    ),
    "two keys for one option": (
        FLAT.format("lora_alpha = 16\n[lora]\nalpha = 32"), "", "mine.toml: [lora] alpha=32: "
        "lora_alpha=16 sets the same; remove one of the two",
    ),
    "a penalty without a weight": (
        FLAT.format("[kl_penalty]\ntarget_kl = 0.1"), "", "mine.toml: [kl_penalty] lacks beta",
    ),
    "neither true nor false": (
        FLAT.format('[difficulty_filter]\nenabled = "yes"'), "", "mine.toml: [difficulty_filter] "
        "enabled='yes': must be true or false",
    ),
    "all examples": (
        FLAT.format("[eval]\nnum_examples = -1"), "", "mine.toml: [eval] num_examples=-1 (all of "
        "them): must be an integer >= 1; write how many",
    ),
    "rollouts of one evaluation": (
        FLAT.format('[[eval.env]]\nid = "e"\nrollouts_per_example = 4'), "", "mine.toml: "
        "[[eval.env]] 1 rollouts_per_example=4: is the same for all environments of evaluations; "
        "set it under [eval]",
    ),
    "a seed of sampling": (
        FLAT.format("[sampling]\nseed = 3"), "", "mine.toml: [sampling] seed=3: cannot be "
        "honoured: rollouts of a group must differ; remove it",
    ),
    "a table that cannot be honoured": (
        FLAT.format("[buffer]\neasy_threshold = 0.8"), "", "mine.toml: [buffer] cannot be "
        "honoured: groups are filtered by [difficulty_filter]; remove it",
    ),
    # Teachers.
    "a teacher that is not there": (
        LEARNS.replace('"big"', '"bigg"') + TEACHER + "gpus = 1\n", "", "mine.toml: [[env]] 2: "
        "teacher='bigg' is the name of no [[teacher]]; did you mean 'big'?",
    ),
    "no teacher at all": (
        LEARNS, "", "mine.toml: [[env]] 2: teacher='big' is the name of no [[teacher]]; there is "
        "no [[teacher]]; add one",
    ),
    "a teacher of nobody": (
        OURS + TEACHER + "gpus = 1\n", "", "mine.toml: [[teacher]] 1: no environment learns from "
        "teacher 'big'; set teacher = \"big\" in an [[env]] (write [[env]] in place of [env]), or "
        "remove it",
    ),
    "a teacher that runs and is started": (
        LEARNS + TEACHER + 'base_url = "http://a:1"\ngpus = 1\n', "", "mine.toml: [[teacher]] 1: "
        "gpus is of a server that vf-rl starts, and base_url of one that runs already; remove one",
    ),
    "a key of a teacher": (
        LEARNS + TEACHER + 'baseurl = "http://a:1"\n', "", "mine.toml: [[teacher]] 1 has an "
        "unknown key 'baseurl'; did you mean 'base_url'?",
    ),
    "GPUs of a teacher": (
        LEARNS + TEACHER + "gpus = -1\n", "", "mine.toml: [[teacher]] 1: gpus=-1 must be an "
        "integer >= 0 (0: CPU)",
    ),
    "a teacher's URL": (
        LEARNS + TEACHER + 'base_url = "a:1"\n', "", "mine.toml: [[teacher]] 1: base_url='a:1' "
        "must be like http://host:8000",
    ),
    "a teacher's key": (
        LEARNS + TEACHER + 'gpus = 1\nkey_variable = "KEY"\n', "", "mine.toml: [[teacher]] 1: "
        "key_variable is of a server that runs already, and without base_url vf-rl starts it; set",
    ),
    "a key on a command line": (
        LEARNS + TEACHER + 'gpus = 1\n[teacher.args]\n"api-key" = "k"\n', "", "mine.toml: "
        "[[teacher]] 1: [teacher.args] has 'api_key'; vf-rl chooses it",
    ),
    "a teacher without a model": (
        LEARNS + '[[teacher]]\nname = "big"\ngpus = 1\n', "", "mine.toml: [[teacher]] 1 model is "
        "missing; set it to a string",
    ),
    "a teacher without a name": (
        LEARNS + '[[teacher]]\nmodel = "m"\ngpus = 1\n', "", "mine.toml: [[teacher]] 1: name=None "
        "must be a short name of letters, digits",
    ),
    "a name that is no name of a file": (
        LEARNS + TEACHER.replace("big", "org/big") + "gpus = 1\n", "", "mine.toml: [[teacher]] 1: "
        "name='org/big' must be a short name of letters, digits",
    ),
    "two teachers of one name": (
        LEARNS + 2 * (TEACHER + "gpus = 1\n"), "", "mine.toml: [[teacher]] 2: two [[teacher]] are "
        "named 'big'; give one another name",
    ),
    "one [teacher]": (
        LEARNS + TEACHER.replace("[[", "[").replace("]]", "]"), "", "mine.toml: teacher must be "
        "one or several [[teacher]]",
    ),
    "a key of one of several teachers": (
        LEARNS + TEACHER + "gpus = 1\n", "--teacher.timeout_s 3", "the command line: "
        "teacher.timeout_s: there are 1 [[teacher]]; begin with the number of one, such as "
        "--teacher.0.timeout_s",
    ),
    "learning of the only environment": (
        HEAD.replace("[env.taskset]", '[env]\nalgorithm = "opd"\n[env.taskset]'), "", "mine.toml: "
        "[env]: algorithm is of one of several environments; write [[env]] in place of [env]",
    ),
    "an algorithm": (
        ENVS + 'id = "f"\nalgorithm = "grpo"\n', "", "mine.toml: [[env]] 2: algorithm='grpo' must "
        "be one of 'rl', 'opd', ",
    ),
    "an algorithm without its teacher": (
        ENVS + 'id = "f"\nalgorithm = "opd"\n', "", "mine.toml: [[env]] 2: algorithm='opd' needs a "
        "teacher; set teacher",
    ),
    "a hint": (
        LEARNS + "hint = 3\n" + TEACHER + "gpus = 1\n", "", "mine.toml: [[env]] 2: hint=3: must "
        "be a string",
    ),
    "a key about learning": (
        LEARNS + "distil_coef = 1\n" + TEACHER + "gpus = 1\n", "", "mine.toml: [[env]] 2 has an "
        "unknown key 'distil_coef'; did you mean 'distill_coef'?",
    ),
    "a teacher of a flat file": (
        FLAT.format("max_steps = 3") + 'name = "f"\nteacher = "big"\n', "", "mine.toml: [[env]] 1: "
        "teacher='big' is the name of no [[teacher]]",
    ),
    "a teacher of evaluations": (
        FLAT.format('[[eval.env]]\nid = "e"\nteacher = "big"') + TEACHER + "gpus = 1\n", "",
        "mine.toml: [[eval.env]] 1: teacher has no effect beside only='eval'; remove one",
    ),
}  # fmt: skip


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """What vf-rl says to a TOML and words, without its name; it must be one line."""
    monkeypatch.chdir(tmp_path)

    def said(text, words):
        (tmp_path / "mine.toml").write_text(text)
        monkeypatch.setattr(sys, "argv", ["vf-rl", "--dry-run", "@", "mine.toml", *words.split()])
        with pytest.raises(SystemExit) as ended:
            rl.run()
        stdout, stderr = capsys.readouterr()
        assert ended.value.code == 1 and stdout == ""
        (line,) = stderr.splitlines()
        assert not (tmp_path / "outputs").exists()
        return line.removeprefix("vf-rl: error: ").replace(f"{tmp_path}/", "")

    return said


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_configuration_is_one_line_that_says_what_to_change(said, what):
    text, words, expected = WRONG[what]
    line = said(text, words)
    assert expected in line
    assert len(WRONG) > 25


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (
            '[env]\nid = "someone/no-such-game"\n',
            "[env] id='someone/no-such-game': no module 'no_such_game' is installed nor beside the "
            "TOML in {folder}; install it: prime env install someone/no-such-game",
        ),
        (
            '[env.taskset]\nid = "someone/no-such-game@1.2"\n',
            "[env.taskset] id='someone/no-such-game@1.2': no module 'no_such_game' is installed "
            "nor beside the TOML in {folder}; install it: prime env install "
            "someone/no-such-game@1.2",
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
