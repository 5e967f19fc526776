"""Small enough to be read: lines of code (no blank line, comment or docstring), lines of a function, lines of the trainer."""

import ast
import io
import re
import tokenize
from pathlib import Path

PYTHON = [
    path
    for pattern in ("train_grpo.py", "grpo/*.py", "model/*.py", "data/**/*.py", "config/*.py")
    for path in Path().glob(pattern)
    if path.name != "bench.py"
]
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef


def lines_of_code(source):
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in LAYOUT
    ]
    docstrings = [
        node.body[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node)
    ]
    return len(
        {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
        - {line for node in docstrings for line in range(node.lineno, node.end_lineno + 1)}
    )


def test_lines_of_code_are_counted_right():
    assert (
        lines_of_code(
            '"""a\nb"""\n\nx = [  # one\n    1]\n\n\ndef f():\n    """c"""\n    return """d\ne"""\n'
        )
        == 5
    )


def test_the_product_has_at_most_2200_lines_of_code():
    kernel = [
        line
        for line in Path("grpo/kernel.cu").read_text().splitlines()
        if line.strip() and not line.strip().startswith("//")
    ]
    total = len(kernel) + sum(lines_of_code(path.read_text()) for path in PYTHON)
    assert 1000 < total <= 2200
    said = re.search(r"([\d,]+) lines of code", Path("README.md").read_text())
    assert abs(int(said[1].replace(",", "")) - total) <= 25


def test_no_function_is_longer_than_50_lines_and_the_trainer_has_at_most_160():
    functions = [
        (path.name, node.name, node.end_lineno - node.lineno + 1)
        for path in PYTHON
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    assert len(functions) > 100 and not [f for f in functions if f[2] > 50]
    assert len(Path("train_grpo.py").read_text().splitlines()) <= 160
