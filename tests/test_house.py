"""Rules of the repository, checked in all sources: imports, use of CUDA, sizes, docstrings,
packaging.

Each rule is a function from sources to faults, and is also tested on a fault: a rule that never
finds one is useless.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fem_common import secrets

ROOT = Path(__file__).resolve().parents[1]

# Package -> the packages that it may import. A package that is missing from this table fails the
# first test: it needs a rule.
ROOMS: dict[str, set[str]] = {
    "fem_common": set(),
    "kernels": {"fem_common"},
    "fem_megatron": {"fem_common", "kernels"},
    "pretrain": {"fem_common", "fem_megatron"},
    "tools": {"fem_common", "kernels", "fem_megatron", "pretrain", "data_prep", "launch"},
    "data_prep": {"fem_common"},
    "launch": {"fem_common"},
}
# Planning, refusing a bad configuration and preparing data must not wait seconds for the import of
# torch.
TORCH_FREE = [
    "fem_megatron.config",
    "pretrain.config",
    "pretrain.plan.run_plan",
    "pretrain.validate",
    "pretrain.data.facts",
]
# Modules that use CUDA: the real machine, and an assumed one for traces.
PLATFORM = "fem_megatron/megatron/platform.py"
UPSTREAM = "fem_megatron/megatron/upstream.py"  # all patches of torch and Megatron-core
FAKE_MACHINE = "fem_megatron/meta/fake_machine.py"
IN_JOBS_WITH_TORCH = {"launch.node.measure"}  # a test of the network between ranks
MODULE_LINES, FUNCTION_LINES = 700, 100
PROSE_COLUMNS = 100
# Openings of docstrings that state no action and no thing, and words of a dialect that readers do
# not know, with their limit: uses per thousand words of a package's docstrings.
OPENERS = re.compile(r"(Of|What|Where|Whether|How|Which|Why|That|Until|As|And|In)\b")
DIALECT = frozenset(
    "told tell tells said says say lies lie stands stand beside apart whole nobody nothing anew "
    "goes went comes came looked look looks asked asks there here".split()
)
DIALECT_PER_THOUSAND = 3
GENERATED_PAGES = (
    "docs/configuration.md",
    "docs/kernels.md",
    "docs/papers.md",
    "docs/studies/",
    "docs/benchmarks/paper.md",
)
LONG = re.compile(r"\b[Ll]ong(er)?\b[^.]*\b(because|so that)\b")
# The documentation of torch requires this way to set it.
SETTINGS = {"torch.utils.deterministic.fill_uninitialized_memory"}
ADDRESSES = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])")
OWN_PATHS = re.compile(r"(?<![\w.~-])/(?:home|root|Users|work|mnt|scratch|data\d*)/\w|\bfile://")
HOSTS = {
    "github.com",
    "arxiv.org",
    "huggingface.co",
    "www.apache.org",
    "pypi.org",
    "docs.astral.sh",
}

Sources = dict[str, str]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Rule = Callable[[Sources], list[str]]


def printed(*command: str) -> str:
    """Return the output of a command in the repository's root, which must succeed."""
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def repository_files() -> list[str]:
    """Return the paths of the repository's files, tracked or new and not ignored."""
    listed = printed("git", "ls-files", "--cached", "--others", "--exclude-standard")
    return sorted(name for name in set(listed.splitlines()) if (ROOT / name).is_file())


@functools.cache
def texts(*endings: str) -> Sources:
    """Return path -> text of every file with one of these endings."""
    return {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in repository_files()
        if name.endswith(endings)
    }


python_sources = functools.partial(texts, ".py")
parsed = functools.cache(ast.parse)  # cached because every rule reads every file
walked = functools.cache(lambda text: list(ast.walk(parsed(text))))


def source_files() -> Sources:
    """Return the Python files that are not tests."""
    return {name: text for name, text in python_sources().items() if name.split("/")[0] in ROOMS}


