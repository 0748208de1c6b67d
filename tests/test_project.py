"""Promises of the project as a whole."""

import ast
import io
import re
import sys
import tokenize
from importlib import import_module

import pytest

import verifiers_rl
from tests.helpers import ROOT, run_python
from verifiers_rl import RLConfig

PACKAGE = ROOT / "verifiers_rl"


def test_the_core_reads_in_an_evening():
    lines = {
        name: len((PACKAGE / name).read_text().splitlines())
        for name in ("trainer.py", "orchestrator.py")
    }
    assert sum(lines.values()) < 1000, lines


def test_readme_says_how_long_the_evening_is():
    readme = (ROOT / "README.md").read_text()
    names = re.findall(r"^  (\w+\.py) ", readme, re.MULTILINE)[:6]
    assert names[0] == "trainer.py" and names[-1] == "logprobs.py"
    num_lines = sum(len((PACKAGE / name).read_text().splitlines()) for name in names)
    (said,) = re.findall(r"the first six files, in this order, about ([\d,]+) lines", readme)
    assert abs(num_lines - int(said.replace(",", ""))) < 100, num_lines


def test_import_is_fast():
    """Because it loads nothing that takes seconds."""
    programs = "verifiers_rl.cli.rl, verifiers_rl.sft.main, verifiers_rl.cli.view"
    heavy = "any(m in sys.modules for m in ('torch', 'transformers', 'vllm'))"
    run_python("-c", f"import sys, verifiers_rl, {programs}; sys.exit({heavy})")


def test_all_public_names_exist():
    for name in verifiers_rl.__all__:
        assert getattr(verifiers_rl, name) is not None
    assert set(verifiers_rl.__all__) <= set(dir(verifiers_rl))


# --- Who imports whom -----------------------------------------------------------------------------

PURE = ("advantages", "data", "logprobs", "losses", "packing", "types")
ROOMS = ("envs", "inference", "report", "sync")
LEAVES = ("cluster", "distill", "replay", "sft", "tiny", "view")


def room_of(name):
    """The first part of a module's name."""
    return name.split(".")[0]


def modules():
    """The package's modules by their names without `verifiers_rl.`; a folder by its own."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path, at_once=False):
    """What a module imports at any time, each as module or module.name; not for types alone.

    With `at_once`, what it imports when it is imported: not inside functions.
    """
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if is_for_types or (at_once and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, path  # absolute, so that a copied file runs
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def offers(room):
    """The names that a room loads on first use, and their modules in it."""
    return getattr(import_module(f"verifiers_rl.{room}".rstrip(".")), "HOME", {})


def import_graph():
    """The package's modules, and those of them that each imports."""
    known, graph = modules(), {}
    for module, path in known.items():
        graph[module] = set()
        for name in imports(path):
            if not name.startswith("verifiers_rl."):
                continue
            name = name.removeprefix("verifiers_rl.")
            if name not in known:  # a function or a class: of its module, or of a room
                name, _, thing = name.rpartition(".")
                home = offers(name) if known[name].name == "__init__.py" else {}
                if thing in home:
                    graph[module].add(name)
                    name = f"{name}.{home[thing]}".lstrip(".")
            graph[module].add(name)
    return graph


def reached(graph, start):
    found, new = set(), {start}
    while new:
        found |= new
        new = {after for before in new for after in graph[before]} - found
    return found


def test_no_module_imports_itself_through_others():
    graph = import_graph()
    assert len(graph) > 60 and "sync.shared_buffers" in graph["inference.worker"]
    circles = [m for m, after in graph.items() if any(m in reached(graph, one) for one in after)]
    assert not circles


def test_arrows_point_down():
    graph = import_graph()
    for module, imported in graph.items():
        room = room_of(module)
        rooms = {*map(room_of, imported)}
        if room not in ("cli", "", "wiring", *LEAVES):
            assert "cli" not in rooms, module
        if room in (*ROOMS, *PURE, "process", "config"):
            assert not rooms & {"trainer", "orchestrator", "wiring"}, module
        if room in PURE:
            assert rooms <= {*PURE}, module
            assert {*map(room_of, imports(modules()[module]))} <= {
                "torch", "verifiers_rl", "__future__", "collections", "contextlib", "dataclasses",
                "functools", "heapq", "inspect", "math", "typing", "numpy", "asyncio", "bisect",
                "reprlib",
            }, module  # fmt: skip


