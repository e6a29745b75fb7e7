"""Kubernetes: the manifest of a job, of a headless Service and an Indexed Job; `kubectl` submits it.

Each pod starts its ranks and forwards SIGTERM to them. Ranks find each other at the first pod's name in the Service.
"""

import re
import shlex
from typing import Any

import yaml

from rowwise.base.errors import SpecError
from rowwise.cli.job import JobRequest, check_keys, check_number

GRACE_S = 120  # from SIGTERM to SIGKILL
PORT = 29500
NAME = re.compile("[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # of a Service; a DNS label, also with the pod's index
STOPPED, REFUSED = 143, 2  # exit codes: after SIGTERM; for an error that a retry does not fix
KEYS = ("claim", "cpu", "gpu", "grace", "image", "memory", "mount", "name", "namespace", "service-account")

HEAD = """\
# Trains {recipe}; pods: {nodes}, ranks in each: {nproc}. Edit and keep this.
#
#   kubectl apply -f FILE
#   kubectl logs --follow --prefix --selector job-name={name}
#   kubectl delete -f FILE          (ranks save a checkpoint first)
"""

SCRIPT = r"""# One process per rank. SIGTERM, from an eviction or a drained node, is forwarded to all of them.
ranks=()
for ((local = 0; local < {nproc}; local++)); do
  RANK=$((JOB_COMPLETION_INDEX * {nproc} + local)) LOCAL_RANK=$local {command} &
  ranks+=($!)
done
trap 'kill -TERM "${{ranks[@]}}" 2>/dev/null' TERM
code=0
for rank in "${{ranks[@]}}"; do
  while :; do
    wait "$rank" && rank_code=0 || rank_code=$?
    kill -0 "$rank" 2>/dev/null || break  # a signal interrupts wait while the rank still runs
  done
  if [ "$code" = 0 ]; then code=$rank_code; fi
done
exit "$code"
"""


def make_manifest(request: JobRequest) -> str:
    """The manifest of a job, as YAML."""
    settings = _check_settings(request)
    name, namespace = settings.get("name", service_name(request.recipe)), settings.get("namespace")
    if not NAME.fullmatch(name):
        raise SpecError(
            f"--job name={name}", "a small letter, then at most 39 small letters, digits and dashes: a name in DNS"
        )
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        # Ranks resolve the first pod before it is ready.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}},
    }
    # Pods of a stopped run restart and resume it; an error in a recipe or an option fails the job.
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [STOPPED]}},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [REFUSED]}},
    ]
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": request.nodes,
            "parallelism": request.nodes,
            "backoffLimit": 6 * request.nodes,
            "podFailurePolicy": {"rules": rules},
            "template": {"spec": _pod(request, settings, name)},
        },
    }
    head = HEAD.format(recipe=request.recipe, nodes=request.nodes, nproc=request.nproc, name=name)
    return head + "---\n".join(map(dump_manifest, (service, job)))


def dump_manifest(manifest: dict[str, Any]) -> str:
    return yaml.dump(manifest, Dumper=_ManifestDumper, sort_keys=False)


def _check_settings(request: JobRequest) -> dict[str, str]:
    settings = request.settings
    check_keys(settings, KEYS, "add other fields to the manifest")
    for key, why in (("image", "the container image with rowwise"), ("claim", "the volume claim with recipe and runs")):
        if not settings.get(key):
            raise SpecError(f"--on kubernetes without --job {key}=NAME", why)
    for key in ("grace", "gpu"):
        check_number(settings, key)
    return settings


def service_name(recipe: str) -> str:
    text = re.sub("[^a-z0-9]+", "-", recipe.lower()).strip("-")
    return (text if text[:1].isalpha() else f"run-{text}")[:40].strip("-")


def _pod(request: JobRequest, settings: dict[str, str], name: str) -> dict[str, Any]:
    command = shlex.join(["python", "-m", "rowwise", *request.command, "--run", str(request.run_of(name))])
    environment = {"MASTER_ADDR": f"{name}-0.{name}", "MASTER_PORT": PORT, "WORLD_SIZE": request.nodes * request.nproc}
    resources = {key: settings[key] for key in ("cpu", "memory") if key in settings}
    resources |= {"nvidia.com/gpu": settings["gpu"]} if "gpu" in settings else {}
    container = {
        "name": "ranks",
        "image": settings["image"],
        "command": ["bash", "-c", escape(SCRIPT.format(nproc=request.nproc, command=command))],
        "workingDir": str(request.cwd),
        "env": [{"name": key, "value": str(value)} for key, value in environment.items()],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "volumeMounts": [
            {"name": "shared", "mountPath": settings.get("mount", str(request.cwd))},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    account = {"serviceAccountName": settings["service-account"]} if "service-account" in settings else {}
    return {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(settings.get("grace", GRACE_S)),
        **account,
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": settings["claim"]}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def escape(text: str) -> str:
    """Escape a text in `command`, as the kubelet replaces `$$` by `$` and expands `$(NAME)`."""
    return re.sub(r"\${2,}|\$(?=\()", lambda dollars: 2 * dollars[0], text)


class _ManifestDumper(yaml.SafeDumper):
    """Writes scripts as block literals, and repeated values without YAML anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_ManifestDumper.add_representer(str, _write_text)
