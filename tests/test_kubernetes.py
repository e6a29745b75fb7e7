"""`rowwise train --on kubernetes`: the manifest has fields of Kubernetes' API, and its pods run as processes here."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from launching import ENVIRONMENT, FILE_NAMES, PRINTABLE, SCHEDULED, SMALL_JOB, rowwise, wait_for_step, write_recipe
from test_launch import RUN, result, same, tensors

from rowwise.base.errors import SpecError
from rowwise.cli.kubernetes import make_manifest

PLACES = {"image": "registry/rowwise:1", "claim": "shared"}
REQUEST = replace(SMALL_JOB, nodes=2, settings=PLACES)
DOLLARS = st.text("$()ORDERS_", min_size=1, max_size=9)


def check(value, kind, where=""):
    """Raise for a field that a type of the API does not have, or that is of another kind."""
    from kubernetes import client  # which takes seconds to import

    if match := re.fullmatch(r"list\[(.+)\]", kind):
        for place, one in enumerate(value):
            check(one, match[1], f"{where}[{place}]")
    elif match := re.fullmatch(r"dict\(str, (.+)\)", kind):
        for key, one in value.items():
            check(one, match[1], f"{where}.{key}")
    elif hasattr(client, kind):
        fields = getattr(client, kind)
        names = {name: key for key, name in fields.attribute_map.items()}
        for name, one in value.items():
            assert name in names, f"{where}: {kind} has no {name}"
            check(one, fields.openapi_types[names[name]], f"{where}.{name}")
    else:
        assert isinstance(value, {"str": str, "int": int, "bool": bool, "object": (str, int)}[kind]), (
            where,
            kind,
            value,
        )


def expand(text, variables):
    """What a container gets for an argument, by the rules of Kubernetes: $(NAME) expands if known, and $$ is $."""
    rule = re.compile(r"\$\$|\$\(([^)]*)\)")
    return rule.sub(lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]), text)


def parts_of(request):
    service, job = yaml.safe_load_all(make_manifest(request))
    return service, job, job["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    "more", [{}, {"gpu": "2", "cpu": "8", "memory": "64Gi", "namespace": "ads", "service-account": "a"}]
)
def test_fields_are_those_of_the_api(more):
    service, job, pod = parts_of(replace(REQUEST, settings={**PLACES, **more}))
    check(service, "V1Service")
    check(job, "V1Job")
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert pod["subdomain"] == service["metadata"]["name"] == service["spec"]["selector"]["job-name"] == "small"
    environment = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
    assert environment == {"MASTER_ADDR": "small-0.small", "MASTER_PORT": "29500", "WORLD_SIZE": "4"}
    assert pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") == more.get("gpu")
    assert job["metadata"].get("namespace") == more.get("namespace")


@given(
    st.lists(PRINTABLE | DOLLARS, max_size=3),
    FILE_NAMES,
)
@example(["$(MASTER_PORT)", "$$(MASTER_PORT)", "$$"], "$(WORLD_SIZE)$$$")
def test_any_text_reaches_each_rank_as_it_is(words, folder):
    _, _, pod = parts_of(replace(REQUEST, command=tuple(words), run=Path("/") / folder))
    container = pod["containers"][0]
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert all(expand(value, variables) == value for value in variables.values())
    script = expand(container["command"][2], variables).replace("python -m rowwise", "show")
    show = 'show() { printf "%s\\0" "$RANK" "$LOCAL_RANK" "$@" > "$LOCAL_RANK"; }; cd "$(mktemp -d)"; '
    done = subprocess.run(
        ["bash", "-c", f"({show}{script}); cat 0 1 2>/dev/null".replace(f"({show}", f"{show}(")],
        env={"JOB_COMPLETION_INDEX": "1", "PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    ranks = (["2", "0"], ["3", "1"])
    assert done.stdout == "".join("\0".join([*ids, *words, "--run", f"/{folder}", ""]) for ids in ranks)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"claim": "x"}, "without --job image=NAME: expected the container image"),
        ({"image": "x"}, "without --job claim=NAME: expected the volume claim"),
        ({**PLACES, "nope": "x"}, "--job nope=x: expected one of claim, cpu, gpu"),
        ({**PLACES, "grace": "0"}, "--job grace=0: expected a number from 1"),
        ({**PLACES, "gpu": "x"}, "--job gpu=x: expected a number from 1"),
        ({**PLACES, "gpu": "\u0662"}, "--job gpu=\u0662: expected a number from 1"),
        ({**PLACES, "name": "A_b"}, "--job name=A_b: expected a small letter, then at most 39"),
        ({**PLACES, "name": "2024-dlrm"}, "--job name=2024-dlrm: expected a small letter"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, error):
    with pytest.raises(SpecError, match=error):
        make_manifest(replace(REQUEST, settings=settings))


def test_a_name_begins_with_a_letter():
    for recipe, name in (("2024-DLRM", "run-2024-dlrm"), ("_a_b_", "a-b"), ("___", "run")):
        service, *_ = yaml.safe_load_all(make_manifest(replace(REQUEST, recipe=recipe, settings=PLACES)))
        assert service["metadata"]["name"] == name


@pytest.mark.slow
def test_the_command_prints_a_manifest_and_submits_nothing(tmp_path):
    write_recipe(tmp_path)
    command = ("train", "small.yaml", "--on", "kubernetes", "--job", "image=a", "--job", "claim=b", "--nodes", "2")
    shown = rowwise(tmp_path, *command, "--dry-run")
    assert [one["kind"] for one in yaml.safe_load_all(shown.stdout)] == ["Service", "Job"], shown.stderr
    refused = rowwise(tmp_path, *command)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "; run it with --dry-run ... | kubectl apply -f -" in refused.stderr


@pytest.mark.slow
@pytest.mark.dist
def test_pods_that_are_evicted_go_on_with_the_bits_of_a_local_run(tmp_path):
    """Each pod's script as a process, with one of this machine's names for the first."""
    alone = write_recipe(tmp_path / "alone", **SCHEDULED)
    assert rowwise(alone, "train", "small.yaml", "--nproc", "3").returncode == 0
    folder = write_recipe(tmp_path / "shared", **SCHEDULED)
    _, _, pod = parts_of(replace(REQUEST, nodes=3, nproc=1, run=folder / "run"))
    script = expand(pod["containers"][0]["command"][2], {})
    for attempt in range(2):
        with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
            probe.close()
            more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
            more["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
            how = {"cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
            each = [{**ENVIRONMENT, **more, "JOB_COMPLETION_INDEX": str(index)} for index in range(3)]
            pods = [stack.enter_context(subprocess.Popen(["bash", "-c", script], env=env, **how)) for env in each]
            if not attempt:
                wait_for_step(folder / "run", 8)
                pods[1].send_signal(signal.SIGTERM)  # one pod is evicted, and all ranks stop after one step
            errors = [one.communicate(timeout=120)[1] for one in pods]
            assert [one.returncode for one in pods] == [0 if attempt else 143] * 3, errors
        assert result(folder / "run")["status"] == ("finished" if attempt else "stopped")
    assert same(tensors(folder / "run"), tensors(alone / RUN))
