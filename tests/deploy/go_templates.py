"""The part of Go's text/template and of Helm's functions that the chart uses, for tests on machines
without Helm: `if`, `else`, `with`, `define`, `include`, comments, pipelines, and `_FUNCTIONS`.

What it does not know raises. Where `helm` is on the path a test compares both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_ACTION = re.compile(
    r"\s*\{\{-\s(.*?)\s-\}\}\s*|\s*\{\{-\s(.*?)\}\}|\{\{(.*?)\s-\}\}\s*|\{\{(.*?)\}\}"
)
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[()|]|[^\s()|]+')


@dataclass
class _Block:
    """`kind` is text, value, if, with or root; `otherwise` is what `else` begins."""

    kind: str
    words: str = ""
    inside: list[_Block] = field(default_factory=list)
    otherwise: list[_Block] = field(default_factory=list)


def render_chart(
    directory: Path, values: Mapping[str, Any], release: str = "test-release"
) -> dict[str, str]:
    """Every file of templates/ by name, rendered with these values over the chart's own."""
    chart = yaml.safe_load((directory / "Chart.yaml").read_text())
    merged = merge(yaml.safe_load((directory / "values.yaml").read_text()), values)
    root = {
        "Values": merged,
        "Chart": {"Name": chart["name"], "AppVersion": chart["appVersion"]},
        "Release": {"Name": release, "Namespace": "default"},
    }
    named: dict[str, _Block] = {}
    blocks = {
        path.name: _parse(path.read_text(), named)
        for path in sorted((directory / "templates").iterdir())
    }
    return {
        name: _Renderer(named).text(block.inside, root)
        for name, block in blocks.items()
        if name.endswith(".yaml")
    }


def merge(under: Any, over: Any) -> Any:
    """Helm's way: maps are merged, everything else is replaced."""
    if not (isinstance(under, dict) and isinstance(over, Mapping)):
        return over
    both = {**under}
    for key, value in over.items():
        both[key] = merge(under[key], value) if key in under else value
    return both


def _parse(text: str, named: dict[str, _Block]) -> _Block:
    root = _Block("root")
    open_blocks = [root]
    lists = [root.inside]
    position = 0
    for match in _ACTION.finditer(text):
        lists[-1].append(_Block("text", text[position : match.start()]))
        position = match.end()
        words = next(group for group in match.groups() if group is not None).strip()
        verb, _, rest = words.partition(" ")
        if verb == "/*":
            continue
        if verb in ("if", "with", "define"):
            block = _Block(verb, rest)
            if verb == "define":
                named[json.loads(rest)] = block
            else:
                lists[-1].append(block)
            open_blocks.append(block)
            lists.append(block.inside)
        elif words == "else":
            lists[-1] = open_blocks[-1].otherwise
        elif words == "end":
            open_blocks.pop()
            lists.pop()
        else:
            lists[-1].append(_Block("value", words))
    lists[-1].append(_Block("text", text[position:]))
    assert open_blocks == [root], "a block has no end"
    return root


class _Renderer:
    def __init__(self, named: Mapping[str, _Block]) -> None:
        self._named = named

    def text(self, blocks: list[_Block], dot: Any) -> str:
        return "".join(self._one(block, dot) for block in blocks)

    def _one(self, block: _Block, dot: Any) -> str:
        if block.kind == "text":
            return block.words
        value = self._pipeline(iter(_WORD.findall(block.words)), dot)
        if block.kind == "value":
            return _shown(value)
        if value:
            return self.text(block.inside, value if block.kind == "with" else dot)
        return self.text(block.otherwise, dot)

    def _pipeline(self, words: Iterator[str], dot: Any) -> Any:
        """The value up to the closing bracket or the end."""
        commands: list[list[Any]] = [[]]
        for word in words:
            if word == ")":
                break
            if word == "|":
                commands.append([])
            elif word == "(":
                commands[-1].append(self._pipeline(words, dot))
            else:
                commands[-1].append(self._term(word, dot))
        value: Any = None
        for number, (first, *arguments) in enumerate(commands):
            piped = [value] if number else []
            value = first(*arguments, *piped) if callable(first) else first
        return value

    def _term(self, word: str, dot: Any) -> Any:
        if word.startswith('"'):
            return json.loads(word)
        if word.isdecimal():
            return int(word)
        if word.startswith("."):
            for name in filter(None, word.split(".")):
                dot = dot[name]
            return dot
        if word == "include":
            return lambda name, of: self.text(self._named[name].inside, of)
        return _FUNCTIONS[word]


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _to_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=False).rstrip("\n")


def _nindent(spaces: int, text: str) -> str:
    return "\n" + "\n".join(" " * spaces + line for line in text.split("\n"))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "and": lambda *values: next((one for one in values if not one), values[-1]),
    "add": lambda *numbers: sum(numbers),
    "default": lambda other, value: value or other,
    "dict": lambda *words: dict(zip(words[::2], words[1::2], strict=True)),
    "eq": lambda one, other: one == other,
    "int": int,
    "nindent": _nindent,
    "not": lambda value: not value,
    "printf": lambda form, *values: form % values,
    "quote": lambda value: json.dumps(_shown(value)),
    "toYaml": _to_yaml,
}
