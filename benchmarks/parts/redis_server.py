"""A real Redis server on the loopback address, which keeps nothing on a disk."""

import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

OPTIONS = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--loglevel", "warning", "--protected-mode", "no")
LIMIT_s = 60.0  # to start


class RedisServer:
    """One server, which can be killed, stopped and started again; `program`: of Redis, or of a server like it."""

    def __init__(self, folder: Path, *options: str, program: str = "redis-server") -> None:
        if shutil.which(program) is None or shutil.which("redis-cli") is None:
            raise RuntimeError(f"no {program}, or no redis-cli: run tools/redis.sh, which installs Redis or says how")
        self.folder, self.options, self.program, self.port = folder, options, program, 0
        folder.mkdir(parents=True)
        while not self.port:
            self.port = random.SystemRandom().randrange(12_000, 30_000)  # a cluster uses the port 10,000 above as well
            if not self.start():
                self.port = 0

    def start(self) -> bool:
        """Whether it answers; not where its port is another's."""
        command = [self.program, "--port", str(self.port), "--dir", str(self.folder), *OPTIONS, *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        end_s = time.monotonic() + LIMIT_s
        while self.process.poll() is None:
            if f"process_id:{self.process.pid}\r" in self.ask("INFO", "server"):
                return True
            if time.monotonic() > end_s:
                raise TimeoutError(f"{self.program} did not answer within {LIMIT_s:g} s")
            time.sleep(0.01)
        return False

    def ask(self, *command: str) -> str:
        done = subprocess.run(["redis-cli", "-p", str(self.port), *command], capture_output=True, check=False)
        return done.stdout.decode(errors="replace")

    @property
    def address(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Let it answer nothing until `go_on`, with its connections open."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def flush(self) -> None:
        self.ask("FLUSHALL")

    @property
    def keys(self) -> int:
        return int(self.ask("DBSIZE"))

    def close(self) -> None:
        if self.process.poll() is None:
            self.go_on()
            self.kill()
