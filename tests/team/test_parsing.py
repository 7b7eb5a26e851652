"""A parser accepts exactly one well-formed output."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.config.schema import AgentConfig
from megatron_drmas.team.parsing import PARSERS, last_boxed, parse_boxed, parse_tag, parse_tags, parse_text
from megatron_drmas.team.team import Agent

ANSWER = AgentConfig(policy="p", prompt="", tag="answer")
VERDICT = AgentConfig(policy="p", prompt="", tag="verify", choices=["yes", "no"])


@pytest.mark.parametrize(
    "text, content",
    [
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
    ],
)
def test_tag(text, content):
    assert parse_tag(text, ANSWER) == content


@pytest.mark.parametrize(
    "text, content",
    [("<verify>YES</verify>", "yes"), ("<verify>no</verify>", "no"), ("<verify>maybe</verify>", None), ("yes", None)],
)
def test_choices(text, content):
    assert parse_tag(text, VERDICT) == content


@given(
    content=st.text(min_size=1).map(str.strip).filter(lambda s: s and "<answer>" not in s and "</answer>" not in s),
    around=st.text(max_size=5),
)
def test_any_content_survives_its_tags(content, around):
    around = around.replace("<", "").replace(">", "")
    assert parse_tag(f"{around}<answer>{content}</answer>{around}", ANSWER) == content


@pytest.mark.parametrize(
    "text, content",
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{4", None),
        (r"\boxed{}", None),
        ("4", None),
        (r"\boxed {5}", "5"),
        ("\\boxed\n{5}", "5"),
        (r"\boxed {a{b}c} }", "a{b}c"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{\text{a \} b}}", r"\text{a \} b}"),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed{ }", None),
        (r"\boxed", None),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\fbox{5}", "5"),
        (r"\fbox{5} or \boxed{6}", "6"),
        (r"\boxed 5", "5"),
        (r"$\boxed 5$ apples", "5"),
        (r"\boxed\frac12", r"\frac12"),
        (r"\boxed{5}\\", "5"),
        (r"\boxedx{5}", None),
        (r"boxed{5}", None),
        (r"\\boxed{5}", "5"),
        ("\\boxed{\\\\}", r"\\"),
    ],
)
def test_boxed(text, content):
    assert last_boxed(text) == parse_boxed(text, ANSWER) == content


@given(st.text(alphabet="ab{}\\ ", max_size=20), st.text(alphabet="ab \\{}", max_size=20))
def test_a_balanced_content_is_returned_whole(before, content):
    depth, escaped = 0, False
    for char in content:
        depth += 0 if escaped else (char == "{") - (char == "}")
        escaped = char == "\\" and not escaped
        if depth < 0:
            break
    if depth == 0 and not escaped:
        assert last_boxed(f"{before}\\boxed{{{content}}} after") == (content.strip() or None)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    "text, prompt_end, answered",
    [
        ("{}", "", True),
        ("so {}", "<|assistant|>", True),
        ("<think> hm </think> {}", "", True),
        ("<think></think>{}", "", True),
        ("\n<think>a</think>\n{}", "", True),
        ("<think> try {} but", "", False),
        ("<think> {} </think>", "", False),
        ("<think> a </think> <think> {}", "", False),
        ("{} <think> wait", "", False),
        ("hm, {}", "<|assistant|><think>\n", False),
        ("hm </think> {}", "<|assistant|><think>\n", True),
        ("{}", "<think>\n\n</think>\n\n", True),
        ("{}", "is <think> a tag?<|assistant|>", True),
        ("a </think> b </think> {}", "<think>", True),
        ("{} </think>", "<think>", False),
    ],
)
def test_no_parser_reads_reasoning(parser, text, prompt_end, answered):
    agent = Agent("solver", AgentConfig(policy="p", prompt="", parser=parser, tag="answer"))
    output = {"boxed": "\\boxed{5}", "text": "5"}.get(parser, "<answer>5</answer>")
    content = agent.parse(text.replace("{}", output), prompt_end)
    assert (content is not None and "5" in content) == answered


def test_a_box_in_the_reasoning_is_not_the_answer():
    agent = Agent("solver", AgentConfig(policy="p", prompt="", parser="boxed"))
    assert agent.parse("<think>\\boxed{3}</think> \\boxed{5}") == "5" and agent.parse("<think>\\boxed{3}</think> five") is None


def test_text_is_anything_that_is_not_blank():
    assert parse_text(" a ", ANSWER) == "a" and parse_text(" \n", ANSWER) is None


@pytest.mark.parametrize(
    "text, contents",
    [
        ("plan: <answer>a</answer> and\n<answer> b\nc </answer>", ["a", "b\nc"]),
        ("<answer>a</answer>", ["a"]),
        ("none", None),
        ("<answer>a", None),
        ("a</answer>", None),
        ("<answer></answer>", None),
        ("<answer>a</answer></answer>", None),
        ("<answer>a<answer>b</answer></answer>", None),
        ("</answer><answer>a</answer>", None),
        ("<answer>a</answer> <answer>b", None),
    ],
)
def test_tags(text, contents):
    content = parse_tags(text, ANSWER)
    assert content == (None if contents is None else json.dumps(contents))


@given(st.lists(st.text("ab <>/", min_size=1).filter(str.strip), min_size=1, max_size=4))
def test_any_list_of_contents_survives_its_tags(contents):
    assert json.loads(parse_tags("x".join(f"<answer>{content}</answer>" for content in contents), ANSWER)) == [
        c.strip() for c in contents
    ]
