"""From an agent's raw text to the content its workflow uses.

Models write what they like, so a parser accepts one well-formed output and nothing else: no falling back to the first
thing that looks like an answer.  The content is what a workflow takes apart and what an environment grades.
"""

import json
import re
from collections.abc import Callable

from megatron_drmas.config.schema import AgentConfig

Parser = Callable[[str, AgentConfig], str | None]
PARSERS: dict[str, Parser] = {}

THINK_OPEN, THINK_CLOSED = "<think>", "</think>"  # of Qwen3, DeepSeek-R1 and most other models that reason before they answer
BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
FENCE = re.compile(r"^```[\w+-]*[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_UNBRACED = re.compile(r"[^\s$]*")


def register_parser(name: str) -> Callable[[Parser], Parser]:
    """Make a parser available as `agents.<agent>.parser`."""

    def add(parser: Parser) -> Parser:
        if name in PARSERS:
            raise ValueError(f"a parser named {name!r} exists already")
        PARSERS[name] = parser
        return parser

    return add


@register_parser("tag")
def parse_tag(text: str, agent: AgentConfig) -> str | None:
    """The content of the only `<tag>…</tag>`; None if the pair is missing, repeated, reversed or empty.

    With `choices` the content must be one of them, whatever its case, and is returned in the choice's spelling.
    """
    opening, closing = f"<{agent.tag}>", f"</{agent.tag}>"
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    start = text.index(opening) + len(opening)
    end = text.index(closing)
    content = text[start:end].strip() if start <= end else ""
    if agent.choices:
        return next((choice for choice in agent.choices if choice.lower() == content.lower()), None)
    return content or None


@register_parser("tags")
def parse_tags(text: str, agent: AgentConfig) -> str | None:
    """The contents of all `<tag>…</tag>` pairs as a JSON list; None without a pair, or if one is unclosed, nested or empty."""
    opening, closing = f"<{agent.tag}>", f"</{agent.tag}>"
    contents = []
    for part in text.split(opening)[1:]:
        content, closed, rest = part.partition(closing)
        if not closed or closing in rest or not content.strip():
            return None
        contents.append(content.strip())
    return json.dumps(contents) if contents and text.count(closing) == len(contents) else None


@register_parser("boxed")
def parse_boxed(text: str, agent: AgentConfig) -> str | None:
    r"""The content of the last `\boxed{…}`; None without one, or if it is unclosed or empty."""
    return last_boxed(text)


@register_parser("code")
def parse_code(text: str, agent: AgentConfig) -> str | None:
    """The last fenced block of a Markdown text (three backticks, with or without a language); None without a closed one.

    With `tag` it is looked for in the only `<tag>…</tag>`, whose content is the code where it holds no fence.
    """
    if agent.tag:
        content = parse_tag(text, agent)
        if content is None or "```" not in content:
            return content
        text = content
    blocks = FENCE.findall(text)
    return blocks[-1].strip("\n") or None if blocks and text.count("```") % 2 == 0 else None


@register_parser("text")
def parse_text(text: str, agent: AgentConfig) -> str | None:
    """The whole text, unless it is blank."""
    return text.strip() or None


def last_boxed(text: str) -> str | None:
    r"""The content of the last box in `text`: `\boxed{…}` or, as the MATH data set also writes, `\fbox{…}` or `\boxed …`.

    Spaces may precede the brace, braces are balanced, and escaped ones (`\{`) are text.  Without a brace the content ends
    at a space or a dollar sign.  None if there is no box, or if the last one is not closed or is empty.
    """
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if text[start : start + 1] != "{":
        unbraced = _UNBRACED.match(text, start)
        return unbraced.group() or None if unbraced else None
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return text[start + 1 : match.start()].strip() or None
    return None


def after_reasoning(text: str, prompt_end: str = "") -> str | None:
    """What a model says when it has reasoned: what follows the last `</think>`, or all of a text that has no such tags.

    Args:
        text: a response.
        prompt_end: the end of its prompt.  Some chat templates open the reasoning there, and a response then only closes it.

    Returns:
        None if the reasoning is not finished: what it holds is not an answer yet.
    """
    _, closed, answer = text.rpartition(THINK_CLOSED)
    opened = prompt_end.rstrip().endswith(THINK_OPEN)
    return None if THINK_OPEN in answer or (opened and not closed) else answer
