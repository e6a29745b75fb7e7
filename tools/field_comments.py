"""What comments say of the fields of classes: `rows: int  # how many`, or whole lines right above a field."""

import ast
import io
import re
import tokenize


def comments_of(source: str) -> dict[int, str]:
    """By the first line of a field."""
    trailing: dict[int, str] = {}
    above: dict[int, str] = {}
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("#").strip()
            alone = not lines[token.start[0] - 1][: token.start[1]].strip()
            if not re.match(r"noqa|pyrefly|type:|fmt:", text):
                (above if alone else trailing)[token.start[0]] = text
    found = {}
    for kind in ast.walk(ast.parse(source)):
        if not isinstance(kind, ast.ClassDef):
            continue
        for field in kind.body:
            if isinstance(field, ast.AnnAssign | ast.Assign):
                said, line = [], field.lineno - 1
                while line in above:
                    said.insert(0, above[line])
                    line -= 1
                said += [
                    trailing[n] for n in range(field.lineno, (field.end_lineno or field.lineno) + 1) if n in trailing
                ]
                if said:
                    found[field.lineno] = " ".join(said)
    return found
