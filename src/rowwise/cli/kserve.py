"""KServe: the manifest of an InferenceService whose container is `rowwise serve`, of versions at a URL.

KServe's clients speak the Open Inference Protocol, which the server answers under `/v2`.
"""

from pathlib import Path

from rowwise.base.errors import SpecError
from rowwise.cli.kubernetes import dump_manifest, escape, service_name

PORT = 8080
CACHE = "/cache"
MIB = 1 << 20
SERVER_mib = 1024  # memory of the server without rows
EMPTY: dict[str, str] = {}  # a folder on the node's disk
COPIES = 2  # a new version is opened before the old one is closed

HEAD = """\
# Serves {name} by the Open Inference Protocol. Edit and keep this: a service account that may read the URL, replicas.
#
#   kubectl apply -f FILE
"""


def check_kserve(file: Path, url: str) -> None:
    """Raise unless the manifest can be written, and pods can read the versions."""
    if "://" not in url:
        raise SpecError(f"--kserve with the folder {url}", "a URL, which pods can read, such as s3://models/clicks")
    if (file.exists() and not file.is_file()) or not file.parent.is_dir():
        raise SpecError(f"--kserve {file}: no file can be written there", "a name in a folder that exists")


def make_service(name: str, url: str, image: str, version_bytes: int) -> str:
    """The manifest, as YAML; `version_bytes`: size of a version."""
    probes = {
        kind: {"httpGet": {"path": f"/v2/health/{path}", "port": PORT}, "periodSeconds": 5, "failureThreshold": 5}
        for kind, path in (("readinessProbe", "ready"), ("livenessProbe", "live"))
    }
    command = ["rowwise", "serve", url, "--cache", CACHE, "--host", "0.0.0.0", "--port", str(PORT)]
    container = {
        "name": "kserve-container",  # to which KServe routes
        "image": image,
        "command": [escape(word) for word in command],
        "ports": [{"containerPort": PORT, "protocol": "TCP"}],
        **probes,
        "resources": {"requests": {"memory": f"{SERVER_mib + COPIES * -(-version_bytes // MIB)}Mi"}},
        "volumeMounts": [{"name": "cache", "mountPath": CACHE}],
    }
    service = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": service_name(name)},
        "spec": {"predictor": {"containers": [container], "volumes": [{"name": "cache", "emptyDir": EMPTY}]}},
    }
    return HEAD.format(name=name) + dump_manifest(service)
