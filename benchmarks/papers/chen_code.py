"""The code task of `chen.py`: short Python functions, and whether a completion of one does what it should.

Takes the place of HumanEval with functions of one or two lines, which a model of 135 M parameters can write. The prompt
has two solved functions before each, and the completion is what follows the docstring up to the next line that is not
indented. A completion passes if all assertions hold.

A completion runs in a process of its own, with a limit on time and memory, and with few builtins. One that imports,
or has a name that begins with an underscore, is not run, and counts as failed.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import dataclass

SOLVED = '''\
def double(x):
    """Return x times two."""
    return x * 2


def last(items):
    """Return the last item of a list."""
    return items[-1]
'''
BUILTINS = [
    *("abs", "all", "any", "bool", "chr", "dict", "divmod", "enumerate", "filter", "float", "int", "isinstance", "len"),
    *("list", "map", "max", "min", "ord", "pow", "range", "reversed", "round", "set", "sorted", "str", "sum", "tuple"),
    *("zip", "Exception", "IndexError", "KeyError", "TypeError", "ValueError", "ZeroDivisionError"),
]
SECONDS, MEMORY = 2, 2**29
# Reads the function and the assertions, and says nothing if they hold.
RUNNER = """\
import builtins, json, resource, sys
seconds, memory, names, source, assertions = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
names = {"__builtins__": {name: getattr(builtins, name) for name in names}}
exec(source, names)
assert all(eval(each, names) for each in assertions)
"""


@dataclass(frozen=True)
class Problem:
    signature: str
    docstring: str
    assertions: tuple[str, ...]


PROBLEMS = (
    Problem("add(a, b)", "Return the sum of a and b.", ("add(2, 3) == 5", "add(-1, 1) == 0")),
    Problem("square(x)", "Return the square of x.", ("square(3) == 9", "square(-2) == 4")),
    Problem("first(items)", "Return the first item of a list.", ("first([4, 5, 6]) == 4", "first(['a']) == 'a'")),
    Problem("is_even(n)", "Return True if n is even.", ("is_even(4) is True", "is_even(7) is False")),
    Problem("average(numbers)", "Return the mean of a list of numbers.", ("average([1, 2, 3]) == 2",)),
    Problem("largest(numbers)", "Return the largest number of a list.", ("largest([3, 9, 2]) == 9",)),
    Problem("count_vowels(text)", "Return the number of vowels in text.", ("count_vowels('banana') == 3",)),
    Problem("reverse(text)", "Return text from its end to its beginning.", ("reverse('abc') == 'cba'",)),
    Problem("is_palindrome(text)", "Return True if text reads the same backwards.",
            ("is_palindrome('level') is True", "is_palindrome('lever') is False")),
    Problem("factorial(n)", "Return the factorial of n.", ("factorial(5) == 120", "factorial(0) == 1")),
    Problem("initials(words)", "Return a list of the first letters of words.",
            ("initials(['red', 'green']) == ['r', 'g']",)),
    Problem("join_words(words)", "Return the words in one string, with spaces between them.",
            ("join_words(['a', 'bc']) == 'a bc'",)),
    Problem("absolute(x)", "Return the absolute value of x.", ("absolute(-3) == 3", "absolute(2) == 2")),
    Problem("evens(numbers)", "Return a list of the even numbers.", ("evens([1, 2, 3, 4]) == [2, 4]",)),
    Problem("unique(items)", "Return the sorted list of distinct items.", ("unique([3, 1, 3]) == [1, 3]",)),
    Problem("shout(text)", "Return text in capital letters.", ("shout('hey') == 'HEY'",)),
)  # fmt: skip


def prompt(problem: Problem) -> str:
    """The prompt has no newline at its end, because the tokenizer has tokens for a newline and its indentation."""
    return f"{SOLVED}\n\n{head(problem)}"


def head(problem: Problem) -> str:
    return f'def {problem.signature}:\n    """{problem.docstring}"""'


def function(problem: Problem, completion: str) -> str:
    """The source of the function: signature, docstring and the indented lines of the completion."""
    first, *lines = completion.split("\n")
    body = [first]
    for line in lines:
        if line.strip() and not line.startswith((" ", "\t")):
            break
        body.append(line)
    return head(problem) + "\n".join(body).rstrip() + "\n"


def parses(problem: Problem, completion: str) -> bool:
    """Whether the completion is Python and not empty."""
    try:
        (found,) = ast.parse(function(problem, completion)).body
    except (SyntaxError, ValueError):
        return False
    return isinstance(found, ast.FunctionDef) and len(found.body) > 1


def passes(problem: Problem, completion: str, seconds: int = SECONDS) -> bool:
    """Whether all assertions hold for the completion."""
    if not parses(problem, completion):
        return False
    source = function(problem, completion)
    if not harmless(source):
        return False
    task = json.dumps([seconds, MEMORY, BUILTINS, source, problem.assertions])
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", RUNNER],
            input=task, text=True, capture_output=True, timeout=2 * seconds + 5,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def harmless(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)):
            return False
        name = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.FunctionDef: "name"}.get(type(node))
        # Formatting a string can reach attributes, too.
        if name and (getattr(node, name).startswith("_") or getattr(node, name) in ("format", "format_map")):
            return False
    return True
