"""The documents: links lead somewhere, code blocks run or parse, names of options, metrics and
commands exist, the generated page is fresh, the site builds.
"""

import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import transformers

import verifiers_rl
import verifiers_rl.sft
from tests.fake_run import write_fake_run
from tests.helpers import EXAMPLE, ROOT, load_example, make_tiny_model, run_python
from tests.test_losses import make_inputs
from tests.test_weight_sync import with_trained_adapter
from verifiers_rl import RLConfig, RLTrainer
from verifiers_rl.advantages import as_numbers
from verifiers_rl.cli import flat
from verifiers_rl.cli.config import RunConfig, check_trainer_args, load_run_config
from verifiers_rl.envs.make import make_runner
from verifiers_rl.losses import check_outputs
from verifiers_rl.sft import SFTConfig
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
        ROOT / "benchmarks" / "README.md",
        ROOT / "examples" / "README.md",
        *sorted((ROOT / "examples").glob("*/README.md")),
    )
]
ENVIRONMENTS = ROOT / "examples" / "environments"


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
    found: list[str] = []
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


def test_the_list_of_pages_has_each_page_once_and_is_that_of_llms_txt():
    """Its form is that of llmstxt.org. Who changes index.md copies the list."""
    listed = [link for link in links("docs/index.md") if re.fullmatch(r"\w+\.md", link)]
    assert sorted(listed) == sorted({path.name for path in DOCS.glob("*.md")} - {"index.md"})
    head, _, pages = read("docs/llms.txt").partition("\n## ")
    assert re.match(r"# verifiers_rl\n\n> .+\n\n", head)
    assert pages == read("docs/index.md").partition("\n## ")[2]


def test_the_image_copies_files_that_exist():
    sent = {*read(".dockerignore").splitlines()}
    for files in re.findall(r"^COPY (.*) \S+$", read("Dockerfile"), re.MULTILINE):
        for source in files.split():
            assert (ROOT / source).exists() and f"!{source}" in sent


# --- The generated page ---------------------------------------------------------------------------


@cache
def reference():
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    assert "| `batch_size` | an integer >= 1 | `512` | Rollouts of one optimizer step" in page
    assert '| `lora_sync` | one of auto, adapter, merged | `"auto"` |' in page


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

    def __init__(self, model, args, train_dataset, **others):
        tokenizer = load_example("warm_start").make_tokenizer()
        Tokenization(tokenizer).of_rows(train_dataset, "it")

    def train(self): ...


def make_group():
    sample = Sample([1, 2], [False, True], [0.0, -0.5], [-1, 0])
    return [Rollout(0, "", reward=r, num_turns=1, samples=[sample]) for r in (0.0, 1.0)]


