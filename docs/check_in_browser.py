"""Checks the built documentation in a browser: ``make docs-check``.

Chromium opens every page at a width of 1280 pixels, in light and dark. The check fails if a code block or a table is
clipped, if an image or a link within the pages is missing, or if a page is wider than the window. Screenshots of some
pages are left beside the HTML, in ``screenshots``, for people to look at.

Needs Chromium (``apt-get install chromium``) or Chrome, found on the path or named by the variable ``CHROMIUM``.
"""

import argparse
import concurrent.futures
import functools
import html
import http.server
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading

WIDTH, HEIGHT = 1280, 1600
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SHOWN = ("index", "quickstart", "fine_tuning", "specs", "checks", "lisa", "performance", "api")

# Loads each page in a frame of the width of the window, and writes what is wrong into an element of its own.
HARNESS = """\
<!doctype html><meta charset="utf-8"><body><pre id="found">[]</pre><script>
const pages = PAGES, found = [], seen = new Map();
const frame = document.createElement("iframe");
frame.style.cssText = "width:WIDTHpx;height:HEIGHTpx;border:0";
document.body.append(frame);
const load = (url) => new Promise((done) => { frame.onload = done; frame.src = url; });
const clipped = (element) => element.scrollWidth > element.clientWidth + 1;
const exists = async (url) => {
  const [page, anchor] = url.split("#");
  if (!seen.has(page)) seen.set(page, fetch(page).then(async (r) => (r.ok ? await r.text() : null)));
  const text = await seen.get(page);
  return text !== null && (!anchor || text.includes(`id="${decodeURIComponent(anchor)}"`));
};
(async () => {
  for (const page of pages) for (const mode of ["light", "dark"]) {
    localStorage.setItem("mode", mode);
    localStorage.setItem("theme", mode);
    await load("/" + page + ".html");
    const inside = frame.contentDocument, say = (what) => found.push(`${page} (${mode}): ${what}`);
    if (clipped(inside.documentElement)) say("wider than the window");
    for (const entry of inside.querySelectorAll(".bd-sidebar-secondary a"))
      if (entry.getBoundingClientRect().right > WIDTH) say(`a clipped entry of the contents: ${entry.innerText}`);
    for (const block of inside.querySelectorAll("article .highlight pre"))
      if (clipped(block)) say(`a clipped code block, ${block.scrollWidth - block.clientWidth} px: ` +
        block.innerText.split("\\n").reduce((a, b) => (a.length > b.length ? a : b)));
    for (const table of inside.querySelectorAll("article .pst-scrollable-table-container, article table"))
      if (clipped(table)) say(`a clipped table: ${table.innerText.split("\\n")[0]}`);
    for (const image of inside.querySelectorAll("article img"))
      if (!image.naturalWidth) { await image.decode().catch(() => say(`a missing image: ${image.src}`)); }
    const ink = frame.contentWindow.getComputedStyle(inside.querySelector("article p") || inside.body).color;
    const bright = Math.max(...ink.match(/[\\d.]+/g).slice(0, 3).map(Number)) > 128;
    if (bright !== (mode === "dark")) say("the text has the colour of the other mode");
    if (mode === "light") for (const link of inside.querySelectorAll("article a[href]"))
      if (link.origin === location.origin && !(await exists(link.href)))
        say(`a dead link: ${link.getAttribute("href")}`);
  }
  document.getElementById("found").textContent = JSON.stringify(found);
  document.title = "done";
})();
</script>
"""


def main() -> None:
    """Prints what is wrong and exits with status 1, or says that nothing is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("html", type=pathlib.Path, help="the folder that sphinx-build wrote")
    folder = parser.parse_args().html
    browser = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        sys.exit(
            "no browser to check the documentation with\n"
            f"  got: none of {', '.join(NAMES)} on the path\n"
            "  expected: Chromium or Chrome\n"
            "  fix: apt-get install chromium, or set CHROMIUM to the path of one"
        )
    pages = sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.html"))
    pages = [page for page in pages if not page.startswith(("_", "genindex", "py-modindex", "search"))]
    if not pages:
        sys.exit(f"no pages in {folder}: build them first, with make docs")
    with server(folder, pages) as address, tempfile.TemporaryDirectory() as profile:
        found = check(browser, profile, address)
        screenshots(browser, profile, address, folder / "screenshots")
    print("\n".join(found) or f"{len(pages)} pages, in light and dark: nothing clipped, missing or dead")
    print(f"screenshots: {folder / 'screenshots'}")
    sys.exit(bool(found))


class server:  # noqa: N801
    """Serves a folder, and the harness, on a free port of this machine."""

    def __init__(self, folder: pathlib.Path, pages: list[str]):
        harness = (
            HARNESS.replace("PAGES", json.dumps(pages)).replace("WIDTH", str(WIDTH)).replace("HEIGHT", str(HEIGHT))
        )

        class Handler(http.server.SimpleHTTPRequestHandler):
            def do_GET(self):
                if self.path != "/harness":
                    return super().do_GET()
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                return self.wfile.write(harness.encode())

            def log_message(self, *_):
                pass

        handler = functools.partial(Handler, directory=str(folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)

    def __enter__(self) -> str:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()


def run(browser: str, profile: str, *arguments: str) -> str:
    """What Chromium prints. It runs as root in containers, so without its sandbox, and sees these pages alone."""
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
    ]
    nowhere = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
    done = subprocess.run(
        [*command, nowhere, *arguments], capture_output=True, text=True, timeout=600, check=False, encoding="utf-8"
    )
    if done.returncode:
        sys.exit(f"{browser} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def check(browser: str, profile: str, address: str) -> list[str]:
    """What is wrong on the pages."""
    window = f"--window-size={WIDTH},{HEIGHT}"
    page = run(browser, profile, window, "--virtual-time-budget=600000", "--dump-dom", f"{address}/harness")
    result = re.search(r'<pre id="found">(.*?)</pre>', page, re.DOTALL)
    if "<title>done</title>" not in page or not result:
        sys.exit("the browser did not come to the end of the pages")
    return json.loads(html.unescape(result[1]))


def screenshots(browser: str, profile: str, address: str, folder: pathlib.Path) -> None:
    """Takes pictures of some pages."""
    folder.mkdir(exist_ok=True)

    def shoot(page: str) -> None:
        target = folder / f"{page.replace('/', '-')}.png"
        run(browser, f"{profile}/{target.stem}", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={target}",
            "--virtual-time-budget=5000", f"{address}/{page}.html")  # fmt: skip

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(shoot, SHOWN))


if __name__ == "__main__":
    main()