def test_a_leaf_can_be_deleted():
    # With its tests: nothing imports it but an entry point that runs it, when it does.
    graph, known = import_graph(), modules()
    for module, imported in graph.items():
        room = room_of(module)
        for leaf in {*map(room_of, imported)} & {*LEAVES} - {room}:
            assert room == "cli", (module, leaf)
            names = imports(known[module], at_once=True)
            assert not any(name.startswith(f"verifiers_rl.{leaf}") for name in names), module
    assert set(LEAVES) <= set(known)


# Imports the trunk with all leaves refused, and then each leaf with the others refused. What loads
# vLLM is left out, for the time; `test_a_leaf_can_be_deleted` looks at it.
WITHOUT_LEAVES = """
import importlib, os, sys

class Refuser:
    refused = set()
    def find_spec(self, name, *args):
        if name.partition("verifiers_rl.")[2].split(".")[0] in self.refused:
            raise ModuleNotFoundError(f"{name} is deleted", name=name)

leaves, modules = sys.argv[1].split(","), sys.argv[2].split(",")
sys.meta_path.insert(0, Refuser())
Refuser.refused = {*leaves}
rooms = {module: module.split(".")[0] for module in modules}
for module in modules:
    if rooms[module] not in leaves:
        importlib.import_module(f"verifiers_rl.{module}".rstrip("."))
for leaf in leaves:
    if (child := os.fork()) == 0:
        Refuser.refused = {*leaves} - {leaf}
        for module in modules:
            if rooms[module] == leaf:
                importlib.import_module(f"verifiers_rl.{module}")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, leaf
"""


def test_without_leaves_the_rest_can_be_imported():
    roots = {m: {*map(room_of, imports(path))} for m, path in modules().items()}
    # Of another Python, or of the start of one.
    elsewhere = {"envs.classic", "inference.startup.sitecustomize"}
    own = [module for module in roots if "vllm" not in roots[module]]
    own = [module for module in own if module not in elsewhere]
    assert len(own) > len(roots) - 15
    run_python("-c", WITHOUT_LEAVES, ",".join(LEAVES), ",".join(own))


LEARNS = (
    '[[env]]\nid = "e"\nalgorithm = "opd"\nteacher = "t"\n[[teacher]]\nname = "t"\nmodel = "m"\n'
)


@pytest.mark.parametrize(
    "leaf, words, toml, said",
    [
        ("view", "view runs", "", "vf-rl view needs verifiers_rl.view"),
        ("sft", "generate", "", "vf-rl generate needs verifiers_rl.sft"),
        ("replay", "replay run --step 1", "", "vf-rl replay needs verifiers_rl.replay"),
        ("distill", "@ rl.toml", LEARNS, "distillation needs verifiers_rl.distill"),
        (
            "cluster",
            "@ rl.toml",
            '[env]\nid = "e"\n[cluster]\naddress = "auto"\n',
            "a run on several machines needs verifiers_rl.cluster",
        ),
    ],
)
def test_the_launcher_says_which_leaf_is_missing(
    leaf, words, toml, said, tmp_path, monkeypatch, run_main, unknown_models
):
    from verifiers_rl.cli import rl

    for name in [*sys.modules]:
        if f"{name}.".startswith(f"verifiers_rl.{leaf}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, f"verifiers_rl.{leaf}", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rl.toml").write_text(f'model = "m"\n{toml}')
    status, _, error = run_main(rl.main, *words.split())
    assert status == 1 and f"vf-rl: error: {said}, which is not in this copy" in error


def test_rooms_know_of_each_other_what_their_init_offers():
    # But what runs inside vLLM's processes, which must not load the rest of a room.
    for_workers = ("sync.plan", "sync.nccl", "sync.shared_buffers")
    for module, path in modules().items():
        room = room_of(module)
        for name in imports(path):
            to = name.removeprefix("verifiers_rl.").split(".")
            is_other = name.startswith("verifiers_rl.") and to[0] in ROOMS and to[0] != room
            if room in ROOMS and is_other and not ".".join(to).startswith(for_workers):
                assert to[1] in offers(to[0]), (module, name)


