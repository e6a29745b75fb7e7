"""Machines by name: how many of what, with which memory; and what is wrong with a name."""

import json
import re

import msgspec
import pytest
from base.storage.stores import connect, s3_server
from hypothesis import given
from hypothesis import strategies as st

from rowwise import SpecError, Topology
from rowwise.cli.calibrate import check_target, save_profile
from rowwise.planning.perf.hardware import PRESETS, hardware_named
from rowwise.planning.planner.machines import machine_named, parse_size
from rowwise.recipes.sharding import load_hardware


@given(hosts=st.integers(1, 99), devices=st.integers(1, 99), preset=st.sampled_from(PRESETS))
def test_counts_and_a_preset(hosts, devices, preset):
    assert machine_named(f"{hosts}x{devices}x{preset}").topology == Topology(hosts=hosts, devices=devices)
    assert machine_named(f"{devices}x{preset}").topology == Topology(devices=devices)
    assert machine_named(f"{hosts}+2x{devices}x{preset}").topology == Topology(hosts + 2, devices, (hosts, 2))
    assert machine_named(preset).topology == Topology()
    assert machine_named(f"{devices}x{preset}").hardware == hardware_named(preset)


def test_memory_may_be_changed():
    found = machine_named("2x4xcpu:device=40GB,host=1.5TB").hardware
    assert (found.device_bytes, found.host_bytes, found.disk_bytes) == (40 * 10**9, 15 * 10**11, 0)
    assert found.device_Bps == hardware_named("cpu").device_Bps


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("40GB", 40 * 10**9), ("36GiB", 36 << 30), (".5 tb", 5 * 10**11), ("2k", 2000), ("3MiB", 3 << 20)],
)
def test_sizes(text, size):
    assert parse_size(text, "size") == size


def test_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zionex = hardware_named("zionex")
    (tmp_path / "a.json").write_text('{"topology": {"hosts": 2, "devices": 8}, "hardware": "zionex"}')
    written = msgspec.to_builtins(zionex)
    (tmp_path / "b.json").write_text(json.dumps({"topology": {"devices": 3}, "hardware": written}))
    (tmp_path / "mine.json").write_text(zionex.to_json())
    assert machine_named("a.json") == machine_named("2x8xzionex")
    assert machine_named(str(tmp_path / "b.json:device=1GB")) == machine_named("3xzionex:device=1GB")
    assert machine_named("2x8xmine.json") == machine_named("2x8xzionex")
    (tmp_path / "8xa.json").write_text('{"topology": {"devices": 5}, "hardware": "cpu"}')
    assert machine_named("8xa.json") == machine_named("5xcpu")  # a file of that name


def test_files_of_a_store(tmp_path, monkeypatch):
    with s3_server(tmp_path / "s3") as server:
        place = connect(server.endpoint)
        monkeypatch.setattr("rowwise.base.storage.folder._open_bucket", lambda url, patience: place)
        zionex = hardware_named("zionex").to_json().encode()
        place.write("day=3/mine.json", lambda: [zionex], len(zionex))
        place.create("a.json", b'{"topology": {"hosts": 2, "devices": 8}, "hardware": "zionex"}')
        place.create("broken.json", b"{")
        assert machine_named("s3://bucket/a.json") == machine_named("2x8xzionex")
        assert machine_named("2x8xs3://bucket/day=3/mine.json") == machine_named("2x8xzionex")
        assert machine_named("8xs3://bucket/day=3/mine.json:device=1GB") == machine_named("8xzionex:device=1GB")
        assert load_hardware("s3://bucket/day=3/mine.json") == hardware_named("zionex")
        with pytest.raises(FileNotFoundError, match=r"s3://bucket/none\.json"):
            machine_named("s3://bucket/none.json")
        with pytest.raises(SpecError, match=r"s3://bucket/none\.json"):
            load_hardware("s3://bucket/none.json")
        with pytest.raises(SpecError, match=r"s3://bucket/broken\.json"):
            machine_named("s3://bucket/broken.json")
        check_target("s3://bucket/machines/b.json")
        save_profile("s3://bucket/machines/b.json", zionex.decode())
        assert machine_named("4xs3://bucket/machines/b.json") == machine_named("4xzionex")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "8xv100",
            "no hardware preset 'v100'; there are h100-like, a100-like, a100-80gb-like, h200-like, mi300x-like, "
            "zionex, zen5, zen4, xeon, cpu: expected a machine such as 8xa100-like",
        ),
        ("zionx", "no hardware preset 'zionx'; there are zionex, "),
        ("", "no hardware preset ''; there are "),
        ("0xcpu", "topology '0xcpu': 1 hosts of 0 devices: expected at least one of each"),
        ("0x8xcpu", "topology '0x8xcpu': 0 hosts of 8 devices: expected at least one of each"),
        ("2+0x8xcpu", "topology '2+0x8xcpu': 2+0 hosts of 8 devices: expected at least one of each"),
        ("2+x8xcpu", "no hardware preset '2+x8xcpu'"),
        ("-2xcpu", "no hardware preset '-2xcpu'"),
        ("2xcpu:device=lots", "device='lots': expected a size such as 40GB"),
        ("2xcpu:device=-4GB", "device='-4GB': expected a size such as 40GB"),
        ("2xcpu:device=", "device='': expected a size such as 40GB"),
        ("2xcpu:device=9999999TB", "expected less than 1,152,921,504,606,846,976 bytes"),
        ("2xcpu:hbm=4GB", "'hbm=4GB': expected device=, host= or disk= and a size such as 40GB"),
        ("2xcpu:", "'': expected device=, host= or disk="),
        ("broken.json", "broken.json: not JSON: "),
        ("bytes.json", "bytes.json: not JSON: "),
        ("other.json", 'other.json: gpus: expected {"topology": '),
        ("list.json", 'list.json: list: expected {"topology": '),
        ("wrong.json", "wrong.json: Object contains unknown field `ranks`"),
        ("3xwrong.json", "wrong.json: not a hardware profile: "),
        ("named.json", "no hardware preset 'gpu'; there are "),
    ],
)
def test_what_is_wrong_is_named(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {"broken": "{", "other": '{"gpus": 8}', "list": "[]", "named": '{"topology": {}, "hardware": "gpu"}'}
    files["wrong"] = '{"topology": {"ranks": 8}, "hardware": "cpu"}'
    for name, body in files.items():
        (tmp_path / f"{name}.json").write_text(body)
    (tmp_path / "bytes.json").write_bytes(b'{"\xff": 1}')
    with pytest.raises(SpecError, match=re.escape(message)) as found:
        machine_named(text)
    assert "\n" not in str(found.value)


def test_no_file_is_an_error_of_the_file(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        machine_named(str(tmp_path / "none.json"))
