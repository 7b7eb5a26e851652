"""The report: it stands alone, and nothing that a model writes can act in it."""

import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_drmas.observability.charts import HEIGHT, Series, line_chart
from megatron_drmas.observability.progress import closing_lines
from megatron_drmas.observability.report import MAX_TEXT, choose, load_run, main, render, results, seen
from megatron_drmas.observability.summary import Summary

HOSTILE = (
    "</pre></script><script>alert(1)</script><img src=http://x.invalid/a onerror=alert(1)> <a href='javascript:1'>x</a> "
    '" onload="x <!-- <style>*{display:none}</style> {{ 7 * 7 }} {% raise %} &lt; \u202egnp.exe \x00\x1b[31m \ud800 </html>'
)


class Page(HTMLParser):
    """Elements with their attributes, and the text of every <pre>."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict]] = []
        self.pres: list[str] = []
        self._in_pre = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "pre":
            self._in_pre = True
            self.pres.append("")

    def handle_endtag(self, tag):
        if tag == "pre":
            self._in_pre = False

    def handle_data(self, data):
        if self._in_pre:
            self.pres[-1] += data


@pytest.fixture
def folder(tmp_path, play):
    play(tmp_path, text=HOSTILE).finish("finished")
    return tmp_path


def test_the_page_loads_and_runs_nothing(folder):
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
        "a",
        "video",
        "audio",
        "source",
        "use",
        "image",
    }
    attributes = {(name, value) for _, found in page.elements for name, value in found.items()}
    assert not [
        name for name, _ in attributes if name in ("src", "href", "xlink:href", "srcset", "action") or name.startswith("on")
    ]
    assert not re.search(r"url\(|@import", text.split("</style>")[0])
    policy = next(found["content"] for tag, found in page.elements if found.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "script-src" not in policy


def test_a_page_with_hostile_text_has_the_elements_of_one_without(folder, tmp_path_factory, play):
    harmless = tmp_path_factory.mktemp("harmless")
    play(harmless, text="yes").finish("finished")

    def tags(path):
        return [tag for tag, _ in Page((path / "report.html").read_text(encoding="utf-8")).elements]

    assert tags(folder) == tags(harmless)
    assert seen(HOSTILE) in Page((folder / "report.html").read_text(encoding="utf-8")).pres


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("\ud83d \u2067 <b>&amp;</b> \r\n\t")
@given(st.text(st.characters(exclude_categories=())))
def test_every_text_reads_back_from_the_page_as_what_is_seen(folder, text):
    run = load_run(folder)
    run.trajectories[-1][1][0]["turns"][0]["response"] = text
    page = Page(render(run))
    assert "\n" + seen(text) in ["\n" + found for found in page.pres]


@given(st.text(st.characters(exclude_categories=())))
def test_what_is_seen_has_no_hidden_characters_and_is_left_alone_otherwise(text):
    shown = seen(text)
    shown.encode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", shown)
    assert seen(shown) == shown
    if text.isascii() and text.isprintable():
        assert shown == text


def test_long_text_is_cut_and_says_so():
    assert seen("x" * (MAX_TEXT + 5)).endswith("and 5 more characters")


def test_it_can_be_rebuilt_from_the_files(folder, capsys):
    written = (folder / "report.html").read_bytes()
    (folder / "report.html").unlink()
    assert main([str(folder)]) == 0
    assert (folder / "report.html").read_bytes() == written
    assert capsys.readouterr().out.strip().endswith("report.html")


def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "summary.json" in error and error.count("\n") == 1


def test_it_shows_results_by_hop_alarms_configuration_and_counts(folder):
    text = (folder / "report.html").read_text(encoding="utf-8")
    for part in (
        "0.200 → 0.800",
        "2 hops",
        "pass@4",
        "is over the 49 that had all 4",
        "-1.300 → -0.700",
        "cut off at 8 tokens",
        "grad_norm_max of policy writer (agents search, answer) is not finite",
        "retrieval timed out",
        "policy: judge",
        "weight_sync",
        "verifier",
        "Gradient norm",
        "question of step 6",
    ):
        assert part in text
    rows = {row["name"]: row for row in results(load_run(folder))[0]["rows"]}
    assert rows["2 hops"]["success"]["change"] == pytest.approx(0.3)
    for figure, error in (("success", 0.04), ("reward", 0.08)):
        assert rows["all questions"][figure]["error"] == pytest.approx(error * 2**0.5)


def test_a_run_without_a_step_has_a_report(tmp_path, play):
    play(tmp_path, last=0).finish("failed: ConfigError: no")
    text = (tmp_path / "report.html").read_text()
    assert "before training" in text and "failed: ConfigError" in text


def test_without_an_evaluation_before_training_there_is_nothing_to_compare(folder):
    run = load_run(folder)
    run.lines = [line for line in run.lines if (line["kind"], line["step"]) != ("evaluation", 0)]
    page = render(run)
    evaluation = page[page.index("<h2>Evaluation") : page.index("<h2>Team")]
    assert ">change<" not in evaluation and "→" not in evaluation and "±" not in evaluation and "0.800" in evaluation
    assert "○" not in evaluation, "no mark of a value before training"


@pytest.mark.parametrize("ratio, shown", [(1.0, "every probability is the same"), (1.00002, "1 + 2.0e-05")])
def test_the_trainers_and_the_engines_probabilities_are_compared(folder, ratio, shown):
    run = load_run(folder)
    run.summary["max_prob_ratio"] = ratio
    assert shown in render(run) and "0.0e+00" not in render(run)


def test_trajectories_to_read_show_the_extremes():
    made = [
        {"reward": reward, "turns": [{"valid": valid}] * turns}
        for reward, valid, turns in ((0, True, 1), (1, True, 2), (0.5, False, 1), (0.2, True, 9))
    ]
    assert choose(made) == [made[1], made[0], made[2], made[3]]
    assert choose([]) == [] and choose(made[:1]) == made[:1]


anything = st.none() | st.floats(-3.4e38, 3.4e38)  # a reward is a float32
error = st.none() | st.floats(0, 3.4e38)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(anything, anything, error, st.none() | st.floats(0, 1))
def test_a_page_and_the_closing_lines_can_be_made_of_any_rewards(folder, reward, later, stderr, success):
    run = load_run(folder)
    for line in run.lines:
        if line["kind"] in ("step", "evaluation"):
            for part in (line, *line.get("by_source", {}).values()):
                part["reward"], part["success"] = reward if line["step"] % 2 else later, success
                if line["kind"] == "evaluation":
                    part["reward_stderr"] = part["success_stderr"] = stderr
    for _, found in run.trajectories:
        for trajectory in found:
            trajectory["reward"] = reward
    assert "Evaluation" in render(run)
    summary = Summary("team", 0, 6)
    for line in run.lines:
        summary.add(line)
    assert closing_lines(summary.as_dict(), {})


def heights(svg: str) -> list[float]:
    points = re.search(r'points="([^"]+)"', svg)[1]
    return [HEIGHT - float(point.split(",")[1]) for point in points.split()]


@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=40, unique=True), st.booleans())
def test_a_line_rises_with_its_values_on_either_axis(values, log):
    svg = line_chart([Series("a", 0, list(enumerate(values)))], log=log)
    drawn = heights(svg)
    order = sorted(range(len(values)), key=values.__getitem__)
    assert all(drawn[low] <= drawn[high] for low, high in pairwise(order))
    assert all(0 <= height <= HEIGHT for height in drawn)


def test_values_that_are_not_finite_are_marked_and_absent_ones_are_not():
    svg = line_chart([Series("a", 0, [(1, 1.0), (2, 2.0), (3, None), (5, 1.5), (6, 2.0)])], log=True)
    assert svg.count("×") == 1 and svg.count("<polyline") == 2
    assert "<svg" not in line_chart([Series("a", 0, [(1, None)])])


def test_many_steps_are_drawn_in_bins_that_keep_a_spike():
    points = [(step, 1e3 if step == 777 else 1.0) for step in range(5000)]
    assert max(heights(line_chart([Series("a", 0, points)], log=True, bins="max"))) > 100
    assert len(line_chart([Series("a", 0, points)])) < 100_000


def test_names_are_escaped_in_charts():
    assert "<b>" not in line_chart([Series('<b>"', 0, [(1, 1.0)])])
