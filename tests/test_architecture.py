"""The house rules that a machine can check: who imports whom, where heavy dependencies live, how large a room is."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "mint"

ROW = re.compile(r"^\| (?P<rooms>[^|]+) \| (?P<targets>[^|]+) \|$", re.MULTILINE)
LAZY = {("mint.client.embedded_service", "mint.compose.embedded")}
"""The one join upwards: the client opens the embedded service when no base URL is set, imported inside the function."""


HOMES: dict[str, frozenset[str]] = {
    "torch": frozenset({"engine", "cluster"}),
    "httpx": frozenset(
        {
            "client/connection/http_transport.py",
            "cluster/external/host.py",
            "cluster/worker/membership.py",
            "rl/tasks/openai_judge.py",
        }
    ),
    "starlette": frozenset(
        {
            "server/http",
            "server/openai",
            "server/responses_api",
            "cluster/worker/routes.py",
            "server/messages_api",
            "dashboard",
            "compose/dashboard_server.py",
        }
    ),
    "uvicorn": frozenset({"compose/http_connection.py", "compose/http_server.py"}),
    "ray": frozenset(
        {
            "cluster/groups.py",
            "cluster/lifetime/adoption.py",
            "cluster/processes.py",
            "cluster/ray_runtime.py",
            "cluster/replicas.py",
        }
    ),
    "structlog": frozenset({"server/ops/logs.py"}),
    "prometheus_client": frozenset({"server/ops/metrics.py"}),
    "sqlite3": frozenset({"server/store", "server/mirror", "chaos/power_loss.py"}),
    "obstore": frozenset({"server/mirror/objects.py"}),
    "google": frozenset({"wire"}),
    "zstandard": frozenset({"server/http/unpacking.py"}),
    "python_multipart": frozenset({"server/http/file_routes.py"}),
    "safetensors": frozenset({"models"}),
    "transformers": frozenset(
        {
            "tokenizer/loading.py",
            "engine/transformers",
            "models/gguf/conversion.py",
            "models/quiet_transformers.py",
        }
    ),
    "matplotlib": frozenset({"rl/tracking/plot.py"}),
    "pandas": frozenset({"runs/data_frames.py"}),
    "tensorboard": frozenset({"rl/tracking/trackers.py"}),
    "wandb": frozenset({"rl/tracking/trackers.py"}),
    "trackio": frozenset({"rl/tracking/trackers.py"}),
    "llguidance": frozenset({"server/grammars/compiler.py"}),
    "math_verify": frozenset({"rl/tasks/math_worker.py"}),
    "pydantic_monty": frozenset({"sandbox/monty.py"}),
    "reasoning_gym": frozenset({"recipes/task_sources/reasoning_gym.py"}),
    "datasets": frozenset({"recipes/task_sources/files.py"}),
    "verifiers": frozenset({"recipes/task_sources/verifiers.py", "recipes/task_sources/verifiers_episodes.py"}),
    "textarena": frozenset({"recipes/task_sources/textarena.py"}),
    "openenv": frozenset({"recipes/task_sources/openenv.py"}),
    "if_verifiable": frozenset({"recipes/task_sources/ifeval.py"}),
}
TORCH_VALUES = {("types/tensors.py", "torch"), ("client/custom_loss.py", "torch")}
"""Where a user's own torch tensors are made or read, imported inside the function."""

TWINS = {
    "RLAdapter": "mint.rl_core has the names of MinT's documents, over those of mint.rl",
    "RLConfig": "as RLAdapter",
    "Reward": "as RLAdapter",
}
"""Classes of one name in two modules: one idea on two sides, and why it has two."""

ENTRIES = frozenset({"__init__.py", "__main__.py"})
"""Files that Python finds by their name: nobody looks for them in a room."""
MAX_MODULES_IN_A_ROOM = 15
MAX_MODULES_AT_THE_TOP = 11


@cache
def sources() -> dict[str, ast.Module]:
    """Relative path → syntax tree of every module of the package."""
    files = sorted(SOURCE.rglob("*.py"))
    return {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in files}


