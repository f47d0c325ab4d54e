"""The pages: programs run, links lead somewhere, lines are short, and the bytes are right.

The program of README.md has a test of its own, in a Python of its own: tests/test_readme.py.
"""

import json
import re
from pathlib import Path

import jax
import pytest

import jaxcomm
from jaxcomm.kernels._implementations import OPERATIONS
from processes import COMPILED_ANEW, free_port, run_processes
from test_readme import BLOCK, program

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + DOCS
LONGEST_LINE, README_LINES = 120, 150

FENCED = re.compile(r"^(```|~~~).*?^\1$", re.S | re.M)
LINK = re.compile(r"\]\(([^)\s]+)\)")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose(markdown: str) -> str:
    """The page on its own lines, with nothing where code and tables are."""
    text = FENCED.sub(lambda code: "\n" * code[0].count("\n"), markdown)
    return re.sub(r"^\|.*$", "", text, flags=re.M)


def long_lines(markdown: str) -> list[str]:
    """The lines of prose that are too long, with their numbers."""
    lines = enumerate(prose(markdown).splitlines(), 1)
    return [f"line {i}: {len(line)}" for i, line in lines if len(line) > LONGEST_LINE]


def anchors(markdown: str) -> set[str]:
    """What links to the headings of a page end in."""
    headings = re.findall(r"^#+ (.*)$", prose(markdown), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, markdown: str) -> list[str]:
    """The links to files that are not there, or to headings that these do not have."""
    broken = []
    for link in LINK.findall(FENCED.sub("", markdown)):
        if re.match(r"https?:|mailto:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name
        if not target.exists():
            broken.append(link)
        elif anchor and anchor not in anchors(target.read_text() if name else markdown):
            broken.append(link)
    return broken


@each_page
def test_lines_of_prose_are_short(page: Path) -> None:
    assert long_lines(page.read_text()) == []


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_what_is_wrong_with_a_page_is_found() -> None:
    long = "x" * (LONGEST_LINE + 1)
    page = f"# A page\n\n| {long} |\n\n```\n{long}\n```\n{long}\n"
    assert long_lines(page) == ["line 8: 121"]
    here = ROOT / "README.md"
    links = "[a](LICENSE) [b](#a-page) [c](docs/none.md) [d](#no-page) [e](https://x.org)"
    assert broken_links(here, f"# A page\n{links}\n") == ["docs/none.md", "#no-page"]
    assert broken_links(here, "[f](docs/methods.md#votes) [g](docs/methods.md#none)") == [
        "docs/methods.md#none"
    ]


@pytest.mark.standard_promotion  # optax promotes
@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_the_programs_of_a_page_run(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And print what the page shows as a text. The devices that it asks for are there already."""
    asked: list[int] = []
    monkeypatch.setattr(jaxcomm, "simulate_devices", asked.append)
    source, reasons = program(page.read_text())
    fences = re.findall(r"^ *(?:```|~~~) *py\w*", page.read_text(), re.M)
    assert len(fences) == len(BLOCK.findall(page.read_text())), "a block of another form is not run"
    assert reasons == []
    assert jax.device_count() == 8
    exec(compile(source, str(page), "exec"), {})
    assert set(asked) <= {8}
    printed = capsys.readouterr().out
    for shown in re.findall(r"^```text\n(.*?)^```$", page.read_text(), re.M | re.S):
        assert shown in printed


@pytest.mark.multiprocess
def test_the_recipe_of_several_processes_runs() -> None:
    script = f"""
        import os, runpy, sys
        sys.argv[1:] = ["127.0.0.1:{free_port()}", "2", os.environ["RANK"]]
        runpy.run_path({str(ROOT / "docs/several_processes.py")!r}, run_name="__main__")
    """
    done = run_processes(2, script, join=False)
    lines = [process.stdout.splitlines()[-1] for process in done]
    assert [line.partition(":")[0] for line in lines] == ["process 0 of 2", "process 1 of 2"]
    assert lines[0].partition(":")[2] == lines[1].partition(":")[2]  # the same weights


def test_the_page_on_kernels_names_all_of_them() -> None:
    rows = re.findall(
        r"^\| (`.*`) \| .* \| (Mosaic|Triton) \|$", (ROOT / "docs/kernels.md").read_text(), re.M
    )
    named = {name: ("xla", kernel.lower()) for names, kernel in rows for name in names.split(", ")}
    assert {name.strip("`"): kernels for name, kernels in named.items()} == OPERATIONS


BYTES = """
import json, os
import jax, jaxcomm, optax
from jax.sharding import NamedSharding, PartitionSpec as P

SIDE = 2048  # one bucket of 16 MiB


def report_of(tx, mesh):
    placed = lambda shape, dtype, spec: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, spec)
    )
    weights = placed((SIDE, SIDE), "float32", P())
    gradients = placed((mesh.size, SIDE, SIDE), "float32", P("data"))
    state = jax.tree.map(
        lambda x, spec: placed(x.shape, x.dtype, spec),
        jax.eval_shape(tx.init, weights),
        jaxcomm.state_spec(tx, weights, mesh),
    )
    program = jax.jit(tx.update).lower(gradients, state, weights)
    return jaxcomm.wire_report(program.compile({"xla_backend_optimization_level": 0}))


found = []
for expression in json.loads(os.environ["EXPRESSIONS"]):
    for world in (4, 16):
        mesh = jaxcomm.data_mesh(devices=jax.devices()[:world])
        with jax.set_mesh(mesh):
            report = report_of(eval(expression), mesh)
        most = least = float(report.bytes_max)
        branches = report.by_branch()
        for name in {name for name, _ in branches}:
            sent = [float(r.bytes_max) for (n, _), r in branches.items() if n == name]
            least -= most - min(sent)
        found.append((least / SIDE**2, most / SIDE**2))
print(json.dumps(found))
"""


def rows_of_bytes(markdown: str) -> list[tuple[str, float, float]]:
    """What to write, and its bytes at 4 and 16 devices, from the table of a page."""
    row = re.compile(r"^\| [^|]+ \| `(jaxcomm\.[^`]+)`[^|]* \| ([\d.]+) \| ([\d.]+) \|$", re.M)
    return [(code, float(four), float(sixteen)) for code, four, sixteen in row.findall(markdown)]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_bytes_of_the_table_are_those_of_compiled_programs() -> None:
    """The step that sends least; of corrected votes, the mean over eight steps."""
    rows = rows_of_bytes((ROOT / "docs/choose.md").read_text())
    assert len(rows) == 9, rows
    assert {*rows_of_bytes((ROOT / "README.md").read_text())} <= {*rows}
    vote = 'jaxcomm.majority_vote("data")'
    chains = [f"optax.chain({c}, {vote})" if "control" in c else c for c, *_ in rows]
    env = COMPILED_ANEW | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=16",
        "EXPRESSIONS": json.dumps(chains),
    }
    (finished,) = run_processes(1, BYTES, join=False, env=env, timeout=280)
    found = json.loads(finished.stdout.splitlines()[-1])
    for i, (code, *shown) in enumerate(rows):
        for number, (least, most) in zip(shown, found[2 * i : 2 * i + 2], strict=True):
            mean = (7 * least + most) / 8 if "control" in code else least
            assert abs(mean - number) <= 0.0051, (code, mean, number)
