"""A real browser without a window, steered over its own pipe: pages, what they log, how wide they are."""

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from report.browser import FLAGS, executable

STEERED = (*(flag for flag in FLAGS if "virtual-time" not in flag), "--hide-scrollbars", "--remote-debugging-pipe")
PATIENCE_s = 60


class Browser:
    """One tab of it."""

    def __init__(self, read: int, write: int) -> None:
        self.read, self.write = read, write
        self.last, self.rest, self.session = 0, b"", None
        self.events: list[dict] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params) -> dict:
        self.last += 1
        message = {"id": self.last, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.last:
                assert "error" not in answer, answer
                return answer["result"]

    def receive(self) -> dict:
        """The next message; events are kept."""
        while b"\0" not in self.rest:
            assert select.select([self.read], [], [], PATIENCE_s)[0], "the browser is silent"
            more = os.read(self.read, 1 << 20)
            assert more, "the browser has ended"
            self.rest += more
        line, self.rest = self.rest.split(b"\0", 1)
        message = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    def resize(self, width: int, height: int) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def visit(self, address: str) -> list[dict]:
        """Load a page, and what happened meanwhile."""
        self.events.clear()
        self.ask("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.receive()
        self.value("new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)))")
        return self.events

    def value(self, expression: str):
        found = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")


@contextmanager
def browser() -> Iterator[Browser]:
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # The browser reads from descriptor 3 and writes to 4.
    script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, tempfile.TemporaryFile() as log:
        command = ["bash", "-c", script, executable(), *STEERED, f"--user-data-dir={profile}"]
        process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), stdout=log, stderr=log)
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_in, ours_out)
        finally:
            process.terminate()
            process.wait()
            os.close(ours_in)
            os.close(ours_out)


def complaints(events: list[dict], host: str) -> list[str]:
    """Errors on the console, and requests to anywhere else."""
    found = []
    for event in events:
        said = event["params"]
        match event["method"]:
            case "Runtime.exceptionThrown":
                found.append(said["exceptionDetails"]["text"])
            case "Runtime.consoleAPICalled" if said["type"] in ("error", "assert"):
                found.append(str([one.get("value") for one in said["args"]]))
            case "Log.entryAdded" if said["entry"]["level"] == "error":
                found.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")
            case "Network.requestWillBeSent" if not said["request"]["url"].startswith((host, "data:", "blob:")):
                found.append(f"asks {said['request']['url']}")
    return found