@pytest.fixture
def in_docs_folder(tmp_path, monkeypatch):
    """A folder with what the pages say is there: environments, a trained adapter, a prompt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for module, name, stand_in in (
        (verifiers_rl, "RLTrainer", TrainerOfDocs),
        (verifiers_rl, "tiny_model", str),
        (verifiers_rl.sft, "SFTTrainer", SFTTrainerOfDocs),
    ):
        monkeypatch.setattr(module, name, stand_in, raising=False)
    prompt = tmp_path / "outputs" / "prompt" / "best_system_prompt.txt"
    prompt.parent.mkdir(parents=True)
    prompt.write_text("Be brief.")
    (tmp_path / "secrets.env").write_text("SEARCH_KEY=x\n")
    monkeypatch.setattr(TrainerOfDocs, "made", [])
    return tmp_path


def write_adapter(folder, tokenizer):
    """A run's folder after training with LoRA, of the tests' tiny model."""
    make_tiny_model().save_pretrained(folder / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    with_trained_adapter(model).save_pretrained(folder / "outputs" / "rl")
    tokenizer.save_pretrained(folder / "outputs" / "rl")


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_runs(page, in_docs_folder, tokenizer):
    """Each block is run as a script, with a trainer that only checks what it is given."""
    if page == "docs/resume.md":
        write_adapter(in_docs_folder, tokenizer)
    if page == "docs/watching.md":
        write_fake_run(in_docs_folder / "outputs" / "rl", 400, num_steps=20, tokens_of=0.5)
    # As a program, an environment with tools would serve them.
    name = "imported" if page == "docs/environments.md" else "__main__"
    inputs = make_inputs([0.6, 0.4], [0.5, 0.4], [2.0, -1.0], [0, 1], reference_logprobs=[0.5, 0.4])
    for text in blocks(page, "python"):
        names = {"__name__": name, "__file__": str(in_docs_folder / "train.py")}
        if page == "README.md" and "import" not in text:  # a fragment
            names |= {name: getattr(verifiers_rl, name) for name in verifiers_rl.__all__}
            names |= {"model": "org/model", "env": "number_guess", "args": RLConfig(use_cpu=True)}
        exec(compile(text, page, "exec"), names)
        for function in [value for value in names.values() if inspect.isfunction(value)]:
            if "LossInputs" in str(inspect.signature(function)):
                check_outputs(function(inputs), inputs)
        made, TrainerOfDocs.made = TrainerOfDocs.made, []
        assert made or "RLTrainer(" not in text
        for trainer in made:
            runner = make_runner(trainer.env, "http://unused", tokenizer, trainer.args)
            assert sum(runner.sizes("train")) > 0
            if trainer.replaced.advantage_fn is not None:
                as_numbers(trainer.replaced.advantage_fn(make_group()), 2)


def test_the_environments_page_has_the_files_as_they_are():
    shown = blocks("docs/environments.md", "python")
    files = {path.read_text() for path in ENVIRONMENTS.glob("*.py")}
    assert len(files) == 4 and {*shown} == files


# --- TOML -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", pages_with("toml"))
def test_toml_is_a_run_that_vf_rl_takes(page, in_docs_folder):
    """A block without a model or an environment gets one."""
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
        check_trainer_args(config)
        config.make_args(use_cpu=True, bf16=False)


# --- Commands -------------------------------------------------------------------------------------


@cache
def known_options():
    """The last parts of the names of options: those of tables, and those that a help has."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    words = [[name] for name in project["scripts"] if name not in ("vf-vllm", "vf-eval")]
    words += [["vf-rl", command] for command in ("view", "generate", "replay", "report")]
    names = {*flat.MOVED, *RunConfig.model_fields, *DataTable.model_fields}
    for program, *rest in words:
        module = project["scripts"][program].partition(":")[0]
        text = run_python("-m", module, *rest, "--help").stdout
        names |= {name.replace("-", "_") for name in re.findall(r"--([\w-]+)", text)}
    return names | {option.name for kind in (RLConfig, SFTConfig) for option in fields(kind)}


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("bash"))
def test_commands_and_their_options_exist(page, in_docs_folder):
    text = "\n".join(blocks(page, "bash")).replace("\\\n", " ")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=10)
    for path in re.findall(r"\b(?:examples|benchmarks|tests)/[\w/]+\.\w+\b", text):
        assert (ROOT / path).is_file() or "/outputs/" in path, path
    for target in re.findall(r"^make (?:\w+=\S+ )?([\w-]+)", text, re.MULTILINE):
        assert f"\n{target}:" in read("Makefile"), target
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    for names in re.findall(r"\.\[([\w,]+)\]", text):
        assert {*names.split(",")} <= {*extras}, names
    for line in re.findall(r"^vf-gepa .*", text, re.MULTILINE):
        program, *words = shlex.split(line)
        program = Path(sys.executable).parent / program
        run_python(program, *words, "--dry-run", folder=in_docs_folder, PYTHONPATH=str(EXAMPLE))
    for line in re.findall(r"\bvf-(?:rl|sft|train|setup) (.*)", text):
        for option in re.findall(r"(?<!\S)--([\w.-]+)", line):
            is_known = option.rpartition(".")[2].replace("-", "_") in known_options()
            assert is_known or option.startswith("env."), option  # which has options of its own


# --- The site -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    words = ["-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", tmp_path / "trees"]
    run_python(*words, DOCS, tmp_path / "site")
    for path in DOCS.glob("*.md"):
        assert (tmp_path / "site" / f"{path.stem}.html").is_file()
    index = (tmp_path / "site" / "index.html").read_text()
    assert "Change something" in index and "troubleshooting.html" in index
