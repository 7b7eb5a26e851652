"""From an agent's raw text to the content its workflow uses.

Models write what they like, so a parser accepts one well-formed output and nothing else: no falling back to the first
thing that looks like an answer.
"""

import json
import re
from typing import Callable, Optional

from megatron_drmas.config.schema import AgentConfig

Parser = Callable[[str, AgentConfig], Optional[str]]
PARSERS: dict[str, Parser] = {}


def register_parser(name: str) -> Callable[[Parser], Parser]:
    """Make a parser available as `agents.<agent>.parser`."""

    def add(parser: Parser) -> Parser:
        if name in PARSERS:
            raise ValueError(f"a parser named {name!r} exists already")
        PARSERS[name] = parser
        return parser

    return add


@register_parser("tag")
def parse_tag(text: str, agent: AgentConfig) -> Optional[str]:
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
def parse_tags(text: str, agent: AgentConfig) -> Optional[str]:
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
def parse_boxed(text: str, agent: AgentConfig) -> Optional[str]:
    r"""The whole text, if its last `\boxed{…}` is closed and not empty."""
    return text.strip() if last_boxed(text) else None


@register_parser("text")
def parse_text(text: str, agent: AgentConfig) -> Optional[str]:
    """The whole text, unless it is blank."""
    return text.strip() or None


def last_boxed(text: str) -> Optional[str]:
    r"""The content of the last `\boxed{…}`, braces balanced; None where there is none or it is never closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return text[start + len("\\boxed{"): start + match.start()].strip() or None
    return None
