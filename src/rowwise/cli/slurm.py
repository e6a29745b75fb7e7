"""Slurm: job script, submission, state and cancellation.

The script starts one task per rank. Signals of Slurm reach every rank, and ranks rendezvous on the first node.
"""

import functools
import re
import shlex
import sys

from rowwise.base.errors import DataError, SpecError
from rowwise.base.scratch import Scratch
from rowwise.base.textfile import parse_whole
from rowwise.cli.job import Job, JobRequest, State, run_program

RESTARTS = 5  # maximum without a new checkpoint
GRACE_S = 120  # from SIGTERM to the time limit
SUBMITTED = re.compile(r"([0-9]{1,18})(;[\w.-]+)?", re.ASCII)  # job id and cluster
NO_SLURM = "expected a login node of the cluster; --dry-run prints the script"
WORDS: dict[State, tuple[str, ...]] = {
    "pending": ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "PREEMPTED", "SPECIAL_EXIT"),
    "completed": ("COMPLETED",),
    "cancelled": ("CANCELLED",),
    "failed": ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"),
}

SCRIPT = r"""#!/bin/bash
# Trains {recipe}; nodes: {nodes}, ranks on each: {nproc}. Edit and keep this; submit it with: sbatch FILE
{directives}

run={run}

# Ranks meet on the first node, which runs this script, at a port derived from the job id.
MASTER_ADDR=$(hostname)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
WORLD_SIZE=$((SLURM_JOB_NUM_NODES * {nproc}))
OMP_NUM_THREADS=${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}
export MASTER_ADDR MASTER_PORT WORLD_SIZE OMP_NUM_THREADS

# One task per rank. Ranks end together; if one is lost and others do not detect it, they end 300 s later.
# SIGTERM ends all after the same step, with a checkpoint. The same command resumes from the newest one in $run.
began=$(date +%s)
srun --ntasks="$WORLD_SIZE" --ntasks-per-node={nproc} --wait=300 \
  bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; exec "$@"' rank \
  {command} --run "$run"
code=$?

# 143: SIGTERM, of the time limit or a preemption, so requeue, which ends this script while it sleeps; but not for
# ever if no attempt saves a checkpoint. scancel ends the script before this line.
newest=$(stat --format=%Y "$run"/ckpt/step-*/manifest.json 2>/dev/null | sort --numeric-sort | tail --lines=1)
if [ "${{newest:-0}}" -ge "$began" ] || [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
  if [ "$code" = 143 ]; then scontrol requeue "$SLURM_JOB_ID" && sleep 60; fi
fi
exit "$code"
"""


def make_script(request: JobRequest) -> str:
    """The batch script of a job; settings are options of sbatch, and `grace`, the seconds before the time limit."""
    settings = dict(request.settings)
    grace = settings.pop("grace", str(GRACE_S))
    if not 1 <= (parse_whole(grace) or 0) <= 65535:
        raise SpecError(f"--job grace={grace}", "seconds from 1 to 65535, the time to save before the time limit")
    conflicts = settings.keys() & {"ntasks", "ntasks-per-node", "chdir"}
    if conflicts:
        hint = "use --nodes and --nproc, and start the command in its folder"
        raise SpecError(f"--job {min(conflicts)}=...", hint=hint)
    options = {
        "job-name": request.recipe,
        "nodes": str(request.nodes),
        "ntasks-per-node": str(request.nproc),
        "chdir": str(request.cwd),
        "output": str(request.cwd).replace("%", "%%") + "/slurm-%j.log",
        "open-mode": "append",
        "signal": f"TERM@{grace}",
        "requeue": "",
        **settings,
    }
    lines = [f"#SBATCH --{key}" + (f"={shlex.quote(value)}" if value else "") for key, value in options.items()]
    runs = shlex.quote(str(request.runs / request.recipe))
    return SCRIPT.format(
        recipe=request.recipe,
        nodes=options["nodes"],
        nproc=request.nproc,
        restarts=RESTARTS,
        directives="\n".join(lines),
        run=f"{runs}/slurm-$SLURM_JOB_ID" if request.run is None else shlex.quote(str(request.run)),
        command=shlex.join([sys.executable, "-m", "rowwise", *request.command]),
    )


def parse_job_id(output: str) -> str:
    """The job id in the output of sbatch."""
    submitted = SUBMITTED.fullmatch(output.strip())
    if submitted is None:
        raise SpecError(f"sbatch prints {output[:80]!r}", "only a job id, as of --parsable")
    return submitted[1]


def submit(request: JobRequest) -> Job:
    with Scratch() as scratch:
        script = scratch.path / "job.sh"
        script.write_text(make_script(request))
        try:
            job_id = parse_job_id(run_program(["sbatch", "--parsable", str(script)], NO_SLURM))
        except DataError as error:
            hint = "sinfo -s lists partitions, and --job KEY=VALUE sets any option of sbatch"
            raise SpecError(error, hint=hint) from None
    name = f"slurm-{job_id}"
    log = f"{name}.log"
    if "output" in request.settings:
        fields = {"j": job_id, "A": job_id, "x": request.settings.get("job-name", request.recipe), "%": "%"}
        log = re.sub("%(.)", lambda pattern: fields.get(pattern[1], pattern[0]), request.settings["output"])
    return request.submitted(name, job_id, log, find_cluster())


@functools.cache
def find_cluster() -> str:
    """The name of the cluster of this host; empty if none answers."""
    try:
        config = run_program(["scontrol", "show", "config"], NO_SLURM)
    except (DataError, SpecError):
        return ""
    match = re.search(r"^ClusterName\s*=\s*(\S+)", config, re.MULTILINE)
    return match[1] if match else ""


def find_state(job: Job) -> tuple[State, str]:
    """The state of a job, and the state name of Slurm or the reason of a pending job."""
    cluster = find_cluster()
    if "" not in (cluster, job.cluster) and cluster != job.cluster:
        raise DataError(
            f"the job runs on cluster {job.cluster}, this is a login node of {cluster}",
            f"a login node of {job.cluster}",
        )
    try:
        output = run_program(["scontrol", "--oneliner", "show", "job", job.id], NO_SLURM)
    except DataError as error:
        if "Invalid job id" not in str(error):
            raise
        return "gone", "Slurm has forgotten it"
    match = re.search(r"\bJobState=(\S{1,99}) Reason=(\S{1,99})", output)
    if match is None:
        raise DataError(f"scontrol show job {job.id}: no JobState in its output")
    state: State = next((state for state, words in WORDS.items() if match[1] in words), "running")
    reason = str(match[2] if state == "pending" else match[1])
    return state, reason


def cancel(job: Job) -> None:
    run_program(["scancel", job.id], NO_SLURM)
