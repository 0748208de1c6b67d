"""The documents: links lead somewhere, code blocks run or parse, names of options, metrics and
commands exist, the generated page is fresh, the site builds.
"""

import ast
import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import sys
import tomllib
import xml.etree.ElementTree
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

import verifiers_rl
import verifiers_rl.sft
from tests.fake_run import write_fake_run
from tests.helpers import EXAMPLE, ROOT, load_module, make_tiny_model, make_tokenizer, run_python
from tests.test_weight_sync import with_trained_adapter
from verifiers_rl import RLConfig, RLTrainer
from verifiers_rl.advantages import ADVANTAGES, as_numbers
from verifiers_rl.cli import flat
from verifiers_rl.cli.config import RunConfig, load_run_config
from verifiers_rl.cli.setup import workspace_files
from verifiers_rl.config import GroupFilter
from verifiers_rl.envs.base import module_name
from verifiers_rl.envs.make import make_runner
from verifiers_rl.losses import LOSSES, MASKS, LossInputs, check_outputs
from verifiers_rl.sft import SFTConfig, SFTTrainer
from verifiers_rl.sft.conversations import Tokenization
from verifiers_rl.sft.main import DataTable, SFTRunConfig
from verifiers_rl.types import Rollout, Sample
from verifiers_rl.wiring import Replaced, check_arguments

DOCS = ROOT / "docs"
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in (
        *sorted(DOCS.glob("*.md")),
        *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md")),
        ROOT / "benchmarks/README.md",
        ROOT / "examples/README.md",
        *sorted((ROOT / "examples").glob("*/README.md")),
    )
]
ENVIRONMENTS = ROOT / "examples/environments"


def read(page):
    return (ROOT / page).read_text()


def blocks(page, language):
    """The fenced blocks of a page in this language."""
    found = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", read(page), re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def pages_with(language):
    return [page for page in PAGES if blocks(page, language)]


def prose(page):
    return re.sub(r"^```.*?^```$", "", read(page), flags=re.MULTILINE | re.DOTALL)


# --- Links ----------------------------------------------------------------------------------------


def anchors(page):
    """The anchors of a page's headings, as code hosts make them."""
    found = []
    for title in re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return found


def links(page):
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


@pytest.mark.parametrize("page", PAGES)
def test_links_within_the_repository_lead_somewhere(page):
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists() and target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target.relative_to(ROOT).as_posix()), link
        if target.suffix == ".svg":
            assert xml.etree.ElementTree.parse(target).getroot().tag.endswith("svg")
        assert target.suffix != ".png" or target.read_bytes().startswith(b"\x89PNG"), link


def test_the_list_of_pages_has_each_page_once():
    listed = [link for link in links("docs/index.md") if re.fullmatch(r"\w+\.md", link)]
    assert len(listed) == len({*listed})
    assert {*listed} == {path.name for path in DOCS.glob("*.md")} - {"index.md"}


def test_llms_txt_is_a_title_a_summary_and_the_list_of_pages():
    """Its form is that of llmstxt.org. Who changes index.md copies the list."""
    head, _, pages = read("docs/llms.txt").partition("\n## ")
    assert re.match(r"# verifiers_rl\n\n> .+\n\n", head)
    assert pages == read("docs/index.md").partition("\n## ")[2]


def test_the_image_copies_files_that_exist_and_installs_extras_that_exist():
    sent = {*read(".dockerignore").splitlines()}
    ignored = {line.rstrip("/") for line in read(".gitignore").splitlines()}
    assert {line for line in ignored if line.startswith("examples/")} <= sent
    for instruction, rest in re.findall(r"^([A-Z]+) (.*)", read("Dockerfile"), re.MULTILINE):
        if instruction == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists() and f"!{source}" in sent, rest
        for line in rest.split(" && ") if instruction == "RUN" else ():
            check_command(shlex.split(line), "Dockerfile")


# --- The generated page ---------------------------------------------------------------------------


@cache
def reference():
    return load_module(DOCS / "make_reference.py")


def test_the_reference_is_fresh():
    """`make reference` writes it. What comes from transformers depends on its version."""
    page, fresh = read("docs/reference.md"), reference().page()
    (version,) = re.findall(r"of\s+transformers ([\d.]+); other", page)
    if version != transformers.__version__:
        page, fresh = (text.partition("\n## Refused\n")[0] for text in (page, fresh))
    assert page == fresh, "docs/reference.md is stale: run `make reference`"


