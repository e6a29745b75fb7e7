"""Slurm: the script of a job, its submission, its state and its end.

The script starts one task a rank. Slurm's signals then reach every rank, and ranks find each other at the first node.
"""

import functools
import re
import shlex
import sys

from rowwise.base.errors import DataError, SpecError
from rowwise.base.scratch import Scratch
from rowwise.base.textfile import parse_whole
from rowwise.cli.job import Job, JobRequest, State, run_program

RESTARTS = 5  # most, while none of them has saved a checkpoint
GRACE_S = 120  # from SIGTERM to the time limit
SUBMITTED = re.compile(r"([0-9]{1,18})(;[\w.-]+)?", re.ASCII)  # a job's number, and its cluster
HERE = "expected a login node of the cluster; --dry-run prints the script"
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

# Ranks meet on the first node, which runs this script, at a port by the number of the job.
MASTER_ADDR=$(hostname)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
WORLD_SIZE=$((SLURM_JOB_NUM_NODES * {nproc}))
OMP_NUM_THREADS=${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}
export MASTER_ADDR MASTER_PORT WORLD_SIZE OMP_NUM_THREADS

# A task for each rank. Ranks end together; where one is lost, and others do not notice it, they end 300 s later.
# SIGTERM ends all after the same step, with a checkpoint. The same command goes on from the newest one in $run.
began=$(date +%s)
srun --ntasks="$WORLD_SIZE" --ntasks-per-node={nproc} --wait=300 \
  bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; exec "$@"' rank \
  {command} --run "$run"
code=$?

# 143: SIGTERM came before the time limit or for a preemption, so queue again, which ends this script while it sleeps;
# but not for ever where no start gets to a checkpoint. After scancel this line is not reached.
newest=$(stat --format=%Y "$run"/ckpt/step-*/manifest.json 2>/dev/null | sort --numeric-sort | tail --lines=1)
if [ "${{newest:-0}}" -ge "$began" ] || [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
  if [ "$code" = 143 ]; then scontrol requeue "$SLURM_JOB_ID" && sleep 60; fi
fi
exit "$code"
"""


def make_script(request: JobRequest) -> str:
    """The batch script of a job; settings are options of sbatch, and `grace` the seconds before the time limit."""
    settings = dict(request.settings)
    grace = settings.pop("grace", str(GRACE_S))
    if not 1 <= (parse_whole(grace) or 0) <= 65535:
        raise SpecError(f"--job grace={grace}", "seconds from 1 to 65535, the time to save before the time limit")
    taken = settings.keys() & {"ntasks", "ntasks-per-node", "chdir"}
    if taken:
        raise SpecError(f"--job {min(taken)}=...", hint="use --nodes and --nproc, and start the command in its folder")
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


def parse_job_id(said: str) -> str:
    """The number of a job, from what sbatch prints."""
    submitted = SUBMITTED.fullmatch(said.strip())
    if submitted is None:
        raise SpecError(f"sbatch prints {said[:80]!r}", "the number of a job alone, as --parsable prints it")
    return submitted[1]


def submit(request: JobRequest) -> Job:
    with Scratch() as scratch:
        script = scratch.path / "job.sh"
        script.write_text(make_script(request))
        try:
            job_id = parse_job_id(run_program(["sbatch", "--parsable", str(script)], HERE))
        except DataError as error:
            hint = "sinfo -s lists partitions, and --job KEY=VALUE sets any option of sbatch"
            raise SpecError(error, hint=hint) from None
    name = f"slurm-{job_id}"
    log = f"{name}.log"
    if "output" in request.settings:
        known = {"j": job_id, "A": job_id, "x": request.settings.get("job-name", request.recipe), "%": "%"}
        log = re.sub("%(.)", lambda pattern: known.get(pattern[1], pattern[0]), request.settings["output"])
    return request.submitted(name, job_id, log, find_cluster())


@functools.cache
def find_cluster() -> str:
    """The name of the cluster to which Slurm's programs speak here; empty if none answers."""
    try:
        found = re.search(r"^ClusterName\s*=\s*(\S+)", run_program(["scontrol", "show", "config"], HERE), re.MULTILINE)
    except (DataError, SpecError):
        return ""
    return found[1] if found else ""


def find_state(job: Job) -> tuple[State, str]:
    """The state of a job, and Slurm's word for it or the reason of a job that waits."""
    here = find_cluster()
    if "" not in (here, job.cluster) and here != job.cluster:
        raise DataError(
            f"it is a job of the cluster {job.cluster}, and this is {here}", f"a login node of {job.cluster}"
        )
    try:
        shown = run_program(["scontrol", "--oneliner", "show", "job", job.id], HERE)
    except DataError as error:
        if "Invalid job id" not in str(error):
            raise
        return "gone", "Slurm has forgotten it"
    found = re.search(r"\bJobState=(\S{1,99}) Reason=(\S{1,99})", shown)
    if found is None:
        raise DataError(f"scontrol show job {job.id}: no JobState in what it prints")
    state: State = next((state for state, words in WORDS.items() if found[1] in words), "running")
    why = str(found[2] if state == "pending" else found[1])
    return state, why


def cancel(job: Job) -> None:
    run_program(["scancel", job.id], HERE)
