"""Ray: job script, submission, state and cancellation, by the HTTP API of Ray jobs.

The script starts a driver, `ray_job`, on the head node of the cluster.
"""

import http.client
import importlib.util
import json
import re
import secrets
import shlex
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from rowwise.base.errors import DataError, SpecError
from rowwise.base.textfile import decode_json
from rowwise.cli.job import MAX_SHOWN, Job, JobRequest, State, check_keys, check_number

GRACE_S = 120  # from SIGTERM to SIGKILL
WAIT_S = 60  # for a replacement of a lost node, before the job continues with fewer nodes
ANSWER_S = 20.0
MAX_ANSWER_bytes = 4 << 20  # of a response
AGENT_S, NO_AGENT = 60.0, "No available agent"  # retry time, and error, of a cluster that has just started
DEFAULTS = {"address": "http://127.0.0.1:8265", "cpus": "1", "gpus": "0", "grace": str(GRACE_S), "wait": str(WAIT_S)}
MINIMA = {"cpus": 1, "gpus": 0, "grace": 1, "wait": 0}
DASHBOARD = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")
WORDS: dict[str, State] = {"PENDING": "pending", "SUCCEEDED": "completed", "STOPPED": "cancelled", "FAILED": "failed"}

SCRIPT = r"""#!/bin/bash
# Trains {recipe}; nodes: {nodes}, ranks on each: {nproc}. Edit and keep this where all nodes see it; submit it with:
#
#   ray job submit --address {address} --no-wait --runtime-env-json '{environment}' -- bash FILE

name={name}
run={run}

# The driver reserves nodes, cores and GPUs (--cpus and --gpus are per rank), and starts the ranks. When a node is
# lost, it waits some seconds for a replacement. Then it resumes from the newest checkpoint in $run, on the largest
# available number of nodes in --nodes. SIGTERM, from ray job stop, ends ranks after the same step, with a checkpoint.
cd {cwd} || exit
exec {python} -m rowwise.cli.ray_job --nodes {counts} --nproc {nproc} --cpus {cpus} --gpus {gpus} --wait {wait} \
  --log "$name.log" --run "$run" -- {command}
"""


def make_script(request: JobRequest, name: str = "ray-$(date +%Y%m%d-%H%M%S)") -> str:
    """The script of a job, which Ray runs on its head node."""
    settings = _check_settings(request)
    runs = shlex.quote(str(request.runs / request.recipe))
    return SCRIPT.format(
        recipe=request.recipe,
        nodes=request.nodes,
        nproc=request.nproc,
        counts=_format_counts(request.node_counts or (request.nodes,)),
        address=shlex.quote(settings["address"]),
        environment=json.dumps(_environment(settings)),
        name=name,
        run=f'{runs}/"$name"' if request.run is None else shlex.quote(str(request.run)),
        cwd=shlex.quote(str(request.cwd)),
        python=shlex.quote(sys.executable),
        command=shlex.join(request.command),
        **{key: settings[key] for key in ("cpus", "gpus", "wait")},
    )


def _check_settings(request: JobRequest) -> dict[str, str]:
    settings = {**DEFAULTS, **request.settings}
    check_keys(settings, DEFAULTS)
    if not DASHBOARD.fullmatch(settings["address"]):
        raise SpecError(
            f"{settings['address']!r}",
            f"the URL of Ray's dashboard, such as {DEFAULTS['address']}, by --job address=URL or RAY_ADDRESS",
        )
    for key, minimum in MINIMA.items():
        check_number(settings, key, minimum)
    return settings


def _format_counts(counts: tuple[int, ...]) -> str:
    """Node counts in the format of `ray_job`: 1-4, or 1,2,4."""
    is_range = counts == tuple(range(counts[0], counts[-1] + 1)) and len(counts) > 1
    return f"{counts[0]}-{counts[-1]}" if is_range else ",".join(map(str, counts))


def _environment(settings: dict[str, str]) -> dict[str, dict[str, str]]:
    """Runtime environment of the script: the time between SIGTERM and SIGKILL."""
    return {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": settings["grace"]}}


def submit(request: JobRequest) -> Job:
    settings = _check_settings(request)
    if importlib.util.find_spec("ray") is None:  # the job uses this Python
        raise SpecError("--on ray needs Ray", hint="pip install 'rowwise[cluster]', or print the script with --dry-run")
    name = f"ray-{secrets.token_hex(4)}"
    job = request.submitted(name, name, f"{name}.log", settings["address"])
    body = {
        "entrypoint": f"exec bash -c {shlex.quote(make_script(request, name))}",
        "submission_id": name,
        "runtime_env": _environment(settings),
    }
    end_s = time.monotonic() + AGENT_S
    while True:
        try:
            _request(job.cluster, "api/jobs/", body)
        except DataError as error:
            if NO_AGENT not in str(error) or time.monotonic() > end_s:
                raise
            time.sleep(1)
        else:
            return job


def find_state(job: Job) -> tuple[State, str]:
    """The state of a job, and the message of Ray."""
    try:
        answer = _request(job.cluster, f"api/jobs/{job.id}")
    except _UnknownJob:
        return "gone", "Ray has forgotten it"
    status, message = str(answer.get("status")), str(answer.get("message") or "")
    return WORDS.get(status, "running"), message.partition("\n")[0].partition(",")[0] or status


def cancel(job: Job) -> None:
    _request(job.cluster, f"api/jobs/{job.id}/stop", {})


def _read_body(answer: http.client.HTTPResponse) -> bytes:
    """The body of a response up to a limit of size and time; a truncated body is invalid JSON."""
    body, end_s = bytearray(), time.monotonic() + ANSWER_S
    while len(body) < MAX_ANSWER_bytes and time.monotonic() < end_s and (piece := answer.read1(1 << 16)):
        body += piece
    return bytes(body)


class _UnknownJob(DataError):
    """No job of this name."""


def _request(address: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Response of the API to a POST with a body, or to a GET."""
    url = f"{address.rstrip('/')}/{path}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            result = decode_json(_read_body(answer), dict[str, Any])
    except urllib.error.HTTPError as error:
        with error:
            lines = error.read(MAX_SHOWN).decode(errors="replace").strip().splitlines() or [""]
        if error.code == http.HTTPStatus.NOT_FOUND and path.startswith("api/jobs/") and body is None:
            raise _UnknownJob(f"{url}: {lines[-1]}") from None
        raise DataError(f"Ray at {address} refuses ({error.code} {error.reason}): {lines[-1]}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DataError(
            f"no Ray answers at {address} ({getattr(error, 'reason', error)})",
            "the URL of a running cluster's dashboard (--job address=URL)",
            hint="or start a cluster here: ray start --head",
        ) from None
    return result