def nodes(sources: Sources, but: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (path, node) for every node of every file except ``but``."""
    return (
        (name, node) for name, text in sources.items() if name not in but for node in walked(text)
    )


def imported(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute module) of every import in a file, including those inside functions and
    under TYPE_CHECKING.
    """
    package = name.removesuffix(".py").split("/")[:-1]
    for node in walked(text):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            yield node.lineno, ".".join([*base, *filter(None, [node.module])])
        elif isinstance(node, ast.Call) and getattr(
            node.func, "attr", getattr(node.func, "id", "")
        ) in ("import_module", "__import__"):
            named = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from ((node.lineno, value) for value in named if isinstance(value, str))


# --- the rules: sources -> faults -----------------------------------------------------------------


def imports_against_the_stream(sources: Sources) -> list[str]:
    """Find imports of a package that is not below the importing one, or of the tests."""
    faults = []
    for name, text in sources.items():
        top_folder = name.split("/")[0]
        barred = {*ROOMS, "tests"} - ROOMS[top_folder] - {top_folder}
        faults += [
            f"{name}:{line}: {top_folder} imports {module}"
            for line, module in imported(name, text)
            if module.split(".")[0] in barred
        ]
    return faults


def knows_cuda(sources: Sources) -> list[str]:
    """Find uses of CUDA in code outside the three allowed files; strings (documentation, messages,
    configuration values) may name it.
    """
    return [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, node in nodes(sources, (PLATFORM, UPSTREAM, FAKE_MACHINE, "kernels/machine.py"))
        if isinstance(node, ast.Attribute)
        and node.attr in ("cuda", "xpu", "mps", "accelerator")
        and ast.unparse(node).startswith("torch.")
    ]


def patches_a_library(sources: Sources) -> list[str]:
    """Find assignments into torch or Megatron-core outside upstream.py: ``torch.x = ``,
    ``setattr(torch, ...)``, ``parallel_state.x = ``.
    """
    theirs = {name: {"torch", "megatron"} for name in sources}
    for name, node in nodes(sources):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            "torch",
            "megatron",
        ):
            theirs[name] |= {alias.asname or alias.name for alias in node.names}
    faults = []
    for name, node in nodes(sources, (UPSTREAM,)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        written = [ast.unparse(target) for target in targets if isinstance(target, ast.Attribute)]
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            written = [ast.unparse(node.args[0])]
        faults += [
            f"{name}:{node.lineno}: {text}"
            for text in written
            if text.split(".")[0] in theirs[name] and text not in SETTINGS
        ]
    return faults


def knows_a_release(sources: Sources) -> list[str]:
    """Find reads of Megatron-core's version outside upstream.py, which alone handles releases."""
    return [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, node in nodes(sources, (UPSTREAM,))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "megatron.core.__version__"
    ]


def own_exit_code(sources: Sources) -> list[str]:
    """Find numbers other than 0 and 1 as exit codes of a process or a command's ``main``: the table
    of exit codes has names for them.
    """
    faults = []
    for name, node in nodes(sources, ("fem_common/exits.py",)):
        ended: list[Any] = []
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            ended = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "sys.exit",
            "os._exit",
            "SystemExit",
        ):
            ended = node.args[:1]
        codes = [
            code for code in ended if isinstance(code, ast.Constant) and isinstance(code.value, int)
        ]
        faults += [
            f"{name}:{code.lineno}: {code.value!r}" for code in codes if code.value not in (0, 1)
        ]
    return faults


def own_list_of_secrets(sources: Sources) -> list[str]:
    """Find strings that ``fem_common.secrets`` uses to recognise a secret: a second list of
    them.
    """
    words = {*secrets.SECRET_ENDINGS, *secrets.SECRET_PARTS} - {"KEY", "KEYS", "TOKEN", "TOKENS"}
    strings = [
        (name, node)
        for name, node in nodes(sources, ("fem_common/secrets.py",))
        if isinstance(node, ast.Constant)
    ]
    return [f"{name}:{node.lineno}: {node.value}" for name, node in strings if node.value in words]


def too_long(sources: Sources) -> list[str]:
    """Modules and functions above their line limits whose docstring gives no reason ("Long, because
    ...").
    """
    faults = []
    for name, text in sources.items():
        for node in walked(text):
            if isinstance(node, ast.Module):
                what = "the module"
                lines = len(text.splitlines())
                most = MODULE_LINES
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                what, most = node.name, FUNCTION_LINES
            else:
                continue
            if lines > most and not LONG.search(ast.get_docstring(node) or ""):
                faults.append(f"{name}: {what} has {lines} lines")
    return faults