def module_of(relative: str) -> str:
    """`server/http/app.py` → `mint.server.http.app`; a package is named as its folder."""
    return ("mint." + relative.removesuffix(".py").replace("/", ".")).removesuffix(".__init__")


def holds(rooms: frozenset[str], relative: str) -> bool:
    """Whether one of `rooms` (folders or files, as `server/http` or `config.py`) is or contains the file."""
    return any(relative == room or relative.startswith(f"{room}/") for room in rooms)


@cache
def imported_modules(relative: str) -> frozenset[str]:
    """What a file imports, also inside functions: each module, and each name as if it were one."""
    found: set[str] = set()
    for node in ast.walk(sources()[relative]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            found |= {
                name.value for name in node.args if isinstance(name, ast.Constant) and isinstance(name.value, str)
            }
    return frozenset(found)


@cache
def mint_modules() -> frozenset[str]:
    return frozenset(module_of(path) for path in sources())


def mint_imports(relative: str) -> frozenset[str]:
    return imported_modules(relative) & mint_modules()


@cache
def import_rules() -> dict[str, frozenset[str]]:
    """Room or module → what it may import: the table in ARCHITECTURE.md. Longer names win over shorter ones."""
    text = (ROOT / "ARCHITECTURE.md").read_text().split("## Who may import whom")[1].split("\n## ")[0]
    rows = [(row["rooms"], row["targets"]) for row in ROW.finditer(text)]
    groups: dict[str, list[str]] = {}
    rules: dict[str, frozenset[str]] = {}
    for rooms, targets in rows[2:]:
        name, colon, members = rooms.partition(": ")
        modules = (members if colon else rooms).strip().split(", ")
        if colon:
            groups[name] = modules
        expanded = [modules if colon else [], *(groups.get(target, [target]) for target in targets.strip().split(", "))]
        rules |= dict.fromkeys(modules, frozenset(module for part in expanded for module in part))
    return rules


def rule_for(relative: str) -> tuple[str, frozenset[str]]:
    rooms = [room for room in import_rules() if holds(frozenset({room, f"{room}.py"}), relative)]
    assert rooms, f"{relative} has no row in the table of imports in ARCHITECTURE.md"
    room = max(rooms, key=len)
    return room, import_rules()[room]


def is_allowed(room: str, targets: frozenset[str], module: str) -> bool:
    target = module.removeprefix("mint").removeprefix(".").replace(".", "/") or "the public names"
    if "everything" in targets or target == room or target.startswith(f"{room}/"):
        return True
    # `from mint.server.store import journal` names the packages above it, too.
    packages = {
        "/".join(allowed.split("/")[:depth]) for allowed in targets for depth in range(1, allowed.count("/") + 1)
    }
    return target in packages or any(target == allowed or target.startswith(f"{allowed}/") for allowed in targets)


def test_each_room_imports_only_what_the_table_in_the_architecture_allows() -> None:
    wrong = [
        f"{relative} imports {module}"
        for relative in sources()
        for module in sorted(mint_imports(relative))
        if not is_allowed(*rule_for(relative), module) and (module_of(relative), module) not in LAZY
    ]
    assert wrong == []


def test_the_table_of_imports_names_only_rooms_that_exist() -> None:
    named = set(import_rules()) | {target for targets in import_rules().values() for target in targets}
    missing = [
        name
        for name in sorted(named - {"nothing", "everything", "the public names", "__init__"})
        if not (SOURCE / name).is_dir() and not (SOURCE / f"{name}.py").is_file()
    ]
    assert missing == []


def test_modules_form_no_cycle() -> None:
    graph = {module_of(relative): mint_imports(relative) - {module_of(relative)} for relative in sources()}
    graph["mint"] = set()  # lazy public names
    for module, targets in graph.items():
        # `from mint.engine.protocol import X` names the package `mint.engine` too; a package is not its submodule.
        graph[module] = {
            target
            for target in targets
            if target != "mint" and not module.startswith(f"{target}.") and (module, target) not in LAZY
        }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join([*path[path.index(module) :], module])
        if module not in done:
            for target in graph.get(module, set()):
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_each_heavy_dependency_has_one_home() -> None:
    strangers = [
        f"{relative} imports {dependency}"
        for relative in sources()
        for dependency in {name.split(".")[0] for name in imported_modules(relative)} & set(HOMES)
        if not holds(HOMES[dependency], relative) and (relative, dependency) not in TORCH_VALUES
    ]
    assert strangers == []


def test_every_home_of_a_dependency_is_there_and_uses_it() -> None:
    unused = [
        f"{home} does not import {dependency}"
        for dependency, homes in HOMES.items()
        for home in homes
        if not any(
            dependency in {name.split(".")[0] for name in imported_modules(relative)}
            for relative in sources()
            if holds(frozenset({home}), relative)
        )
    ]
    assert unused == []


def test_every_path_that_the_architecture_names_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    named = {path for path in re.findall(r"`([\w./*]+)`", text) if "/" in path and path.endswith((".py", ".md"))}
    assert len(named) > 20
    missing = sorted(path for path in named if not any(list(base.glob(path)) for base in (ROOT, SOURCE)))
    assert missing == []


def test_only_config_reads_the_environment() -> None:
    readers = [
        relative
        for relative in sources()
        if re.search(r"os\.environ|os\.getenv|load_dotenv\(|environb", (SOURCE / relative).read_text())
    ]
    assert [reader for reader in readers if reader != "config.py"] == []


def test_the_library_never_imports_recipes() -> None:
    users = [r for r in sources() if any(m.startswith("mint.recipes") for m in mint_imports(r))]
    assert all(holds(frozenset({"recipes", "cli", "compose"}), user) for user in users), users


PICKLES = {"_pickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}


def unpickles(tree: ast.AST) -> list[str]:
    """What of a module could read a pickle, whose content may run any code."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                found += [alias.name for alias in node.names if alias.name.partition(".")[0] in PICKLES]
            case ast.ImportFrom(module=str(module)):
                names = [f"{module}.{alias.name}" for alias in node.names]
                found += [name for name in names if name == "torch.load" or not PICKLES.isdisjoint(name.split("."))]
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                found.append("torch.load")
            case ast.keyword(arg="allow_pickle", value=value) if ast.unparse(value) != "False":
                found.append(f"allow_pickle={ast.unparse(value)}")
    return found


def test_nothing_is_unpickled_but_what_mints_own_processes_send_each_other() -> None:
    found = {relative: names for relative, tree in sources().items() if (names := unpickles(tree))}
    assert found == {"cluster/ray_runtime.py": ["pickle.PickleBuffer", "ray.cloudpickle"]}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle as p",
        "from pickle import loads",
        "import joblib",
        "import dill.source",
        "from torch import load",
        "from ray import cloudpickle",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=given)",
    ],
)
def test_each_way_to_read_a_pickle_is_noticed(line: str) -> None:
    assert unpickles(ast.parse(line))


def test_rooms_are_at_most_two_folders_deep_and_hold_few_modules() -> None:
    assert [relative for relative in sources() if relative.count("/") > 2] == []
    rooms: dict[str, int] = {}
    for relative in sources():
        room, _, name = relative.rpartition("/")
        rooms[room] = rooms.get(room, 0) + (name not in ENTRIES)
    limits = {"": MAX_MODULES_AT_THE_TOP}
    assert {room: count for room, count in rooms.items() if count > limits.get(room, MAX_MODULES_IN_A_ROOM)} == {}


def test_every_module_says_what_it_is() -> None:
    assert [relative for relative, tree in sources().items() if not ast.get_docstring(tree)] == []


def test_no_two_public_classes_have_one_name_unless_they_are_one_idea() -> None:
    homes: dict[str, set[str]] = {}
    for relative, tree in sources().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(relative)
    assert {name: sorted(paths) for name, paths in homes.items() if len(paths) > 1 and name not in TWINS} == {}
    assert [name for name in TWINS if len(homes.get(name, ())) < 2] == [], "these have no twin any more"
