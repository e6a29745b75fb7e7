"""Small files are opened only if regular, read within bounds and decoded strictly; the property is the refusal."""

import os
import socket
from pathlib import Path

import msgspec
import pytest
import yaml

from rowwise.base.errors import SpecError, one_line, printable
from rowwise.base.plainyaml import MAX_NODES, load_yaml
from rowwise.base.textfile import (
    append,
    decode_json,
    file_time,
    parse_whole,
    read_bytes,
    read_text,
    refuse_links,
    write_new,
)


@pytest.mark.parametrize("kind", ["a folder", "a FIFO", "a socket", "a device"])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    match kind:
        case "a folder":
            path.mkdir()
        case "a FIFO":
            os.mkfifo(path)
        case "a socket":
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(str(path))
        case _:
            path = Path("/dev/zero")
    with pytest.raises(OSError, match=r"^.*expected a regular file|No such device") as caught:
        read_bytes(path)
    assert one_line(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("007", 7), ("9" * 18, 10**18 - 1), ("-5", -5), ("--5", None), ("-", None), ("", None), ("+5", None),
     (" 5", None), ("5\n", None), ("1_0", None), ("\uff15", None), ("\u0665", None), ("9" * 19, None)],
)  # fmt: skip
def test_a_number_has_digits_of_ascii(text: str, number: int | None) -> None:
    assert parse_whole(text, signed=True) == number
    assert parse_whole(text) == (None if text.startswith("-") else number)


@pytest.mark.parametrize(("seconds", "year"), [(0, 1970), (-(2.0**40), 1970), (2.0**33, 2242), (2.0**62, 9999)])
def test_files_have_dates_in_any_year(seconds: float, year: int) -> None:
    assert file_time(seconds).astimezone().year == year


def test_a_file_of_a_gigabyte_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        os.truncate(file.fileno(), 1 << 30)
    with pytest.raises(OSError, match="more than 64 MB"):
        read_bytes(path)


def test_files_without_a_size_are_counted_as_they_are_read() -> None:
    assert read_bytes("/proc/self/status", 1 << 20)
    with pytest.raises(OSError, match="more than"):
        read_bytes("/proc/self/status", 10)


def test_text_is_utf_8_with_or_without_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\xef\xbb\xbfa\n\xc3\xa9")
    assert read_text(path) == "a\né"
    path.write_bytes("a: é\n".encode("utf-16"))
    with pytest.raises(OSError, match="line 1: byte 0xff"):
        read_text(path)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": [' * 50_000, "nested too deeply"),
        (b'{"a": 1, "a": 1}', "'a' is given twice"),
        (b'[{"b": {"c": 1, "c": 2}}]', "'c' is given twice"),
        (b"9" * 5000, "out of range"),
        (b"1e999", "out of range"),
        (b'{"a": NaN}', "malformed"),
        (b"\xff\xfe{\0}\0", "malformed"),
        (b'"\xff"', "UTF-8|truncated"),
        (b'"\\ud800"', "malformed|truncated"),
        (b"", "truncated"),
    ],
)
def test_json_that_is_refused(text: bytes, what: str) -> None:
    with pytest.raises(msgspec.DecodeError, match=what) as caught:
        decode_json(text, object)
    assert "\n" not in str(caught.value)


LAUGHS = "a: &a [1,1,1,1,1,1,1,1]\n" + "".join(
    f"{chr(98 + k)}: &{chr(98 + k)} [{','.join(['*' + chr(97 + k)] * 9)}]\n" for k in range(9)
)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (LAUGHS, "counting aliases"),
        ("&a [*a]", "an alias of a value that contains it"),
        ("a: &a [1]\n" + "".join(f"a{k}: &a{k} [*a{k - 1 if k else ''}]\n" for k in range(60)), "levels"),
        ("[" * 1000, "more than 50 nested levels"),
        ("- " * 10_000, "more than 50 nested levels"),
        ("a: !!int 3", "the tag 'tag:yaml.org,2002:int'"),
        ("!!python/object/apply:os.system ['true']", "the tag 'tag:yaml.org,2002:python/object/apply:os.system'"),
        ("a: {b: 1, b: 2}", "'b' is given twice"),
        ('"\\ud800"', "invalid Unicode character"),
        ('a: "x\\0y"', "NUL"),
        ('"\\U00110000"', "invalid Unicode character"),
        (f"%YAML 1.{'9' * 5000}\n---\n", "long version number"),
        ("a\0b", "control characters"),
    ],
)
def test_yaml_that_is_refused(text: str, what: str) -> None:
    with pytest.raises(yaml.YAMLError, match=what):
        load_yaml(text)


def test_aliases_within_bounds_stand_for_what_they_name() -> None:
    assert load_yaml("a: &x {b: [1, 2]}\nc: *x\n") == {"a": {"b": ["1", "2"]}, "c": {"b": ["1", "2"]}}
    assert MAX_NODES > 10_000


def test_escapes_are_written_out_and_lines_stay_lines() -> None:
    assert printable("a\x1b[2J\u202e\x9b\rb\nc é 名") == "a\\x1b[2J\\u202e\\x9b\\rb\nc é 名"
    assert printable("4.16\u202fMB") == "4.16 MB"


def test_a_message_is_one_line_whatever_is_in_it() -> None:
    assert one_line(SpecError("column 'a\x1b[2J\nb\u202e'")) == "column 'a\\x1b[2J\\nb\\u202e'"


def test_a_new_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    outside, path = tmp_path / "outside", tmp_path / "x"
    outside.write_text("mine")
    path.symlink_to(outside)
    with pytest.raises(OSError, match="itself in its place"):
        append(path, b"more")
    write_new(path, b"new")
    append(path, b"er", sync=True)
    assert (outside.read_text(), path.read_text(), path.is_symlink()) == ("mine", "newer", False)


def test_a_folder_of_files_and_folders_has_no_links(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("")
    refuse_links(tmp_path)
    (tmp_path / "a" / "b" / "d").symlink_to("c")
    with pytest.raises(OSError, match="target in its place"):
        refuse_links(tmp_path)
