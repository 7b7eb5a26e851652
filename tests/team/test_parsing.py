"""A parser accepts exactly one well-formed output."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.config.schema import AgentConfig
from megatron_drmas.team.parsing import last_boxed, parse_boxed, parse_tag, parse_tags, parse_text

ANSWER = AgentConfig(policy="p", prompt="", tag="answer")
VERDICT = AgentConfig(policy="p", prompt="", tag="verify", choices=["yes", "no"])


@pytest.mark.parametrize("text, content", [
    ("<answer> Paris </answer>", "Paris"),
    ("thinking … <answer>Paris</answer> done", "Paris"),
    ("</answer><answer>", None),
    ("</answer> x <answer>Paris</answer>", None),
    ("<answer>Paris", None),
    ("<answer></answer>", None),
    ("<answer>  </answer>", None),
    ("<answer>a</answer><answer>b</answer>", None),
    ("<answer><answer>a</answer>", None),
    ("", None),
])
def test_tag(text, content):
    assert parse_tag(text, ANSWER) == content


@pytest.mark.parametrize("text, content", [("<verify>YES</verify>", "yes"), ("<verify>no</verify>", "no"), ("<verify>maybe</verify>", None), ("yes", None)])
def test_choices(text, content):
    assert parse_tag(text, VERDICT) == content


@given(content=st.text(min_size=1).map(str.strip).filter(lambda s: s and "<answer>" not in s and "</answer>" not in s), around=st.text(max_size=5))
def test_any_content_survives_its_tags(content, around):
    around = around.replace("<", "").replace(">", "")
    assert parse_tag(f"{around}<answer>{content}</answer>{around}", ANSWER) == content


@pytest.mark.parametrize("text, content", [
    (r"so \boxed{4}", "4"), (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{4", None), (r"\boxed{}", None), ("4", None),
])
def test_boxed(text, content):
    assert last_boxed(text) == content
    assert (parse_boxed(text, ANSWER) is None) == (content is None)


def test_text_is_anything_that_is_not_blank():
    assert parse_text(" a ", ANSWER) == "a" and parse_text(" \n", ANSWER) is None


@pytest.mark.parametrize("text, contents", [
    ("plan: <answer>a</answer> and\n<answer> b\nc </answer>", ["a", "b\nc"]), ("<answer>a</answer>", ["a"]),
    ("none", None), ("<answer>a", None), ("a</answer>", None), ("<answer></answer>", None), ("<answer>a</answer></answer>", None),
    ("<answer>a<answer>b</answer></answer>", None), ("</answer><answer>a</answer>", None), ("<answer>a</answer> <answer>b", None),
])
def test_tags(text, contents):
    content = parse_tags(text, ANSWER)
    assert content == (None if contents is None else json.dumps(contents))


@given(st.lists(st.text("ab <>/", min_size=1).filter(str.strip), min_size=1, max_size=4))
def test_any_list_of_contents_survives_its_tags(contents):
    assert json.loads(parse_tags("x".join(f"<answer>{content}</answer>" for content in contents), ANSWER)) == [c.strip() for c in contents]
