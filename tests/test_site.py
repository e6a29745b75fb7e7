"""The documentation builds as a site without a warning, and a browser shows each page without an error."""

import functools
import json
import os
import queue
import re
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from report import browser

ROOT = Path(__file__).parents[1]
NARROW = 400
HARNESS = """<!doctype html><body><script>
const pages = PAGES, found = {};
async function look(page) {
  const frame = document.createElement("iframe");
  frame.style.cssText = "width:WIDTHpx;height:800px;border:0";
  const loaded = new Promise((done) => { frame.onload = done; });
  frame.src = page;
  document.body.append(frame);
  await loaded;
  found[page] = frame.contentDocument.documentElement.scrollWidth;
  frame.remove();
}
(async () => {
  for (const page of pages) await look(page);
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
})();
</script></body>"""


class Handler(SimpleHTTPRequestHandler):
    """Serves the site, and keeps what the page posts."""

    def log_message(self, *_):
        pass

    def do_POST(self):
        self.server.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", place]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return place


@pytest.mark.slow
def test_every_page_in_a_browser(site):
    pages = sorted(str(page.relative_to(site)) for page in site.rglob("*.html") if page.name != "404.html")
    assert len(pages) > 40
    (site / "look.html").write_text(HARNESS.replace("PAGES", json.dumps(pages)).replace("WIDTH", str(NARROW)))
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=site)) as server:
        server.found = queue.Queue()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with browser.opened(f"http://127.0.0.1:{server.server_port}/look.html") as log:
            found = server.found.get(timeout=100)
            said = [line for line in log.read_text(errors="replace").splitlines() if "CONSOLE" in line]
        server.shutdown()
    assert found.keys() == set(pages)
    assert {page: width for page, width in found.items() if width > NARROW} == {}
    assert said == []


@pytest.mark.slow
def test_nothing_is_fetched_from_elsewhere(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]+)"', page.read_text("utf-8"))
        assert not [url for url in fetched if "canonical" not in url], page


@pytest.mark.slow
def test_the_reference_has_every_command_and_key(site):
    from rowwise.recipes.recipe import Recipe

    commands = (site / "reference" / "commands.html").read_text("utf-8")
    for name in ("train", "resume", "plan", "data inspect", "ckpt verify"):
        assert f"rowwise {name}" in commands
    keys = (site / "reference" / "recipe.html").read_text("utf-8")
    assert all(f"<code>{name}</code>" in keys for name in Recipe.__struct_encode_fields__)
