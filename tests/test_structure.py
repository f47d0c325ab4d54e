"""What may import what, how long code may get, and what an import may cost.

Every rule is a function from a module's name and source to the list of what is wrong with it, and
every rule is shown a bad example that it must find. `python tests/test_structure.py` prints sizes.
"""

import ast
import functools
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("jaxcomm", "train", "configs", "tests", "benchmarks")

# Each layer of jaxcomm imports only itself and those to its left; `jaxcomm` itself is __init__.
# Any layer may import these.
ANYWHERE = ("_attached", "_aux", "_axes", "_batches", "_branches", "_cached_programs", "_context")
ANYWHERE += ("_compat", "_hosts", "_losses", "_marks", "_microbatches", "_numbers", "_names")
ANYWHERE += ("_jaxprs", "_nnx", "_notes", "_order", "_paths", "_pieces", "_placing", "_shards")
ANYWHERE += ("_unready", "_users_line", "_version")
STACK = ("kernels", "codecs", "collectives", "transforms")
BESIDE = ("compiling", "gradients", "mesh", "simulation", "wire", *ANYWHERE)  # nothing of it
PUBLISHED = ("algorithms", "sparse")  # modules of a layer under the names that users write
# These stand on top: they import anything, but networks read only who talks to whom.
TOP = ("explaining", "plan", "probe")
NETWORKS = ("fabrics", "files", "messages", "simulate", "steps", "topology")
READ_BY_NETWORKS = ("plan", "collectives.algorithms", "collectives._sending")
LIBRARIES = {  # who may import what; jaxcomm depends on nothing else
    "flax": ("train",),
    "jax": ("jaxcomm", "train"),
    "jax.experimental.pallas": ("jaxcomm.kernels",),
    "jaxlib": ("jaxcomm._compat",),
    "numpy": ("jaxcomm", "train"),
    "optax": ("jaxcomm.transforms", "train"),
    "scipy": ("jaxcomm.plan",),
    "yaml": ("jaxcomm.plan",),
}

MODULE_LIMIT, MODULE_AIM = 400, 250
FUNCTION_LIMIT, FUNCTION_AIM = 80, 40

Rule = Callable[[str, str], list[str]]


def within(name: str, parents: str | tuple[str, ...]) -> bool:
    """Whether a dotted name is one of `parents` or lies in one."""
    parents = (parents,) if isinstance(parents, str) else parents
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


# Many rules ask for the same source.
nodes = functools.cache(lambda source: list(ast.walk(ast.parse(source))))


