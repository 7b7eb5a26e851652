"""Agents' prompts: Jinja templates from the configuration, rendered with the workflow's variables."""

from functools import cache
from typing import Any

from jinja2 import StrictUndefined, Template, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


@cache
def compile_prompt(template: str) -> Template:
    """The compiled template.

    Raises:
        jinja2.TemplateSyntaxError: not a Jinja template.
    """
    return _ENVIRONMENT.from_string(template)


def prompt_variables(template: str) -> set[str]:
    """The variables that a template reads.

    Raises:
        jinja2.TemplateSyntaxError: not a Jinja template.
    """
    return meta.find_undeclared_variables(_ENVIRONMENT.parse(template))


def render_prompt(template: str, **variables: Any) -> str:
    """The prompt's text.

    Args:
        template: Jinja source; a tag on a line of its own leaves no line behind.
        variables: those that the workflow gives the agent.

    Raises:
        jinja2.UndefinedError: the template uses a variable that was not given.
    """
    return compile_prompt(template).render(**variables)
