"""`rowwise` as a fork of a process that has imported torch: of a small command, imports are three quarters.

    subprocess.run([*warm.command(environment), "train", "small.yaml"], env=environment)

A client takes the place of the command: it hands its arguments, folder, variables, limits, and standard streams to the
server, passes signals on, and ends as the fork ends; if the client is killed, so is the fork. The fork runs
`python -m rowwise` as a new interpreter would. Of variables that are read before that (PYTHONPATH, OMP_NUM_THREADS)
there is a server for each choice; a client with others becomes a new interpreter. Tests of how commands start, and of
processes by their number, start them otherwise.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import struct
import sys

EARLY = ("PYTHON", "OMP_", "MKL_", "LD_")  # variables that count before there is a fork
PRELOADED = ("rowwise.cli.main", "rowwise.cli.rank", "pandas")
LIMITS = tuple(getattr(resource, f"RLIMIT_{name}") for name in ("AS", "DATA", "CPU", "CORE", "FSIZE", "NOFILE"))
COLD = 1 << 16  # instead of an exit status
COUNT, SECONDS = struct.Struct("=I"), struct.Struct("=d")
USED = "ROWWISE_TESTS_SECONDS"  # a folder, in which the parent of a client has a file of its forks' processor time
ended = [1]  # exit codes of this process; the last one counts, which is of an exception, if there is no other
on = False  # set by `tiers.py` where there are forks; otherwise each command is a new interpreter


def command(environment=os.environ):
    """What is followed by the arguments of `rowwise`."""
    if not on:
        return [sys.executable, "-m", "rowwise"]
    return [sys.executable, "-IS", __file__, _server(json.dumps(_early(environment), sort_keys=True))]


def _early(environment):
    return {name: value for name, value in environment.items() if name.startswith(EARLY)}


@functools.cache
def _server(early):
    """The name of the socket of a server, which ends with this process."""
    import subprocess

    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # the system chooses a name that is no file
    listener.listen(64)
    name = listener.getsockname()[1:].decode()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(EARLY)} | json.loads(early)
    server = subprocess.Popen(
        [sys.executable, __file__, str(listener.fileno())],
        env=environment, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], start_new_session=True,
    )  # fmt: skip
    listener.close()

    atexit.register(server.communicate)  # which closes its input
    return name


def ask(name, args):
    """The client: ends as the command ends."""
    limits = [resource.getrlimit(limit) for limit in LIMITS]
    request = json.dumps({"args": args, "cwd": os.getcwd(), "environment": dict(os.environ), "limits": limits}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(b"\0" + name.encode())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: connection.send(bytes([number])))
        socket.send_fds(connection, [COUNT.pack(len(request))], [0, 1, 2])
        connection.sendall(request)
        answer = connection.recv(COUNT.size, socket.MSG_WAITALL)
        used = connection.recv(SECONDS.size, socket.MSG_WAITALL)
    if not answer:
        raise SystemExit("tests/warm.py: the server has ended")
    (status,) = COUNT.unpack(answer)
    if used and USED in os.environ:
        with contextlib.suppress(FileNotFoundError), open(f"{os.environ[USED]}/{os.getppid()}", "ab") as file:
            file.write(used)
    if status == COLD:
        os.execv(sys.executable, [sys.executable, "-m", "rowwise", *args])
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no other handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


class Server:
    """Forks a process for each client, and stands between both until it ends."""

    def __init__(self, listener):
        self.listener, self.early, self.selector = listener, _early(os.environ), selectors.DefaultSelector()
        for file, about in ((0, None), (listener, None)):
            self.selector.register(file, selectors.EVENT_READ, about)

    def serve(self):
        """Returns in each fork, with its request and its standard streams."""
        while True:
            found = [key for key, _ in self.selector.select()]
            # Clients that were killed come first: who comes after them finds none of their forks.
            for key in sorted(found, key=lambda key: (not isinstance(key.data, int), key.fileobj is self.listener)):
                if key.fileobj == 0:
                    raise SystemExit
                if key.fileobj is self.listener:
                    if mine := self.accept(self.listener.accept()[0]):
                        return mine
                elif isinstance(key.data, int):
                    self.pass_on(key.fileobj, key.data)
                else:
                    self.finish(key.fileobj, *key.data)

    def accept(self, connection):
        try:
            request, streams = _receive(connection)
        except EOFError:  # it was killed
            connection.close()
            return None
        if _early(request["environment"]) != self.early:
            connection.send(COUNT.pack(COLD))
        elif pid := os.fork():
            self.selector.register(connection, selectors.EVENT_READ, pid)
            self.selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
        else:
            return request, streams
        for stream in streams:
            os.close(stream)
        return None

    def pass_on(self, connection, pid):
        """A signal that the client was sent; SIGKILL if it is gone."""
        number = connection.recv(1) or bytes([signal.SIGKILL])
        os.kill(pid, number[0])
        if number[0] == signal.SIGKILL:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def finish(self, ended, pid, connection):
        for file in (ended, connection):
            self.selector.unregister(file)
        os.close(ended)
        _, status, used = os.wait4(pid, 0)
        with connection, contextlib.suppress(BrokenPipeError):
            connection.send(COUNT.pack(status) + SECONDS.pack(used.ru_utime + used.ru_stime))


def _receive(connection):
    count, streams, _, _ = socket.recv_fds(connection, COUNT.size, 3)
    request = bytearray()
    while len(count) < COUNT.size or len(request) < COUNT.unpack(count)[0]:
        if not (more := connection.recv(1 << 16)):
            raise EOFError
        request += more
    return json.loads(request), streams


def run(request, streams):
    """The fork: `python -m rowwise` in the state of a new process."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1 << 12)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for limit, values in zip(LIMITS, request["limits"], strict=True):
        resource.setrlimit(limit, values)
    sys.path[0] = request["cwd"]
    sys.argv[1:] = request["args"]
    try:
        runpy.run_module("rowwise", run_name="__main__", alter_sys=True)
        ended.append(0)
    except SystemExit as how:
        ended.append(how.code if isinstance(how.code, int) else int(how.code is not None))
        raise


def _end():
    """Ends the process without taking torch apart, for which a fork would copy most of its memory."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended[-1])


def main():
    atexit.register(_end)  # the first one, which runs last
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command does before it imports torch
    server = Server(socket.socket(fileno=int(sys.argv[1])))
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # a look at an object would copy its page
    run(*server.serve())


if __name__ == "__main__" and sys.flags.isolated:
    ask(sys.argv[1], sys.argv[2:])
elif __name__ == "__main__":
    main()
