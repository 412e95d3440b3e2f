"""Imports go one way: from HTTP down to the op algebra, never back, and each library has its place."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "akv_sdk": "akv_sdk",
    "akv_server": "akv_server",
    "akv_kernels": "kernels/akv_kernels",
    "akv_bench": "examples/akv_bench",
    "akv_demo": "examples/akv_demo",
    "swe_bench_agent": "examples/swe_bench_agent",
}


def modules(package: str) -> dict[str, Path]:
    folder = ROOT / FOLDERS[package]
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = (package, *path.relative_to(folder).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(path: Path, *, at_run_time: bool = False) -> set[str]:
    """What a module imports, anywhere in it; `at_run_time` leaves out what stands under `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    if at_run_time:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                skipped.update(inner for part in node.body for inner in ast.walk(part))
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def users_of(library: str, package: str, *, at_run_time: bool = False) -> set[str]:
    return {
        name
        for name, path in modules(package).items()
        if any(i == library or i.startswith(library + ".") for i in imports(path, at_run_time=at_run_time))
    }


def test_the_packages_know_each_other_one_way():
    for package in ("akv_server", "akv_kernels", "akv_bench", "akv_demo", "torch", "fastapi", "numpy"):
        assert users_of(package, "akv_sdk") == set()
    for package in ("akv_server", "akv_sdk", "akv_bench", "akv_demo", "fastapi"):
        assert users_of(package, "akv_kernels") == set()
    for package in ("akv_server", "akv_kernels", "torch"):
        assert users_of(package, "akv_bench") == set()
        assert users_of(package, "akv_demo") == set()
        assert users_of(package, "swe_bench_agent") == set()
    assert users_of("akv_demo", "akv_bench") == set()
    # Of the SDK the server knows the contract, and the policies: they are pure functions over the contract's types, and
    # client and server must mean the same by what may be dropped.
    shared = re.compile(r"akv_sdk(\.(types|policies)(\..*)?)?")
    policies = {name: path for name, path in modules("akv_sdk").items() if name.startswith("akv_sdk.policies")}
    for name, path in {**modules("akv_server"), **policies}.items():
        assert all(shared.fullmatch(i) for i in imports(path) if i.split(".")[0] == "akv_sdk"), name


def test_the_server_is_a_stack():
    """Nothing imports what stands above it; within a line, nothing imports its neighbours."""
    stack = [
        {"cli"},
        {"serving"},
        {"app"},
        {"messages_reply"},
        {"messages"},
        {"completions"},
        {"sessions"},
        {"engine"},
        {"scheduler"},
        {"batch"},
        {"cache"},
        {"planning"},
        {"radix", "kv"},
        {"pool", "masks"},
        {"ops"},
        {"errors"},
    ]
    level = {f"akv_server.{name}": i for i, names in enumerate(stack) for name in names}
    for name, path in modules("akv_server").items():
        if name not in level:
            continue
        for other in imports(path) & set(level):
            assert level[other] > level[name], f"{name} imports {other}"
    graph = {name: imports(path) & set(modules("akv_server")) for name, path in modules("akv_server").items()}
    # what makes tokens of messages is a stack of its own, below those that have streams
    for name, below in {
        "chat": {"calls", "turns", "templates", "blocks", "identity", "tools", "tokenizer", "errors"},
        "turns": {"templates", "blocks", "identity", "nesting", "errors"},
        "templates": {"errors"},
        "blocks": {"tools"},
        "identity": {"nesting", "tools", "errors"},
        "tokenizer": {"tiktoken_export", "tokenizer_spec", "errors"},
        "tiktoken_export": {"tokenizer_spec"},
        "tokenizer_spec": set(),
    }.items():
        assert graph[f"akv_server.{name}"] == {f"akv_server.{other}" for other in below}, name
    # and there is no way back up through a module beside the stack
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a cycle: {' -> '.join((*path, name))}"
        if name not in done:
            for other in graph[name] - {"akv_server"}:
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_each_library_has_its_place():
    assert users_of("fastapi", "akv_server") == {"akv_server.app"}
    own_http = {name for name in users_of("httpx", "akv_sdk") if not name.startswith("akv_sdk.integrations.")}
    assert own_http == {f"akv_sdk.{name}" for name in ("client", "streams", "_transport")}
    assert users_of("jinja2", "akv_server") == {"akv_server.chat", "akv_server.templates"}
    without_torch = {"ops", "masks", "pool", "radix", "planning", "cache", "batch", "scheduler"}
    without_torch |= {"streams", "sessions", "chat", "tokenizer", "app"}
    with_torch = users_of("torch", "akv_server", at_run_time=True)
    assert not with_torch & {f"akv_server.{name}" for name in without_torch}
    assert users_of("akv_kernels", "akv_server", at_run_time=True) <= {
        f"akv_server.{name}" for name in ("kv", "model", "graphs", "engine", "loader")
    }
    assert users_of("triton", "akv_kernels") <= {
        f"akv_kernels.{name}" for name in ("attention", "pages", "neighbours", "gpu")
    }


def test_a_framework_is_imported_by_its_own_integration_alone():
    """So that importing the SDK imports none."""
    frameworks = {
        "agents": {"openai_agents"},
        "langchain": {"langchain"},
        "langchain_core": {"langchain"},
        "openai": {"openai"},
        "pydantic_ai": {"pydantic_ai"},
        "smolagents": {"smolagents"},
        "minisweagent": {"mini_swe_agent"},
    }
    for library, names in frameworks.items():
        assert users_of(library, "akv_sdk") == {f"akv_sdk.integrations.{name}" for name in names}
    assert users_of("openai", "akv_sdk", at_run_time=True) == set()  # it only names its types
    inside = {name for name in modules("akv_sdk") if name.startswith("akv_sdk.integrations")}
    assert users_of("akv_sdk.integrations", "akv_sdk") <= inside