def test_the_reference_has_every_option_and_says_what_the_code_checks():
    own = {name for names in reference().sections().values() for name in names}
    base = {option.name for option in fields(transformers.TrainingArguments)}
    assert {option.name for option in fields(RLConfig)} - base <= own
    page = read("docs/reference.md")
    helps = reference().helps(RLConfig)
    assert len(own - base) > 30 and [n for n in own - base if len(helps[n]) < 15] == []
    assert "| `batch_size` | an integer >= 1 | `512` | Rollouts of one optimizer step" in page
    assert '| `lora_sync` | one of auto, adapter, merged | `"auto"` |' in page
    assert "| `[trainer]` `class` |" in page and "| `per_device_train_batch_size` | set" in page


# --- Python ---------------------------------------------------------------------------------------


class TrainerOfDocs:
    """In place of `RLTrainer`: checks its arguments as that does, and loads no model."""

    made: list = []  # noqa: RUF012  # of all blocks; emptied by the test

    def __init__(self, *args, **kwargs):
        bound = inspect.signature(RLTrainer.__init__).bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        parts = ("loss_fn", "advantage_fn", "example_order", "orchestrator", "weight_sync")
        replaced = Replaced(*(given[name] for name in parts))
        check_arguments(
            given["model"], given["env"], given["args"], given["processing_class"], replaced, {}
        )
        self.env, self.args, self.replaced = given["env"], given["args"], replaced
        self.made.append(self)

    def train(self, resume_from_checkpoint=None): ...

    def evaluate(self):
        return {"eval_reward": 0.5}


class SFTTrainerOfDocs:
    """In place of `SFTTrainer`: makes the tokens of its rows, and loads no model."""

    def __init__(self, *args, **kwargs):
        bound = inspect.signature(SFTTrainer.__init__).bind(self, *args, **kwargs)
        assert isinstance(bound.arguments["args"], SFTConfig)
        tokenizer = make_tokenizer()
        Tokenization(tokenizer).of_rows(bound.arguments["train_dataset"], "it")

    def train(self, resume_from_checkpoint=None): ...


def make_inputs():
    return LossInputs(
        trainer_logprobs=torch.tensor([-0.5, -1.0], requires_grad=True),
        inference_logprobs=torch.tensor([-0.7, -1.0]),
        advantages=torch.tensor([2.0, -1.0]),
        weights=torch.ones(2),
        sequence_ids=torch.tensor([0, 1]),
        entropy=torch.ones(2),
        reference_logprobs=torch.tensor([-0.6, -0.9]),
    )


def make_group():
    sample = Sample([1, 2], [False, True], [0.0, -0.5], [-1, 0])
    return [Rollout(0, "", reward=r, num_turns=1, samples=[sample]) for r in (0.0, 1.0)]


