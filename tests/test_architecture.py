"""The house rules that a machine can check: who imports whom, where heavy dependencies live, sizes, flatness."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "mint"

EVERYTHING = frozenset(
    ["version", "tensors", "inputs", "types", "records", "errors", "config", "wire", "tokenizer", "models", "client",
     "engine", "server", "sandbox", "runs", "rl", "recipes", "bench", "dashboard", "embedded", "http_server", "serving",
     "dashboard_serving", "export", "cli", "cli_bench", "cli_dashboard", "cli_serve", "cli_tables", "cli_looking",
     "terminal", "visible", "native", "kept", "kept_folder"]
)  # fmt: skip
ALLOWED: dict[str, frozenset[str]] = {
    "tensors": frozenset({"errors"}),
    "version": frozenset(),
    "inputs": frozenset({"tensors", "errors"}),
    "types": frozenset({"tensors", "inputs", "errors"}),
    "records": frozenset({"types", "errors"}),
    "errors": frozenset(),
    "config": frozenset({"types", "errors"}),
    "wire": frozenset({"types", "records", "errors"}),
    "tokenizer": frozenset({"types", "errors"}),
    "models": frozenset({"types", "errors", "config"}),
    "client": frozenset({"version", "types", "records", "errors", "config", "wire", "tokenizer"}),
    "native": frozenset({"errors"}),
    "engine": frozenset({"native", "types", "errors", "config", "models"}),
    "server": frozenset(
        {"version", "types", "records", "errors", "config", "wire", "tokenizer", "models", "engine.protocol"}
    ),
    "sandbox": frozenset({"errors"}),
    "runs": frozenset({"errors", "tokenizer"}),
    "rl": frozenset({"runs", "visible", "types", "errors", "config", "tokenizer", "client", "sandbox"}),
    "recipes": frozenset({"runs", "rl", "client", "sandbox", "types", "errors"}),
    "bench": frozenset({"types", "errors", "config", "models", "engine.protocol", "engine.torch_engine"}),
    "dashboard": frozenset({"version", "types", "errors", "config", "runs", "rl", "server.auth"}),
    "__init__": frozenset({"version", "types", "errors", "client"}),
    "tinker": frozenset(),
    "mint": frozenset({"errors"}),
    "rl_core": frozenset({"errors", "rl"}),
    "completers": frozenset({"types", "client"}),
    "renderers": frozenset({"errors"}),
    "recipe": frozenset({"errors"}),
    "embedded": EVERYTHING,
    "http_server": frozenset(),
    "serving": EVERYTHING,
    "dashboard_serving": EVERYTHING,
    "export": EVERYTHING,
    "cli": EVERYTHING,
    "cli_bench": EVERYTHING,
    "cli_dashboard": EVERYTHING,
    "cli_serve": EVERYTHING,
    "cli_tables": EVERYTHING,
    "cli_looking": EVERYTHING,
    "terminal": frozenset({"errors"}),
    "visible": frozenset(),
    "kept": EVERYTHING,
    "kept_folder": EVERYTHING,
}
"""Part → what it may import of mint (besides itself and, for rl and bench, the public names in `mint`)."""

PUBLIC_NAMES_ALLOWED = frozenset({"tinker", "rl", "recipes", "bench", "embedded", "cli", "cli_serve", "cli_tables"})

EMBEDDED_DOOR = ("client", "embedded")
"""The one join upwards: the client opens the embedded transport lazily, when no base URL is set."""

HOMES: dict[str, frozenset[str]] = {
    "torch": frozenset({"native", "engine", "cluster"}),
    "ray": frozenset({"cluster"}),
    "httpx": frozenset({"client/http.py", "client/transfers.py", "rl/openai_judge.py"}),
    "starlette": frozenset({"server", "dashboard", "dashboard_serving.py"}),
    "uvicorn": frozenset({"http_server.py"}),
    "structlog": frozenset({"server/logs.py"}),
    "prometheus_client": frozenset({"server/metrics.py"}),
    "sqlalchemy": frozenset(
        {"server/database.py", "server/journal.py", "server/catalog.py", "server/session_catalog.py", "server/keys.py"}
    ),
    "google": frozenset({"wire"}),
    "zstandard": frozenset({"server/bodies.py"}),
    "python_multipart": frozenset({"server/file_routes.py"}),
    "safetensors": frozenset({"models"}),
    "transformers": frozenset({"tokenizer.py"}),
    "matplotlib": frozenset({"rl/plot.py"}),
    "pandas": frozenset({"runs/frames.py"}),
    "tensorboard": frozenset({"rl/trackers.py"}),
    "wandb": frozenset({"rl/trackers.py"}),
    "trackio": frozenset({"rl/trackers.py"}),
    "math_verify": frozenset({"rl/math_worker.py"}),
    "pydantic_monty": frozenset({"sandbox/monty.py"}),
    "reasoning_gym": frozenset({"recipes/reasoning_gym_task.py"}),
    "datasets": frozenset({"recipes/file_task.py"}),
    "verifiers": frozenset({"recipes/verifiers_task.py"}),
}
TORCH_VALUES = {("tensors.py", "torch"), ("client/custom_loss.py", "torch")}
"""Where a user's own torch tensors are made or read, imported inside the function."""

MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 80
MAX_CODE_LINES = {
    "dashboard": 1_600,
    "engine": 5_100,
    "bench": 2_650,
    "server": 7_850,
    "client": 2_000,
    "rl": 5_500,
    "runs": 1_200,
    "recipes": 2_000,
    "sandbox": 1_000,
}
MAX_CODE_LINES_ELSEWHERE = 1_000
"""How large a part may grow, so that it fits in one head. Code lines are those that hold code: comments, docstrings and
blank lines are free, so that nobody saves on them."""


@cache
def sources() -> dict[str, ast.Module]:
    """Relative path → syntax tree of every module of the package."""
    files = sorted(SOURCE.rglob("*.py"))
    return {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in files}


def part_of(relative: str) -> str:
    return relative.split("/")[0].removesuffix(".py")


def imported_modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def mint_imports(relative: str) -> set[str]:
    names = {name for name in imported_modules(sources()[relative]) if name == "mint" or name.startswith("mint.")}
    modules = {path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".") for path in sources()}
    known = {"mint"} | {f"mint.{module}" for module in modules if module != "__init__"}
    return names & known


def may_import(part: str, module: str) -> bool:
    if module == "mint":
        return part in PUBLIC_NAMES_ALLOWED
    target = module.removeprefix("mint.")
    if target.split(".")[0] == part or (part, target) == EMBEDDED_DOOR:
        return True
    return any(target == allowed or target.startswith(f"{allowed}.") for allowed in ALLOWED[part]) or (
        target == "engine" and "engine.protocol" in ALLOWED[part]
    )


def test_every_part_of_the_package_has_an_import_rule() -> None:
    assert {part_of(relative) for relative in sources()} <= ALLOWED.keys()


def test_each_part_imports_only_what_the_design_allows() -> None:
    wrong = [
        f"{relative} imports {module}"
        for relative in sources()
        for module in sorted(mint_imports(relative))
        if not may_import(part_of(relative), module)
    ]
    assert wrong == []


def test_modules_form_no_cycle() -> None:
    def name(relative: str) -> str:
        return "mint." + relative.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    graph = {name(relative): mint_imports(relative) - {name(relative)} for relative in sources()}
    graph["mint"] = set()  # lazy public names
    graph = {module: {target for target in targets if target != "mint"} for module, targets in graph.items()}
    for module, targets in graph.items():
        # `from mint.engine.protocol import X` names the package `mint.engine` too; a package is not its submodule.
        graph[module] = {target for target in targets if not module.startswith(f"{target}.")}
    graph.get("mint.client.http", set()).discard("mint.embedded")
    graph.get("mint.client.service_client", set()).discard("mint.embedded")
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join([*path[path.index(module) :], module])
        if module not in done:
            for target in graph.get(module, set()):
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("dependency", HOMES)
def test_each_heavy_dependency_has_one_home(dependency: str) -> None:
    strangers = [
        relative
        for relative, tree in sources().items()
        if any(name.split(".")[0] == dependency for name in imported_modules(tree))
        and not HOMES[dependency] & {relative, part_of(relative)}
        and (relative, dependency) not in TORCH_VALUES
        and not relative.endswith("_peer.py")  # runs in the peer's own environment
    ]
    assert strangers == []


def test_only_config_reads_the_environment() -> None:
    readers = [
        relative
        for relative in sources()
        if re.search(r"os\.environ|os\.getenv|load_dotenv\(|environb", (SOURCE / relative).read_text())
    ]
    assert [reader for reader in readers if reader != "config.py"] == []


def test_the_library_never_imports_recipes() -> None:
    users = [r for r in sources() if any(m.startswith("mint.recipes") for m in mint_imports(r))]
    assert all(part_of(user) in {"recipes", "cli", "dashboard_serving"} for user in users), users


def test_nothing_is_unpickled() -> None:
    for relative, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                called = ast.unparse(node)
                assert called not in {"torch.load", "pickle.load", "pickle.loads"}, f"{relative}: {called}"


def code_lines(relative: str) -> int:
    """Lines with a token that is neither a comment nor part of a docstring."""
    text = (SOURCE / relative).read_text()
    docstrings = {
        line
        for node in ast.walk(sources()[relative])
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    occupied = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in silent
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(occupied - docstrings)


def test_sizes_stay_small() -> None:
    lines = {relative: len((SOURCE / relative).read_text().splitlines()) for relative in sources()}
    parts: dict[str, int] = {}
    for relative in sources():
        parts[part_of(relative)] = parts.get(part_of(relative), 0) + code_lines(relative)
    large = {part: n for part, n in parts.items() if n > MAX_CODE_LINES.get(part, MAX_CODE_LINES_ELSEWHERE)}
    assert large == {}
    assert {relative: count for relative, count in lines.items() if count > MAX_FILE_LINES} == {}
    long = [
        f"{relative}:{node.lineno} {node.name}"
        for relative, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_the_package_is_one_folder_deep() -> None:
    assert [relative for relative in sources() if relative.count("/") > 1] == []


def test_every_module_says_what_it_is() -> None:
    assert [relative for relative, tree in sources().items() if not ast.get_docstring(tree)] == []


def test_every_part_is_in_the_map() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    missing = [relative for relative in sources() if f"`{relative}`" not in text and "__init__" not in relative]
    assert missing == []