def undocumented(sources: Sources) -> list[str]:
    """Find modules, public classes, functions and methods without docstring.

    A method needs none if a class of the same file or a base class documents its name (an
    interface), or in a torch.autograd.Function.
    """
    faults = [
        f"{name}: the module"
        for name, text in sources.items()
        if text.strip() and not ast.get_docstring(parsed(text))
    ]
    classes = {node.name: node for _, node in nodes(sources) if isinstance(node, ast.ClassDef)}
    for name, text in sources.items():
        body = parsed(text).body
        public = [
            node for node in body if isinstance(node, Definition) and not node.name.startswith("_")
        ]
        faults += [
            f"{name}:{node.lineno}: {node.name}" for node in public if not ast.get_docstring(node)
        ]
        here = set[str]().union(
            *(documented(node) for node in body if isinstance(node, ast.ClassDef))
        )
        for node in (
            node
            for node in public
            if isinstance(node, ast.ClassDef) and "torch.autograd.Function" not in bases(node)
        ):
            bare = (
                {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
                - documented(node)
                - here
            )
            faults += [
                f"{name}: {node.name}.{method}"
                for method in bare - inherited(node, classes)
                if not method.startswith("_")
            ]
    return faults


def not_plain(sources: Sources) -> list[str]:
    """Find docstrings that do not open with what the thing is or does, and packages whose
    docstrings use too many words of the dialect.
    """
    faults = []
    words: dict[str, list[str]] = {}
    for name, text in sources.items():
        for node in walked(text):
            if not isinstance(node, ast.Module | Definition):
                continue
            docstring = ast.get_docstring(node) or ""
            if opener := OPENERS.match(docstring):
                line = getattr(node, "lineno", 1)
                faults.append(f"{name}:{line}: a docstring opens with {opener[0]!r}")
            words.setdefault(name.split("/")[0], []).extend(re.findall("[a-z]+", docstring.lower()))
    for package, used in words.items():
        dialect = Counter(word for word in used if word in DIALECT)
        if 1000 * dialect.total() > DIALECT_PER_THOUSAND * len(used):
            often = ", ".join(f"{word} ({count})" for word, count in dialect.most_common(8))
            faults.append(f"{package}: docstrings use words of the dialect too often: {often}")
    return faults


def bases(node: ast.ClassDef) -> list[str]:
    """Return the base classes as written, without their parameters."""
    return [ast.unparse(base).split("[")[0] for base in node.bases]


def documented(node: ast.ClassDef) -> set[str]:
    """Return the methods of a class that have a docstring."""
    return {
        inner.name
        for inner in node.body
        if isinstance(inner, ast.FunctionDef) and ast.get_docstring(inner)
    }


def inherited(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Return the methods that all ancestors of a class document."""
    above = [classes[name] for base in bases(node) if (name := base.split(".")[-1]) in classes]
    return set[str]().union(*(documented(parent) | inherited(parent, classes) for parent in above))


def names_a_machine(sources: Sources) -> list[str]:
    """Find home or working folders, addresses, and hosts that are not public references."""
    faults = []
    for name, text in sources.items():
        for number, line in enumerate(text.splitlines(), 1):
            found = [
                host for host in re.findall(r"\bhttps?://([\w.-]+)", line) if host not in HOSTS
            ]
            found += [
                address
                for address in ADDRESSES.findall(line)
                if address not in ("127.0.0.1", "0.0.0.0")
            ]
            faults += [f"{name}:{number}: {word}" for word in [*found, *OWN_PATHS.findall(line)]]
    return faults


def wide_prose(sources: Sources) -> list[str]:
    """Find lines of Markdown with more than 100 columns outside code, tables, pictures and
    generated text.
    """
    faults = []
    for name, text in sources.items():
        own = re.sub(
            r"^<!--[^\n]*begin -->.*?^<!--[^\n]*end -->|^```.*?^```",
            "",
            text,
            flags=re.MULTILINE | re.DOTALL,
        )
        wide = [
            line
            for line in own.splitlines()
            if len(line) > PROSE_COLUMNS and not line.startswith(("|", "![", "    "))
        ]
        faults += [f"{name}: {line}" for line in wide if not name.startswith(GENERATED_PAGES)]
    return faults


# --- the repository follows the rules -------------------------------------------------------------


def test_every_folder_has_a_rule_and_a_first_page() -> None:
    top_folders = {name.split("/")[0] for name in python_sources() if "/" in name} - {"tests"}
    assert top_folders == set(ROOMS)
    pages = [
        f"{top_folder}/{page}"
        for top_folder in sorted(top_folders)
        for page in ("__init__.py", "README.md")
    ]
    assert {*pages, "configs/README.md", "tests/README.md"} <= set(repository_files())
    # The docstring describes the package and what must not be added to it.
    assert [
        top_folder
        for top_folder in sorted(top_folders)
        if not ast.get_docstring(ast.parse(python_sources().get(f"{top_folder}/__init__.py", "")))
    ] == []


def everything() -> Sources:
    """Return every text file except this one, which contains machine names as examples."""
    return texts(
        *{
            name
            for name in repository_files()
            if not name.endswith((".npz", ".png", ".xz", "tests/test_house.py"))
        }
    )


@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        (imports_against_the_stream, source_files),
        (knows_cuda, source_files),
        (patches_a_library, source_files),
        (knows_a_release, source_files),
        (own_exit_code, source_files),
        (own_list_of_secrets, source_files),
        (undocumented, source_files),
        (too_long, python_sources),
        (not_plain, python_sources),
        (names_a_machine, everything),
        (wide_prose, lambda: texts(".md")),
    ],
)
def test_a_rule_holds(rule: Rule, sources: Callable[[], Sources]) -> None:
    faults = rule(sources())
    assert not faults, "\n".join(faults)


FAULTS: list[tuple[Rule, str, str]] = [
    (imports_against_the_stream, "fem_common/a.py", "from launch import rank"),
    (imports_against_the_stream, "kernels/a/b.py", "from ...fem_megatron import platform"),
    (imports_against_the_stream, "fem_megatron/a.py", "def f():\n    import pretrain.config"),
    (imports_against_the_stream, "pretrain/a.py", "import kernels.fem_attention as k"),
    (
        imports_against_the_stream,
        "data_prep/a.py",
        "import importlib\nimportlib.import_module('pretrain.config')",
    ),
    (imports_against_the_stream, "tools/a.py", "from tests.kernels import oracle"),
    (knows_cuda, "pretrain/a.py", "import torch\nx = torch.cuda.is_available()"),
    (patches_a_library, "pretrain/a.py", "import torch\ntorch.Tensor.cuda = None"),
    (patches_a_library, "tools/a.py", "from megatron.core import parallel_state as p\np.x = 1"),
    (patches_a_library, "tools/a.py", "import megatron.core\nsetattr(megatron.core.utils, 'x', 1)"),
    (knows_a_release, "tools/a.py", "import megatron.core\nx = megatron.core.__version__"),
    (own_exit_code, "tools/a.py", "def main():\n    return 2"),
    (own_exit_code, "tools/a.py", "import sys\nsys.exit(75)"),
    (own_list_of_secrets, "tools/a.py", "ENDINGS = ('KEY', 'PASSWD')"),
    (too_long, "tools/a.py", "x = 1\n" * (MODULE_LINES + 1)),
    (too_long, "tools/a.py", "def f():\n" + "    x = 1\n" * FUNCTION_LINES),
    (undocumented, "tools/a.py", "x = 1"),
    (undocumented, "tools/a.py", "'''M.'''\ndef f(): pass"),
    (undocumented, "tools/a.py", "'''M.'''\nclass C:\n    '''C.'''\n    def f(self): pass"),
    (not_plain, "tools/a.py", "def f():\n    'Whether it is any.'"),
    (not_plain, "tools/a.py", "class C:\n    'The file says so.'"),
    (wide_prose, "a.md", "```sh\nmake\n```\n- " + "words " * 17),
    (names_a_machine, "a.yaml", "prefix: /home/me/data"),
    (names_a_machine, "a.md", "see http://wiki.internal/page"),
    (names_a_machine, "a.sh", "MASTER_ADDR=10.0.0.7"),
]


@pytest.mark.parametrize(("rule", "name", "text"), FAULTS)
def test_a_rule_finds_its_fault(rule: Rule, name: str, text: str) -> None:
    assert len(rule({name: text})) == 1


INTERFACE = (
    "class P:\n    '''P.'''\n    def f(self): 'F.'\nclass C:\n    '''C.'''\n    def f(self): 0"
)


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (
            imports_against_the_stream,
            "tools/hf/a.py",
            "from .export import x\nfrom ..demo import y\nimport pretrain, kernels",
        ),
        (patches_a_library, "pretrain/a.py", "import torch\nself.torch = torch\nx.torch.y = 1"),
        (
            own_exit_code,
            "tools/a.py",
            "def main():\n    return Exit.WRONG_INPUT\ndef f():\n    return 2\nsys.exit(main())",
        ),
        (
            too_long,
            "tools/a.py",
            "'''M.\n\nLong, because the table is.\n'''\n" + "x = 1\n" * MODULE_LINES,
        ),
        (undocumented, "tools/a.py", f"'''M.'''\ndef _f(): pass\n{INTERFACE}"),
        (
            undocumented,
            "tools/a.py",
            (
                "'M.'\nclass C:\n    'C.'\n    def f(self): 'F.'\nclass D(C[int]):\n    'D.'\n   "
                " def f(self): 0"
            ),
        ),
        (
            wide_prose,
            "a.md",
            (
                f"```sh\n{101 * 'x'}\n```\n| {101 * 'x'} |\n    {101 * 'x'}\n<!-- a:begin"
                f" -->\n{101 * 'x'}\n<!-- a:end -->"
            ),
        ),
        (
            names_a_machine,
            "a.md",
            "https://github.com/x 127.0.0.1 version 1.2.3 ~/data runs/home/x",
        ),
    ],
)
def test_a_rule_lets_the_rest_pass(rule: Rule, name: str, text: str) -> None:
    assert rule({name: text}) == []


# --- imports that only a running process shows ----------------------------------------------------


def loaded_after(
    modules: list[str], of: tuple[str, ...] = ("torch", "megatron", "transformers")
) -> str:
    """Return the packages in ``of`` that are loaded after importing ``modules`` in a new
    interpreter.
    """
    code = f"import sys, {', '.join(modules)}; print(*sorted(set({of!r}) & set(sys.modules)))"
    return printed(sys.executable, "-c", code)


def modules_of(top_folder: str) -> list[str]:
    """Return a package's modules by their dotted names, without commands."""
    names = [
        name.removesuffix(".py").replace("/", ".")
        for name in source_files()
        if name.startswith(f"{top_folder}/")
    ]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def test_torch_free_modules() -> None:
    assert loaded_after(TORCH_FREE) == ""
    assert loaded_after(modules_of("data_prep")) == ""
    assert (
        loaded_after([name for name in modules_of("launch") if name not in IN_JOBS_WITH_TORCH])
        == ""
    )
    # The check does find a module that is loaded.
    assert "torch" in loaded_after(["kernels.fem_attention"])


def test_what_runs_inside_jobs_needs_the_standard_library_alone() -> None:
    """The supervisor may have only a node's Python, outside the container."""
    inside = [name for name in modules_of("launch") if name.startswith("launch.supervise")] + [
        "launch.node.rank",
        "launch.node.checks",
    ]
    assert (
        loaded_after(
            inside + modules_of("fem_common"), ("yaml", "jinja2", "torch", "numpy", "psutil")
        )
        == ""
    )
    # The check does find a module that is loaded.
    assert loaded_after(["launch.job.render"], ("jinja2",)) == "jinja2"


def test_a_process_without_cuda_does_not_wait_for_the_compiler_and_loggers() -> None:
    """Importing torch's compiler takes three seconds for every rank, command and test process;
    wandb one second, TensorBoard half.
    """
    code = (
        "import sys, torch; from fem_megatron.megatron import platform, upstream; "
        "upstream.import_megatron(); import pretrain.run; "
    )
    code += "platform.initialize_distributed(); "
    code += (
        "print(torch.cuda.is_available() or not {'torch._dynamo', 'torch._inductor', 'wandb',"
        " 'tensorboard'} & {*sys.modules})"
    )
    assert printed(sys.executable, "-c", code) == "True"


# --- packaging ------------------------------------------------------------------------------------


def project() -> dict[str, Any]:
    """Return the [project] table of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def requirements(*extras: str) -> dict[str, Requirement]:
    """Return canonical name -> requirement of the project and the named extras."""
    listed = [
        *project()["dependencies"],
        *(one for extra in extras for one in project()["optional-dependencies"][extra]),
    ]
    return {
        canonicalize_name(requirement.name): requirement for requirement in map(Requirement, listed)
    }


def test_constraints_pin_what_the_project_asks_for() -> None:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    # No local version, no index, no range.
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[\w.]+", line)] == []
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines)
    for name, requirement in requirements("dev", "gpu").items():
        assert requirement.specifier.contains(pins[name], prereleases=True), (
            f"{requirement} but {pins[name]} is pinned"
        )


def test_every_third_party_import_is_declared() -> None:
    distribution = {
        "yaml": "pyyaml",
        "megatron": "megatron-core",
        "huggingface_hub": "huggingface-hub",
        "lm_eval": "lm-eval",
    }
    distribution |= {"fla": "flash-linear-attention", "sklearn": "scikit-learn", "PIL": "pillow"}
    known = {*sys.stdlib_module_names, *ROOMS}
    used = set()
    for name, text in source_files().items():
        used |= {module.split(".")[0] for _, module in imported(name, text)}
    used -= known
    declared = set(requirements("gpu", "deepspeed", "eval"))
    assert {name for name in used if distribution.get(name, name) not in declared} == set()
    # The reverse: every requirement is imported, by the extras' also by tests, or is here.
    assert set(requirements()) - {distribution.get(name, name) for name in used} == {"py-spy"}
    for name, text in python_sources().items():
        used |= {module.split(".")[0] for _, module in imported(name, text)}
    asked = set(requirements(*project()["optional-dependencies"]))
    assert asked - {distribution.get(name, name) for name in used} == NOT_IMPORTED.keys()


NOT_IMPORTED = {
    **dict.fromkeys(("py-spy", "mypy", "ruff"), "a command"),
    **dict.fromkeys(("pytest-timeout", "pytest-xdist"), "a plugin of pytest"),
    **dict.fromkeys(("flask", "flask-cors"), "moto's server imports it"),
    "types-pyyaml": "types for mypy",
    "gcsfs": "fsspec imports it for gs://",
    "flash-attn": "kernels/fem_attention/engines.py imports it by name",
}
"""Requirements that no file of the project imports, with their use."""


def test_the_readme_draws_the_house_and_gives_a_reason_for_every_dependency() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r"^([\w]+)/ ", text[text.index("```text") :], re.MULTILINE))
    folders = {name.split("/")[0] for name in repository_files() if "/" in name}
    assert drawn == {folder for folder in folders if not folder.startswith(".")}
    rows = re.findall(r"^\| *`([\w-]+)` *\| *(\S.*?) *\|", text, re.MULTILINE)
    assert set(requirements("gpu", "deepspeed", "eval", "dev")) <= {
        canonicalize_name(name) for name, _ in rows
    }


def test_the_readme_is_short() -> None:
    """Code and table separators do not count as words."""
    text = texts(".md")["README.md"]
    words = re.sub(r"(?s)^```.*?^```$|\||---+", " ", text, flags=re.MULTILINE).split()
    assert len(words) <= 1000


def test_transformers_does_not_take_our_kernels_for_its_own() -> None:
    """Hugging Face publishes a package `kernels`; transformers detects it by name and version."""
    from transformers.utils import import_utils

    low = tuple(map(int, import_utils.KERNELS_MIN_VERSION.split(".")))
    high = tuple(map(int, import_utils.KERNELS_MAX_VERSION.split(".")))
    version = tuple(map(int, str(project()["version"]).split(".")))
    assert not low <= version < high
    assert not import_utils.is_kernels_available()