@pytest.fixture
def in_docs_folder(tmp_path, monkeypatch):
    """A folder with what the pages say is there: environments, a trained adapter, a prompt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ENVIRONMENTS)
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.setattr(verifiers_rl, "RLTrainer", TrainerOfDocs, raising=False)
    monkeypatch.setattr(verifiers_rl, "tiny_model", str, raising=False)
    monkeypatch.setattr(verifiers_rl.sft, "SFTTrainer", SFTTrainerOfDocs, raising=False)
    prompt = tmp_path / "outputs/prompt/best_system_prompt.txt"
    prompt.parent.mkdir(parents=True)
    prompt.write_text("Be brief.")
    (tmp_path / "secrets.env").write_text("SEARCH_KEY=x\n")
    monkeypatch.setattr(TrainerOfDocs, "made", [])
    return tmp_path


def write_adapter(folder, tokenizer):
    """A run's folder after training with LoRA, of the tests' tiny model."""
    make_tiny_model().save_pretrained(folder / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    with_trained_adapter(model).save_pretrained(folder / "outputs/rl")
    tokenizer.save_pretrained(folder / "outputs/rl")


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_runs(page, in_docs_folder, tokenizer):
    """Each block is run as a script, with a trainer that only checks what it is given."""
    if page == "docs/resume.md":
        write_adapter(in_docs_folder, tokenizer)
    if page == "docs/watching.md":
        write_fake_run(in_docs_folder / "outputs/rl", 400, num_steps=20, tokens_of=0.5)
    # As a program, an environment with tools would serve them.
    name = "imported" if page == "docs/environments.md" else "__main__"
    for text in blocks(page, "python"):
        names = {"__name__": name, "__file__": f"{in_docs_folder}/train.py"}
        if page == "README.md" and "import" not in text:  # a fragment
            names |= {name: getattr(verifiers_rl, name) for name in verifiers_rl.__all__}
            names |= {"model": "org/model", "env": "number_guess", "args": RLConfig(use_cpu=True)}
        exec(compile(text, page, "exec"), names)
        for function in [value for value in names.values() if inspect.isfunction(value)]:
            if "LossInputs" in str(inspect.signature(function)):
                check_outputs(function(make_inputs()), make_inputs())
        made, TrainerOfDocs.made = TrainerOfDocs.made, []
        assert made or "RLTrainer(" not in text
        for trainer in made:
            runner = make_runner(trainer.env, "http://unused", tokenizer, trainer.args)
            assert sum(runner.sizes("train")) > 0
            if trainer.replaced.advantage_fn is not None:
                as_numbers(trainer.replaced.advantage_fn(make_group()), 2)
    if page == "docs/resume.md":
        merged = transformers.AutoModelForCausalLM.from_pretrained("outputs/merged")
        ids = torch.arange(5)[None]
        assert not torch.equal(merged(ids).logits, make_tiny_model()(ids).logits)


def test_the_environments_page_has_the_files_as_they_are():
    shown = blocks("docs/environments.md", "python")
    files = {path.read_text() for path in ENVIRONMENTS.glob("*.py")}
    assert len(files) == 4 and {*shown} == files


# --- TOML, JSON -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", pages_with("toml"))
def test_toml_is_a_run_that_vf_rl_takes(page, in_docs_folder):
    """A block without a model or an environment gets one; an environment of ours is loaded too."""
    for text in blocks(page, "toml"):
        data = tomllib.loads(text)
        if page == "docs/reference.md":
            continue  # it shows alternatives beside each other
        if "model" not in data:
            text = 'model = "org/model"\n' + text
        kind = SFTRunConfig if "data" in data else RunConfig
        if "env" not in data and kind is RunConfig:
            text += '\n[env.taskset]\nid = "number_guess"\n'
        path = in_docs_folder / "config.toml"
        path.write_text(text)
        config = load_run_config(path, checks_model=False, kind=kind)
        config.make_args(use_cpu=True, bf16=False)
        envs = config.envs if kind is RunConfig else []
        if envs and all(importlib.util.find_spec(module_name(env.id)) for env in envs):
            config.load_envs(with_teachers=False)


def test_blocks_are_of_a_language_that_is_checked():
    known = {"", "bash", "json", "python", "text", "toml"}
    for page in PAGES:
        used = re.findall(r"^```(\w*)[^\n]*\n.*?^```$", read(page), re.MULTILINE | re.DOTALL)
        assert {*used} <= known, page
        assert read(page).count("\n```") % 2 == 0, page
        for text in blocks(page, "json"):
            json.loads(text)


# --- Commands -------------------------------------------------------------------------------------

COMMANDS = ("view", "generate", "replay", "report")  # of vf-rl
# Programs of others; what they are given is theirs.
OTHERS = {"cd", "cp", "docker", "export", "git", "nvidia-smi", "openssl", "source", "ssh", "uv"}
OTHERS |= {"/opt/venv/bin/pip", "apt-get", "hf", "python3", "rm"}


def commands(page):
    """The commands of the bash blocks, each as its words, without variables in front."""
    for text in blocks(page, "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(re.sub(r"\$\(.*?\)", "value", line), comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            if words:
                yield words


@cache
def help_of(program, *commands):
    scripts = tomllib.loads(read("pyproject.toml"))["project"]["scripts"]
    return run_python("-m", scripts[program].partition(":")[0], *commands, "--help").stdout


@cache
def server_flags():
    """The flags of vLLM's server, from its source: importing it takes half a minute."""
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations
    sources = [Path(folder) / "engine/arg_utils.py"]
    sources += sorted(Path(folder).rglob("cli_args.py"))
    flags = {"--help"}
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and str(node.value).startswith("--"):
                flags.add(node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                flags.add("--" + node.target.id.replace("_", "-"))
    return flags


def check_command(words, page):
    program, *rest = words
    options = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    if program == "make":
        targets = re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE)
        assert all("=" in word or word in targets for word in rest), words
    elif program in ("vf-vllm", "vllm"):
        assert {*options} <= server_flags(), words
    elif program == "vf-gepa":  # whose options depend on the environment
        program = Path(sys.executable).parent / program
        run_python(program, *rest, "--dry-run", folder=".", PYTHONPATH=EXAMPLE)
    elif program.startswith("vf-"):
        tables = {field.alias or name for name, field in RunConfig.model_fields.items()}
        for option in options:
            key = option[2:].replace("-", "_")
            if key.startswith("trainer.args."):
                kind = SFTConfig if program == "vf-sft" else RLConfig
                assert key.rpartition(".")[2] in {f.name for f in fields(kind)}, words
            elif program == "vf-sft" and key.startswith("data."):
                assert key[5:] in DataTable.model_fields, words
            elif key.partition(".")[0] in tables or key in flat.MOVED:
                assert "." in key or key == "model" or key in flat.MOVED, words
            else:
                said = help_of(program, *(word for word in rest[:1] if word in COMMANDS))
                assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", said), (option, words)
    elif program == "torchrun" or words[:2] == ["accelerate", "launch"]:
        parser = launch_command_parser() if program == "accelerate" else get_args_parser()
        known = parser._option_string_actions
        script = next(i for i, word in enumerate(rest) if word.endswith(".py") or word == "-m")
        assert {word for word in rest[:script] if word.startswith("--")} <= {*known}, words
        if "--config_file" in rest:
            assert (ROOT / rest[rest.index("--config_file") + 1]).is_file(), words
    elif program == "python" and rest[:2] == ["-m", "pytest"]:
        assert all((ROOT / path).is_file() for path in rest[2:]), words
    elif program in ("python", ".venv/bin/python"):
        script = ROOT / rest[0]
        in_workspace = workspace_files("skeleton").get(rest[0], b"").decode()
        assert script.is_file() or in_workspace, words  # after vf-setup
        source = script.read_text() if script.is_file() else in_workspace
        assert all(f'"{option}"' in source for option in options), words
    else:
        assert program in OTHERS, f"{page}: {words}"
        if program == "cp":
            assert (ROOT / rest[0]).is_file(), words
        for extras in re.findall(r"\.\[([\w,]+)\]", " ".join(rest)):
            known = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
            assert {*extras.split(",")} <= {*known}, words


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("bash"))
def test_commands_and_their_options_exist(page, in_docs_folder):
    for text in blocks(page, "bash"):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=10)
    for words in commands(page):
        check_command(words, page)