def imports(source: str, module: str) -> Iterator[str]:
    """The dotted names that a module imports; `from a import b` is `a.b`, and `.` is resolved."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            base = ".".join(parents + ([node.module] if node.module else []))
            yield from (f"{base}.{alias.name}" for alias in node.names)


@functools.cache
def attributes(source: str) -> list[str]:
    """The dotted chains of names that a module uses, such as `jax.lax.psum`."""
    found = []
    for node in nodes(source):
        names = []
        while isinstance(node, ast.Attribute):
            names, node = [node.attr, *names], node.value
        if names and isinstance(node, ast.Name):
            found.append(".".join([node.id, *names]))
    return found


def layers(module: str, source: str) -> list[str]:
    """Inside jaxcomm, a layer imports only itself, those below it and the axis helpers."""
    if not within(module, "jaxcomm") or within(module, "jaxcomm.__init__"):
        return []
    own, *rest = module.split(".")[1:]
    if own in PUBLISHED:
        it = f"jaxcomm.collectives.{own}"
        return [f"{module} imports {x}" for x in imports(source, module) if not within(x, it)]
    if own not in (*STACK, *BESIDE, *TOP):
        return [f"{module} belongs to no layer"]
    below = STACK[: STACK.index(own) + 1] if own in STACK else READ_BY_NETWORKS if rest else ()
    allowed = tuple(f"jaxcomm.{layer}" for layer in (*below, own, *ANYWHERE))
    free = own in TOP and not {*rest} & {*NETWORKS}
    mine = [name for name in imports(source, module) if within(name, "jaxcomm") and not free]
    return [f"{module} imports {name}" for name in mine if not within(name, allowed)]


def libraries(module: str, source: str) -> list[str]:
    """A library is imported only where the table says; jaxcomm and configs import no others."""
    wrong = []
    for name in imports(source, module):
        top = name.split(".")[0]
        for library, users in LIBRARIES.items():
            if within(name, library) and not within(module, (*users, "tests", "benchmarks")):
                wrong.append(f"{module} imports {name}")
        if within(module, "jaxcomm"):
            known = top in sys.stdlib_module_names or top in (*LIBRARIES, "jaxcomm")
        else:
            known = not within(module, "configs") or top in ("ml_collections", "configs")
        wrong += [] if known else [f"{module} imports {name}"]
    return wrong


def programs(module: str, source: str) -> list[str]:
    """Nothing imports tests, train, benchmarks, notebooks or configs; some packages are for all."""
    folders = ("aot", "netlab", "pareto")
    files = ("arguments", "choices", "device_time", "digits", "links", "on_gpu", "planner", "plots")
    files += ("tables", "take", "time_to_loss")
    shared = tuple(f"benchmarks.{name}" for name in (*folders, *files))
    free = {"tests": ("tests", "train", *shared), "train": ("train",)}
    free["benchmarks"] = ("train", *shared)  # which time what it does
    free["configs"] = ("configs",)
    closed = ("tests", "train", "benchmarks", "notebooks", "configs")
    wrong = [name for name in imports(source, module) if within(name, closed)]
    allowed = free.get(module.split(".")[0], ())
    return [f"{module} imports {name}" for name in wrong if not within(name, allowed)]


def contents(module: str, source: str) -> list[str]:
    """`jaxcomm/__init__.py` is a contents page: a docstring, imports, `__all__`, no logic."""
    if module != "jaxcomm.__init__":
        return []
    plain = ast.Import | ast.ImportFrom | ast.Expr | ast.Assign
    lines = [ast.unparse(node) for node in ast.parse(source).body if not isinstance(node, plain)]
    return [f"{module} holds {line!r}" for line in lines]


@functools.cache
def public_names() -> set[str]:
    """What `jaxcomm/__init__.py` exports."""
    source = (ROOT / "jaxcomm" / "__init__.py").read_text()
    names = {name.split(".")[-1] for name in imports(source, "jaxcomm.__init__")}
    return {name for name in names if not name.startswith("_")}


def public(module: str, source: str) -> list[str]:
    """The training program uses public names of jaxcomm: no submodules, no underscores."""
    if not within(module, "train"):
        return []
    used = [n for n in imports(source, module) if within(n, "jaxcomm")] + [
        n for n in attributes(source) if within(n, "jaxcomm") and n.count(".") == 1
    ]
    known = {"jaxcomm", "jaxcomm.plan", *(f"jaxcomm.{name}" for name in public_names())}
    return [f"{module} uses {name}" for name in used if name not in known]


def private_jax(module: str, source: str) -> list[str]:
    """Nothing touches the private part of jax."""
    names = {*imports(source, module), *attributes(source)}
    return [f"{module} uses {name}" for name in sorted(names) if within(name, "jax._src")]


def permutations(module: str, source: str) -> list[str]:
    """Over several axes `jax.lax.ppermute` numbers devices otherwise than `axis_index` does."""
    if not within(module, "jaxcomm") or module in ("jaxcomm._axes", "jaxcomm.plan.probing"):
        return []
    found = "jax.lax.ppermute" in attributes(source)
    return [f"{module} calls jax.lax.ppermute; call _axes.ppermute"] if found else []


def widths(module: str, source: str) -> list[str]:
    """Zeros and ones name their dtype, which is float64 else where float64 is on."""
    if not within(module, "jaxcomm"):
        return []
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        f"{module}:{call.lineno} {ast.unparse(call)} names no dtype"
        for call in calls
        if ast.unparse(call.func) in ("jnp.zeros", "jnp.ones")
        and len(call.args) < 2
        and not call.keywords
    ]


def versions(module: str, source: str) -> list[str]:
    """Only `_compat` looks at the version of jax."""
    if module == "jaxcomm._compat":
        return []
    names = {*imports(source, module), *attributes(source)}
    version = ("jax.__version__", "jax.__version_info__", "jax.version", "jaxlib.version")
    return [f"{module} uses {name}" for name in sorted(names) if within(name, version)]


def functions(source: str) -> dict[str, int]:
    """The lines of each function without those of docstrings; a nested one counts in its outer."""
    lengths = {}
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstrings = sum(
                (inner.body[0].end_lineno or 0) - inner.body[0].lineno + 1
                for inner in ast.walk(node)
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and ast.get_docstring(inner) is not None
            )
            length = (node.end_lineno or 0) - node.lineno + 1 - docstrings
            lengths[f"{node.name}:{node.lineno}"] = length
    return lengths


def sizes(module: str, source: str) -> list[str]:
    """No module and no function beyond the limits."""
    lines = len(source.splitlines())
    wrong = [f"{module} has {lines} lines"] if lines > MODULE_LIMIT else []
    long = [item for item in functions(source).items() if item[1] > FUNCTION_LIMIT]
    return wrong + [f"{module}.{name} has {length} lines" for name, length in long]


def words(name: str, text: str) -> list[str]:
    """No reminders to ourselves, no paths of one machine."""
    reminder = r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b"
    path = r"(?<![\w.~\-/])/(?:root|work|home|Users)/"
    return [f"{name}: {match[0]}" for match in re.finditer(f"{reminder}|{path}", text)]


RULES: tuple[Rule, ...] = (
    layers,
    libraries,
    programs,
    contents,
    public,
    private_jax,
    permutations,
    widths,
    versions,
    sizes,
)

BAD: tuple[tuple[Rule, str, str], ...] = (
    (layers, "jaxcomm.codecs.bfloat16", "from jaxcomm.collectives import ring"),
    (layers, "jaxcomm.codecs.bfloat16", "from ..collectives import ring"),
    (layers, "jaxcomm.collectives.ring", "import jaxcomm"),
    (layers, "jaxcomm.transforms.mean", "from jaxcomm import wire"),
    (layers, "jaxcomm.wire", "from jaxcomm.kernels.bfloat16 import round"),
    (layers, "jaxcomm._compat", "import jaxcomm.mesh"),
    (layers, "jaxcomm.helpers", ""),
    (layers, "jaxcomm.algorithms", "from jaxcomm.collectives.sparse import oktopk"),
    (layers, "jaxcomm.plan.steps", "from jaxcomm.collectives import all_reduce"),
    (layers, "jaxcomm.transforms.mean", "from jaxcomm.plan import load"),
    (libraries, "jaxcomm.collectives.ring", "def f():\n    import optax"),
    (libraries, "jaxcomm.transforms.mean", "from flax import nnx"),
    (libraries, "jaxcomm.codecs.bfloat16", "from jax.experimental import pallas as pl"),
    (libraries, "jaxcomm.wire", "import scipy.stats"),
    (libraries, "configs.digits_resnet", "import jax"),
    (programs, "jaxcomm.wire", "from train import data"),
    (programs, "train.loop", "from configs import digits_resnet"),
    (programs, "train.loop", "import tests.processes"),
    (programs, "tests.test_wire", "from benchmarks import step"),
    (contents, "jaxcomm.__init__", "from jaxcomm import wire\nif wire:\n    x = 1"),
    (public, "train.step", "import jaxcomm.mesh"),
    (public, "train.step", "from jaxcomm.codecs import bfloat16"),
    (public, "train.step", "import jaxcomm\njaxcomm._compat.checks_on('data')"),
    (public, "train.step", "import jaxcomm\njaxcomm.no_such_name"),
    (private_jax, "tests.test_ring", "from jax._src import core"),
    (private_jax, "train.loop", "import jax\njax._src.config.update"),
    (permutations, "jaxcomm.collectives.ring", "import jax\njax.lax.ppermute(x, 'data', [])"),
    (widths, "jaxcomm.transforms.mean", "import jax.numpy as jnp\nx = jnp.zeros((2, 3))"),
    (versions, "jaxcomm.mesh", "import jax\nnew = jax.__version__ >= '0.11'"),
    (versions, "jaxcomm.mesh", "from jax import __version_info__"),
    (sizes, "jaxcomm.wire", "x = 1\n" * (MODULE_LIMIT + 1)),
    (sizes, "jaxcomm.wire", "def f():\n" + "    x = 1\n" * FUNCTION_LIMIT),
    (words, "README.md", "see the TO" + "DO list"),
    (words, "train/data.py", 'open("' + "/" + 'home/me/data")'),
)

GOOD: tuple[tuple[Rule, str, str], ...] = (
    (layers, "jaxcomm.transforms.mean", "from jaxcomm import _compat\nfrom jaxcomm import codecs"),
    (layers, "jaxcomm.collectives.ring", "from .schedule import shift\nfrom . import schedule"),
    (layers, "jaxcomm.plan.steps", "from jaxcomm.collectives.algorithms.schedule import Round"),
    (libraries, "jaxcomm.kernels.signs.pallas", "from jax.experimental.pallas import mosaic_gpu"),
    (programs, "train.loop", "from train import data"),
    (versions, "jaxcomm._compat", "import jax\njax.__version__"),
    (sizes, "jaxcomm.wire", 'def f():\n    """' + "line\n" * 90 + '"""'),
    (words, "README.md", "https://example.org/work/TODOs and ~/work/ and mktemp -t XXXXXX"),
)


@functools.cache
def tracked() -> list[Path]:
    """The files of the repository: those that git does not ignore, or all where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    if (ROOT / ".git").exists():
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        paths = [ROOT / line for line in listed.stdout.splitlines()]
    else:
        hidden = re.compile(r"(^|/)(\.(?!ci/)|__pycache__|workdir)")
        names = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*")]
        paths = [ROOT / name for name in names if not hidden.search(name)]
    return [path for path in paths if path.is_file()]


