"""The site: it builds without a warning, has every public name, and looks right in a browser."""

import functools
import html
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import jaxcomm
from jaxcomm import algorithms, codecs, plan, sparse

ROOT = Path(__file__).parent.parent


def build(out: Path) -> None:
    """Builds the site; warnings, links that lead nowhere among them, are errors."""
    options = ["-c", "docs", "-b", "html", "-W", "--keep-going", "-n", "-q"]
    command = [sys.executable, "-m", "sphinx", *options, ".", str(out)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]


def names_in(out: Path) -> set[str]:
    """What the reference documents, from the inventory that other sites link by."""
    compressed = (out / "objects.inv").read_bytes().split(b"\n", 4)[4]
    lines = zlib.decompress(compressed).decode().splitlines()
    return {line.split()[0] for line in lines if " py:" in line}


def public_names() -> set[str]:
    modules = {"algorithms", "codecs", "plan", "sparse"}
    names = {f"jaxcomm.{name}" for name in set(jaxcomm.__all__) - modules}
    names |= {f"jaxcomm.codecs.{name}" for name in codecs.BY_NAME}
    names |= {f"jaxcomm.algorithms.{name}" for name in (*algorithms.BY_NAME, "hierarchical")}
    names |= {f"jaxcomm.sparse.{name}" for name in sparse.BY_NAME}
    names |= {f"jaxcomm.plan.fabrics.{name}" for name in plan.fabrics.FABRICS}
    return names | {f"jaxcomm.plan.{name}" for name in set(plan.__all__) - {"fabrics"}}


def test_the_site_builds_and_has_every_public_name(tmp_path: Path) -> None:
    build(tmp_path)
    assert len(public_names()) > 100
    assert public_names() - names_in(tmp_path) == set()


# Loads every page in a frame as wide as a screen, and looks at it. A frame without scripts stands
# for a reader without JavaScript.
LOOK = """<!DOCTYPE html><html lang="en"><title>look</title><body><script>
const pages = PAGES, views = [[1280, true], [390, true], [390, false]], found = [];
const wait = ms => new Promise(done => setTimeout(done, ms));
async function look(page, width, scripts) {
  const frame = document.createElement("iframe");
  if (!scripts) frame.sandbox = "allow-same-origin";
  frame.style = `width: ${width}px; height: 900px`;
  frame.src = page;
  const loaded = new Promise(done => { frame.onload = done; });
  document.body.append(frame);
  await loaded;
  const inside = frame.contentDocument, root = inside.documentElement;
  for (const image of inside.images) image.loading = "eager";
  for (let i = 0; i < 50 && ![...inside.images].every(x => x.complete); i++) await wait(100);
  await wait(200);
  const where = `${page}, ${width} wide${scripts ? "" : ", no scripts"}`;
  if (root.scrollWidth > root.clientWidth) {
    const wide = [...inside.querySelectorAll("article *")].find(
      x => x.getBoundingClientRect().right > root.clientWidth + 1 && !x.closest("pre, table"));
    found.push(`${where}: ${root.scrollWidth} wide, ${wide ? wide.outerHTML.slice(0, 120) : ""}`);
  }
  for (const image of inside.images)
    if (!image.naturalWidth) found.push(`${where}: no image ${image.getAttribute("src")}`);
  const article = inside.querySelector("article, main");
  if (!article || article.innerText.length < 100) found.push(`${where}: nothing to read`);
  frame.remove();
}
(async () => {
  for (const page of pages) for (const view of views) await look(page, ...view);
  document.body.innerHTML = "";
  const result = document.createElement("pre");
  result.textContent = JSON.stringify({found, looked: pages.length * views.length});
  document.body.append(result);
})();
</script></body></html>"""


def browser() -> str:
    """The command of a browser; the test is skipped where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(names)} is installed: the pages were NOT looked at")
    return found


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address at which a folder is served."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def look_at(folder: Path, pages: list[str], profile: Path) -> tuple[list[str], int]:
    """What is wrong with pages in a browser, and how many views were looked at."""
    (folder / "look.html").write_text(LOOK.replace("PAGES", json.dumps(pages), 1))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += [f"--user-data-dir={profile}", "--enable-logging=stderr", "--dump-dom"]
    with served(folder) as address:
        command = [browser(), *options, "--virtual-time-budget=900000", f"{address}/look.html"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    shown = re.search(r"<pre>(.*)</pre>", done.stdout)
    assert shown, done.stderr[-2000:]
    result = json.loads(html.unescape(shown[1]))
    said = re.findall(r"CONSOLE.*?\] (.*)", done.stderr)
    # What the theme tells of itself, and that a frame without scripts runs none.
    fine = re.compile(r"^.(\[PST\]|Got invalid theme mode|Blocked script execution)")
    wrong = [line for line in said if not fine.match(line)]
    return result["found"] + wrong, result["looked"]


@pytest.mark.slow
def test_every_page_in_a_browser(tmp_path: Path) -> None:
    """No message on the console, nothing wider than the screen, all images there."""
    browser()
    build(tmp_path / "site")
    pages = [str(p.relative_to(tmp_path / "site")) for p in (tmp_path / "site").rglob("*.html")]
    pages = sorted(page for page in pages if not page.startswith(("_", "index", "look", "search")))
    assert len(pages) > 20
    assert look_at(tmp_path / "site", pages, tmp_path / "profile") == ([], 3 * len(pages))


@pytest.mark.slow
def test_what_is_wrong_with_a_page_is_seen(tmp_path: Path) -> None:
    page = '<article style="width: 900px">{}<img src="none.png"><script>f()</script></article>'
    (tmp_path / "bad.html").write_text(page.format("words " * 50))
    found, looked = look_at(tmp_path, ["bad.html"], tmp_path / "profile")
    assert looked == 3
    for part in ("390 wide: 90", "no image none.png", "f is not defined"):
        assert any(part in line for line in found), (part, found)
