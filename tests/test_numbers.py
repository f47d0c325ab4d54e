"""The numbers of the README and of the pages are those of the results that benchmarks have kept."""

import re
from pathlib import Path

import pytest

from benchmarks import digits, tables

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_say_what_the_results_say(page: Path) -> None:
    written = page.read_text()
    assert tables.filled(written) == written, "run python -m benchmarks.tables"
    assert len(tables.PLACE.findall(written)) == written.count("<!-- table ")


def test_a_table_that_says_something_else_is_noticed() -> None:
    page = (ROOT / "README.md").read_text()
    row = next(line for line in page.splitlines() if '"cnat")`' in line)
    assert tables.filled(page.replace(row, row.replace("1.51", "1.15"))) == page


# What a result looks like: 98.1 %, 6.00 bytes, 37 ms, 2.4 times, 17x, +0.31.
RESULT = re.compile(
    r"[+-]?\d+(?:\.\d+)?(?= %|x\b| (?:bytes?|ms|s|nats?|times|MB|GiB)\b)|[+-]\d+\.\d+|\b\d+\.\d{2,}"
)


def results_in_prose(markdown: str) -> set[str]:
    """The numbers outside of programs, links and generated tables that look like results."""
    for made in (r"^```.*?^```$", r"<!-- table .*?<!-- end -->", r"`[^`]*`", r"\]\([^)]*\)"):
        markdown = re.sub(made, "", markdown, flags=re.S | re.M)
    return set(RESULT.findall(re.sub(r"(arXiv:|Apache-|Python )[\d.]+", "", markdown)))


def test_results_in_the_readme_stand_in_tables_that_are_made_or_checked() -> None:
    """In its prose alone are bytes, of the drawing and of bfloat16, that compiled programs have."""
    checked = re.findall(r"\| ([\d.]+) \| [\d.]+ \|$", (ROOT / "docs/choose.md").read_text(), re.M)
    bytes_of_four = {f"{float(number):.2f}" for number in checked}
    assert results_in_prose((ROOT / "README.md").read_text()) == {"6.00", "3.00", "0.19"}
    assert bytes_of_four >= {"6.00", "3.00", "0.19"}
    drawing = (ROOT / "docs/images/one_step.svg").read_text()
    assert {*re.findall(r">([\d.]+) bytes per weight<", drawing)} == {"6.00", "0.19"}


def test_a_result_in_prose_is_found() -> None:
    page = "It ends at 98.1 %, +0.31 above.\n\n```\n7.12 s\n```\n`0.5 ms`, [37 ms](a_9.25.md)."
    assert results_in_prose(page) == {"98.1", "+0.31", "37"}


COMMAND = re.compile(r"python -m\s+\w+|`make [\w-]+|--peers|\bconfigs/\w+\.py")
# Sections whose numbers follow from formulas and settings: other tests compare them with programs.
COUNTED = {
    "algorithms.md": {
        "Several devices on a host",
        "Bits of a vote",
        "Skips of the circulant graph",
    },
    "choose.md": {"By bytes"},
    "coming_from.md": {"DeepSpeed 1-bit"},
    "methods.md": {
        "What each method sends and keeps",
        "Codecs",
        "Sparse means",
        "Low rank",
        "Votes",
        "Local steps",
    },
    "papers.md": {"1-bit Adam", "Sparse means"},
    "planner.md": {"In a program"},
    "sharded.md": {"Bytes"},
}


def sections_without_command(markdown: str, tables: bool = False) -> list[str]:
    """The headings of sections that have a result and name no command; any number in `tables`."""
    parts = re.split(r"^#{2,} (.*)$", markdown, flags=re.M)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return [
        heading
        for heading, text in pairs
        if (has_result(text) or tables and re.search(r"^\|.*\d", text, re.M))
        and not COMMAND.search(text)
    ]


def has_result(text: str) -> bool:
    """A number outside of programs that looks like a result, in prose or in a table."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    names = r"(arXiv:|abs/|jax |\b[A-Z]-)[\d.]+"
    return bool(RESULT.search(re.sub(names, "", text)))


def test_every_measurement_names_its_command() -> None:
    page = (ROOT / "docs/measurements.md").read_text()
    assert sections_without_command(page, tables=True) == []
    found = sections_without_command("## A\n\n98.1 %\n\n## B\n\n| x | 3 |\n", tables=True)
    assert found == ["A", "B"]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_results_on_a_page_name_their_command(page: Path) -> None:
    found = sections_without_command(page.read_text())
    assert {*found} == COUNTED.get(page.name, set())


def test_runs_on_digits_are_kept_with_their_commands() -> None:
    """An accuracy is a number of images, and the command is that of the row."""
    for run, row in digits.read().items():
        assert row["command"] == digits.LAUNCH + run.arguments
        assert (ROOT / "configs" / run.arguments.split()[0]).exists()
        right = row["test_accuracy"] * row["test_images"]
        assert abs(right - round(right)) < 1e-3 and row["devices"] == row["processes"] == 4