@functools.cache
def modules() -> dict[str, str]:
    """The source of every module, by its dotted name; packages end with `.__init__`."""
    paths = [path.relative_to(ROOT) for path in tracked() if path.suffix == ".py"]
    return {
        ".".join(path.with_suffix("").parts): (ROOT / path).read_text()
        for path in paths
        if path.parts[0] in FOLDERS
    }


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule: Rule) -> None:
    found = modules()
    assert {"jaxcomm.mesh", "tests.test_structure"} <= set(found)
    assert [wrong for module, source in found.items() for wrong in rule(module, source)] == []


@pytest.mark.parametrize(("rule", "module", "source"), BAD)
def test_rule_finds_a_bad_example(rule: Rule, module: str, source: str) -> None:
    assert rule(module, source) != []


@pytest.mark.parametrize(("rule", "module", "source"), GOOD)
def test_rule_lets_a_good_example_pass(rule: Rule, module: str, source: str) -> None:
    assert rule(module, source) == []


def test_words() -> None:
    wrong = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
            text = re.sub(r'"image/png": "[^"]*"', "", text)  # base64 holds any word
            wrong += words(str(path.relative_to(ROOT)), text)
        except UnicodeDecodeError:  # not text
            continue
    assert wrong == []


def run_python(source: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a few lines in a new Python whose warnings are errors."""
    command = [sys.executable, "-W", "error", "-c", source]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.newest
def test_import_is_silent_and_starts_no_backend() -> None:
    no_backend = {"JAX_PLATFORMS": "none_such"}
    imported = run_python("import jaxcomm", **no_backend)
    assert (imported.returncode, imported.stdout, imported.stderr) == (0, "", "")
    # The control: whatever starts a backend fails here.
    assert "none_such" in run_python("import jax; jax.devices()", **no_backend).stderr


def test_reading_a_config_imports_no_jax() -> None:
    names = [name for name in modules() if within(name, "configs")]
    assert names, "no config found"
    source = f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
    read = run_python(source + "assert 'jax' not in sys.modules, 'jax'")
    assert read.returncode == 0, read.stderr


def report() -> str:
    """What is above the aims, and the median function."""
    found = {name: source for name, source in modules().items() if not within(name, "tests")}
    lines = {name: len(source.splitlines()) for name, source in found.items()}
    lengths = {
        f"{name}.{f}": n for name, source in found.items() for f, n in functions(source).items()
    }
    above = [f"  {name}: {n} lines" for name, n in lines.items() if n > MODULE_AIM]
    above += [f"  {name}: {n} lines" for name, n in lengths.items() if n > FUNCTION_AIM]
    return "\n".join(
        [
            f"{len(lines)} modules (aim {MODULE_AIM} lines, limit {MODULE_LIMIT}), "
            f"{len(lengths)} functions (aim {FUNCTION_AIM}, limit {FUNCTION_LIMIT}, "
            f"median {statistics.median(lengths.values())}); above the aims: {len(above)}",
            *sorted(above),
        ]
    )


if __name__ == "__main__":
    print(report())
