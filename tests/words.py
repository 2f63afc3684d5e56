"""Counts the words that users read: README, help texts, messages of the product.

`python tests/words.py` (part of `make check`) prints, for each of the three, the average length of
a sentence and its longest, and fails for what CONTRIBUTING's rules of writing do not allow.
`--all` prints the sentences that are longer than the average may be, too.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from livescale.main import COMMANDS, build_parser
from source_imports import MODULES, SOURCE

ROOT = SOURCE.parent.parent
AVERAGE_MAX = 17
LONGEST = 35

# Words of our own that no user should need, and what is said instead.
_BANNED = {
    r"\bthe head\b(?! node)|\ba head\b(?! node)": "head node",
    r"\bhosts? (?:that )?(?:joins?|joined|has joined|have joined)\b": "node",
    r"\b(?:earlier|later|next|this|last|new) (?:life|lives)\b": "generation or restart",
    r"\bfeeds\b": "source ranges",
    r"\bduty\b|\bduties\b": "assignment",
    r"(?<!cluster )\bmembers?\b": "worker or agent",
    r"\bholder of the lease\b": "leader",
    r"\bholdings?\b": "resident copy",
    r"\bfound their parameters\b": "warm starts",
    r"\bnobody\b|\bsomebody\b|\bno one\b|\bis none of\b": "the component that is meant",
}
# What is printed by these is read by people.
_SPEAKING = {"print", "News", "debug", "info", "warning", "error", "exception"}
# Rooms whose messages name states of the code: they are read in records, next to the code.
_INNER = ("control", "sim", "batching", "member", "messages", "values", "lab")


@dataclass(frozen=True, slots=True)
class Sentence:
    """Where it stands, and its words."""

    place: str
    text: str

    @property
    def words(self) -> int:
        return len([word for word in self.text.split() if re.search(r"\w", word)])


def readme() -> Iterator[Sentence]:
    """Paragraphs, items of lists and cells of tables, without blocks of code."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "X", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-|#]|\d+\.))", text):
        cells = block.split("|") if block.lstrip().startswith("|") else [block]
        for cell in cells:
            yield from sentences("README.md", cell)


def help_texts() -> Iterator[Sentence]:
    """Of every command, of its commands, and of all settings."""
    for command in COMMANDS:
        parser = build_parser(command)
        yield from _of_parser(command, _command(parser, command))


def messages() -> Iterator[Sentence]:
    """Texts of errors, lines of the log, news and what is printed."""
    for module, path in sorted(MODULES.items()):
        if path.relative_to(SOURCE).parts[0] in _INNER:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else node
            if isinstance(call, ast.Call) and (isinstance(node, ast.Raise) or _speaks(call)):
                for argument in call.args:
                    place = f"{module}:{argument.lineno}"
                    yield from sentences(place, _literal(argument))


def sentences(place: str, text: str) -> Iterator[Sentence]:
    """Fragments of one or two words are names, not sentences; a list of names is one word."""
    text = re.sub(r"(?:[\w.-]+, ){5,}[\w.-]+", "X", " ".join(text.split()))
    for text_of_one in re.split(r"(?<=[.!?])\s+", text):
        one = Sentence(place, text_of_one)
        if one.words > 2:
            yield one


def problems(kind: str, sentences: list[Sentence]) -> list[str]:
    """What the rules do not allow."""
    found = [
        f"{one.place}: {one.words} words: {one.text}" for one in sentences if one.words > LONGEST
    ]
    for one in sentences:
        found += [
            f"{one.place}: say “{instead}”: {one.text}"
            for banned, instead in _BANNED.items()
            if re.search(banned, one.text, re.IGNORECASE)
        ]
    if average(sentences) > AVERAGE_MAX:
        found.append(f"{kind}: {average(sentences):.1f} words a sentence, {AVERAGE_MAX} at most")
    return found


def average(sentences: list[Sentence]) -> float:
    return sum(one.words for one in sentences) / len(sentences)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="print every sentence above average")
    shows_all = parser.parse_args().all
    found = []
    for kind, sentences in (
        ("README", list(readme())),
        ("help texts", list(help_texts())),
        ("messages", list(messages())),
    ):
        longest = max(one.words for one in sentences)
        print(f"{kind}: {average(sentences):.1f} words a sentence of {len(sentences)}, {longest}")
        found += problems(kind, sentences)
        if shows_all:
            long = [one for one in sentences if one.words > AVERAGE_MAX]
            print(*(f"  {one.place}: {one.words}: {one.text}" for one in long), sep="\n")
    print(*found, sep="\n", file=sys.stderr)
    return 1 if found else 0


# -- helpers, in the order used -------------------------------------------------------------------


def _command(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    (commands,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    found: argparse.ArgumentParser = commands.choices[name]
    return found


def _of_parser(place: str, parser: argparse.ArgumentParser) -> Iterator[Sentence]:
    whole = parser.get_default("whole_help")
    texts = [parser.description or "", whole() if whole is not None else parser.epilog or ""]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _of_parser(f"{place} {name}", inner)
        elif action.help not in (None, argparse.SUPPRESS):
            texts.append(str(action.help))
    for text in texts:
        # Columns of a table of settings: a name, spaces, and its text.
        for block in re.split(r"\n\s*\n|\n(?=\s*--)", text):
            yield from sentences(f"livescale {place}", re.sub(r"^\s*--\S+.*?\s{2,}", "", block))


def _speaks(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    name = call.func.id if isinstance(call.func, ast.Name) else name
    return name in _SPEAKING


def _literal(node: ast.expr) -> str:
    """What is written there, with X for what is filled in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "X"
    if isinstance(node, ast.BinOp):
        return _literal(node.left) + _literal(node.right)
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