def test_only_one_room_knows_vllm_and_one_verifiers():
    for module, path in modules().items():
        room, names = room_of(module), imports(path)
        roots = {*map(room_of, names)}
        assert "vllm" not in roots or room == "inference", module
        assert "verifiers" not in roots or room == "envs", module
        if module != "envs.classic":
            # Which the current verifiers does not have.
            assert not any(name.startswith("verifiers.legacy") for name in names), module


def test_a_worker_of_vllm_loads_only_what_receives_weights():
    graph, known = import_graph(), modules()
    inside = reached(graph, "inference.worker") | reached(graph, "inference.plugin")
    assert {*map(room_of, inside)} <= {"inference", "sync", "process"}
    for module in inside:
        roots = {*map(room_of, imports(known[module]))}
        assert not roots & {"transformers", "verifiers", "peft", "accelerate", "httpx"}, module
        assert not any("fsdp" in name for name in imports(known[module])), module


def test_text_files_are_utf8_whatever_the_locale():
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            name = getattr(getattr(node, "func", None), "attr", "")
            # A script, which envs.base reads, says in which encoding it is.
            if name in ("read_text", "write_text") and module != "envs.base":
                said = {word.value for word in ast.walk(node) if isinstance(word, ast.Constant)}
                assert said & {"utf-8", "utf-8-sig"}, (module, ast.unparse(node))


# --- How large it is ------------------------------------------------------------------------------

# Each number may only be lowered. Who needs a larger one finds something to take away first.
LARGEST = {
    "library without view, code tokens": 123_755,
    "reached from trainer.py, code tokens": 70_003,
    "modules reached from trainer.py": 58,
    "options of RLConfig itself": 69,
    "places that change a library from inside": 3,
}
FREE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def code_tokens(path):
    """Tokens of a module without comments, docstrings and line breaks, so joining lines does not
    make it smaller.
    """
    source = path.read_text()
    docstrings = {
        (statement.lineno, statement.col_offset)
        for node in ast.walk(ast.parse(source))
        for statement in (node.body if isinstance(getattr(node, "body", None), list) else [])
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    }
    tokens, depth = 0, 0  # from Python 3.12 on, an f-string is more than the one token of before
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        tokens += not depth and token.type not in FREE and token.start not in docstrings
        name = tokenize.tok_name[token.type]
        depth += (name == "FSTRING_START") - (name == "FSTRING_END")
    return tokens


def reached_with_packages(start):
    """The modules that one loads, at any time, with the `__init__` of each room on the way."""
    known, graph = modules(), {}
    for module, path in known.items():
        names = {
            name.removeprefix("verifiers_rl.") for name in imports(path) if "verifiers_rl" in name
        }
        graph[module] = (names | {name.rpartition(".")[0] for name in names}) & known.keys()
    return reached(graph, start)


def places_that_change_libraries(path):
    """Statements that set an attribute of what a module imports from elsewhere."""
    tree = ast.parse(path.read_text())
    foreign = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or node.names[0].name
            if room_of(module) not in ("verifiers_rl", "__future__"):
                foreign |= {(a.asname or a.name).split(".")[0] for a in node.names}

    def root(node):
        while isinstance(node, ast.Attribute):
            node = node.value
        return node.id if isinstance(node, ast.Name) else ""

    found = []
    for node in ast.walk(tree):
        targets = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and root(node.func) in ("setattr", "delattr"):
            targets = [ast.Attribute(node.args[0], "")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".Library"):
            targets = [ast.Attribute(node.func, "")]  # declares operators in another's name
        found += [
            f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
            for target in targets
            if isinstance(target, ast.Attribute) and root(target) in foreign
        ]
    return found


def test_it_grows_no_larger():
    known = modules()
    reach = reached_with_packages("trainer")
    changes = [line for path in known.values() for line in places_that_change_libraries(path)]
    view = [module for module in known if "view" in module.split(".")]
    sizes = {module: code_tokens(path) for module, path in known.items()}
    measured = {
        "library without view, code tokens": sum(sizes.values()) - sum(map(sizes.get, view)),
        "reached from trainer.py, code tokens": sum(sizes[module] for module in reach),
        "modules reached from trainer.py": len(reach),
        # Also those of transformers that it gives another default.
        "options of RLConfig itself": len(RLConfig.__annotations__),
        "places that change a library from inside": len(changes),
    }
    print(measured, *changes, sep="\n")
    assert {name: n for name, n in measured.items() if n > LARGEST[name]} == {}
