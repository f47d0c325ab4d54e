"""The programs of the README run, top to bottom, as one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxcomm.plan.__main__ import main as planner
from processes import COMPILED_ANEW, run_processes

ROOT = Path(__file__).parent.parent
LEFT_OUT_AT_MOST = 3

# A block of Python, with the comment `<!-- not run: reason -->` above it where it cannot be run.
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n+)?```python\n(?P<code>.*?)^```$", re.S | re.M
)


def program(markdown: str) -> tuple[str, list[str]]:
    """All blocks that are to run, each on its lines of the page, and the reasons of the others."""
    lines, reasons = [""] * markdown.count("\n"), []
    for block in BLOCK.finditer(markdown):
        if block["reason"]:
            reasons.append(block["reason"])
            continue
        first = markdown.count("\n", 0, block.start("code"))
        for i, line in enumerate(block["code"].splitlines()):
            lines[first + i] = line
    return "\n".join(lines), reasons


def run_page(path: Path) -> subprocess.CompletedProcess[str]:
    """Runs the blocks of a page in one Python; a traceback names the lines of the page."""
    source = f"exec(compile({program(path.read_text())[0]!r}, {str(path)!r}, 'exec'))"
    command = [sys.executable, "-W", "error", "-c", source]
    env = os.environ | COMPILED_ANEW | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    del env["NPROC"]  # a reader has not set it
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.multiprocess
@pytest.mark.newest
def test_the_readme_runs() -> None:
    page = ROOT / "README.md"
    source, reasons = program(page.read_text())
    assert source.strip(), "README.md shows no program"
    fences = re.findall(r"^ *(?:```|~~~) *py\w*", page.read_text(), re.M)
    assert len(fences) == len(BLOCK.findall(page.read_text())), "a block of another form is not run"
    assert len(reasons) <= LEFT_OUT_AT_MOST, reasons
    done = run_page(page)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.multiprocess
def test_the_readme_runs_in_two_processes() -> None:
    source, _ = program((ROOT / "README.md").read_text())
    for process in run_processes(2, source):
        assert "2 devices" in process.stdout


ASKED = re.compile(
    r"`python -m jaxcomm\.plan ([^`]+)`\s+answers \"([^\"]+)\"; "
    r"with `([^`]+)` it answers \"([^\"]+)\""
)


@pytest.mark.parametrize("name", ["README.md", "docs/choose.md"])
def test_the_planner_answers_what_the_page_says(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / name).read_text()
    (found,) = ASKED.findall(page)
    assert page.count("python -m jaxcomm.plan ") == 1, "a command of another form is not run"
    command, answer, instead, other = found
    key = instead.partition("=")[0]
    changed = re.sub(rf"\b{key}=\S+", instead, command)
    assert changed != command
    for asked, said in ((command, answer), (changed, other)):
        monkeypatch.setattr(sys, "argv", ["plan", *asked.split()])
        assert planner() == 0
        assert capsys.readouterr().out.startswith(said)


def test_blocks_share_one_namespace_and_keep_their_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n```python\nx = 20\n```\ntext\n\n"
        "<!-- not run: needs a GPU -->\n```python\nraise SystemExit\n```\n"
        "```console\n$ false\n```\n"
        "```python\ny = x + 22\nprint(y)\n1 / 0\n```\n"
    )
    assert program(page.read_text())[1] == ["needs a GPU"]
    done = run_page(page)
    assert (done.returncode, done.stdout) == (1, "42\n")
    assert f'{page}", line 18' in done.stderr, done.stderr
