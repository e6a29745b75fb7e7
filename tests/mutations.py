"""Changes that a stranger may make to a file, drawn with a `random.Random`: of the values in it, or of its bytes.

`mutate_tree` changes plain data (dicts, lists, texts, numbers) at one or a few places and leaves the rest a good file,
so that what comes out gets past the parser and into the code behind it. `mutate_bytes` breaks the text itself.
"""

import copy
import json
import math
from pathlib import Path
from random import Random
from typing import Any

NUMBERS = (
    *(0, -1, 1, 2, 255, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 40, 1 << 53, (1 << 62), (1 << 63) - 1, 1 << 63, 1 << 64),
    *(-(1 << 63), -(1 << 63) - 1, 10**30, 0.5, -0.0, 1e-320, 1e-30, 1e30, 1e308, 1.5e9, 0.1),
)
NOT_FINITE = (math.nan, math.inf, -math.inf)
TEXTS = (
    *("", " ", "a", "\x1b[31mred\x1b[0m", "<script>alert(1)</script>", "x" * 5000, "nan", "1e999", "-1", "9" * 400),
    *(
        "é",
        "\u202e",
        "\n",
        "a\nb",
        "\t",
        "%s%n",
        "{}",
        "{0.__class__}",
        "$HOME",
        "`id`",
        "\ud7ff",
        "\U0010ffff",
        "\x7f",
    ),
    *("null", "true", "~", "yes", "0x10", "1_000", "__class__", "kind", "[bold]x[/bold]", "[/]", ":smile:"),
)
PATHS = (
    *("/", ".", "..", "../../etc/passwd", "/etc/passwd", "/dev/zero", "/dev/stdin", "/proc/self/mem", "~/.ssh/id_rsa"),
    *("a/b", "a\\b", "./x", "x/", "//x", "CON", "file:///etc/passwd", "http://127.0.0.1:1/x", "x" * 300, "-rf"),
)


def mutate_tree(data: Any, random: Random, *, changes: int = 1, finite: bool = True) -> Any:
    """A copy with so many changes; with `finite` only numbers that JSON has."""
    made = copy.deepcopy(data)
    for _ in range(changes):
        made = _changed(made, random, finite)
    return made


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """A copy that is cut, doubled, overwritten or has something put into it."""
    at = random.randrange(len(data) + 1)
    end = min(len(data), at + random.choice((1, 1, 2, 8, 64, 1000)))
    match random.randrange(8):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + data[end:]
        case 2:
            return data[:end] + data[at:]
        case 3:
            return data[:at] + random.randbytes(end - at) + data[end:]
        case 4:
            return data[:at] + random.choice(ODD_BYTES) + data[at:]
        case 5:
            return data[:at] + random.choice(ODD_BYTES) + data[end:]
        case 6:
            return data + random.choice((data, b"\0", b"\n\n", random.randbytes(20)))
        case _:
            flipped = bytearray(data or b"\0")
            flipped[min(at, len(flipped) - 1)] ^= 1 << random.randrange(8)
            return bytes(flipped)


def doubled_key(data: Any, random: Random) -> str:
    """JSON in which one key is given twice, with different values; that of data without mappings is whole."""
    text = json.dumps(data)
    marks = [k for k in range(len(text)) if text[k] == "{" and text[k + 1] == '"' and text.count('"', 0, k) % 2 == 0]
    if not marks:
        return text
    at = random.choice(marks) + 1
    return f"{text[:at]}{text[at : text.index(':', at)]}: 7, {text[at:]}"


def _changed(data: Any, random: Random, finite: bool) -> Any:
    """One change at a random place; deep places are as likely as those at the top."""
    places = list(_places(data, ()))
    path = random.choice(places)
    if not path:
        return _replacement(data, random, finite)
    at = data
    for key in path[:-1]:
        at = at[key]
    _change_at(at, path[-1], random, finite)
    return data


def _places(data: Any, path: tuple[Any, ...]) -> Any:
    yield path
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inside:
        yield from _places(value, (*path, key))


def _change_at(at: Any, key: Any, random: Random, finite: bool) -> None:
    match random.randrange(6):
        case 0:
            del at[key]
        case 1 if isinstance(at, list):
            at.insert(random.randrange(len(at) + 1), copy.deepcopy(at[key]))
        case 1:
            at[random.choice((*TEXTS, *PATHS, f"{key}x"))] = copy.deepcopy(at[key])
        case 2 if isinstance(at, dict) and len(at) > 1:
            other = random.choice(list(at))
            at[key], at[other] = at[other], at[key]
        case _:
            at[key] = _replacement(at[key], random, finite)


def _replacement(value: Any, random: Random, finite: bool) -> Any:
    number = random.choice(NUMBERS if finite else (*NUMBERS, *NOT_FINITE))
    if random.random() < 0.5 and isinstance(value, int | float) and not isinstance(value, bool):
        return random.choice((number, number, -value, value + 1, value - 1, value * 2, float(value), str(value)))
    if random.random() < 0.5 and isinstance(value, str):
        return random.choice((*TEXTS, *PATHS, value + random.choice(TEXTS), value.upper(), value[1:], value * 2))
    odd = (None, True, False, [], {}, [value], {"x": value}, number, random.choice(TEXTS), random.choice(PATHS))
    return random.choice((*odd, _nested(value, random)))


def _nested(value: Any, random: Random) -> Any:
    as_list = random.random() < 0.5
    for _ in range(random.choice((2, 30, 80))):
        value = [value] if as_list else {"x": value}
    return value


ODD_BYTES = (
    *(
        b"\0",
        b"\xff",
        b"\xc3",
        b"\xef\xbb\xbf",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\x1b[2J",
        b'"',
        b"\\",
        b"\\ud800",
        b"{",
    ),
    *(
        b"[" * 10_000,
        b'{"a":' * 10_000,
        b"9" * 5000,
        b"1e999",
        b"NaN",
        b"-",
        b",",
        b"\n",
        b"\r",
        b"\t",
        b"#",
        b"&a ",
        b"*a",
    ),
    *(
        b"!!python/object/apply:os.system ['true']",
        b"!!binary x",
        b"<<: ",
        b"---\n",
        b"%YAML 9.9\n",
        b"? ",
        b"| ",
        b"'",
    ),
)


def flip(path: Path, place: int = -1) -> None:
    """Change a bit of a file; others that it was linked to stay as they are."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.unlink()
    path.write_bytes(content)