# --- Names ----------------------------------------------------------------------------------------


def metrics():
    return {*re.findall(r"^\| `([\w/@]+)` \|", read("docs/metrics.md"), re.MULTILINE)}


def known_names():
    options = {option.name for option in fields(RLConfig)}
    tables = {"gpus", "model", "env", "weight", "class", "max_turns", "args", "replicas"}
    tables |= {"trainer_nodes", "inference_nodes", "import_from", "env_file"}
    tables.add("chat_template_kwargs")  # of an agent's sampling
    flags = {flag[2:].replace("-", "_") for flag in server_flags()}
    arguments = {"loss_fn", "advantage_fn", "example_order", "peft_config"}
    arguments |= {option.name for option in fields(GroupFilter)}
    arguments |= {"eps_low", "eps_high", "max_ratio", "min_ratio", "completion", "prompt"}
    return options | tables | flags | arguments | metrics() | {*LOSSES, *MASKS, *ADVANTAGES}


@pytest.mark.parametrize("name", ["troubleshooting", "scaling", "from_trl"])
def test_names_of_options_and_metrics_exist(name):
    known, page = known_names(), prose(f"docs/{name}.md")
    # In tables about TRL, only our column is checked.
    if name == "from_trl":
        rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
        page = "\n".join(row[-2] if len(row) == 4 else row[-1] for row in rows)
    found = set()
    for code in re.findall(r"`([^`]+)`", page):
        words = re.match(r"([a-z]\w*(?:/\w+)?)(?: = .*)?$", code)
        if words and ("_" in code or " = " in code):
            found.add(words.group(1))
    foreign = {"max_completion_length", "epsilon_high"}
    unknown = {
        word
        for word in found - foreign
        if word not in known and f"{word.partition('/')[0]}/NAME" not in known
        and not (word.startswith("eval_") and word.removeprefix("eval_") in known)
    }  # fmt: skip
    assert len(found) > 4 and not unknown


# --- The site -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    words = ["-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", tmp_path / "trees"]
    run_python(*words, DOCS, tmp_path / "site")
    for path in DOCS.glob("*.md"):
        assert (tmp_path / f"site/{path.stem}.html").is_file()
    index = (tmp_path / "site/index.html").read_text()
    assert "Change something" in index and "troubleshooting.html" in index
