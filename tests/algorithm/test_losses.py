"""Policy losses: values by hand, invariances, and metrics."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_drmas.algorithm.losses import (
    LOSSES,
    MAX_LOG_RATIO,
    LossInputs,
    check_loss_config,
    kl_penalty,
    policy_loss,
    register_loss,
    token_weights,
)
from megatron_drmas.algorithm.minibatch import plan_microbatches
from megatron_drmas.algorithm.mismatch import mismatch_correction
from megatron_drmas.config.algorithm import LossConfig, MismatchConfig
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.setting import check_settings
from megatron_drmas.kernels.segments import expand_rows


def one_sequence(ratios, advantages, weights=None, **columns) -> LossInputs:
    n = len(ratios)
    logprobs = torch.tensor([math.log(r) for r in ratios], dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(n, dtype=torch.float64)
    columns = {
        "old_logprobs": zeros,
        "engine_logprobs": zeros,
        "sequence": torch.zeros(n, dtype=torch.int64),
        "sequences": 1,
    } | columns
    weights = torch.full((n,), 1 / n, dtype=torch.float64) if weights is None else weights
    return LossInputs(
        logprobs=logprobs, advantages=torch.tensor(advantages, dtype=torch.float64), token_weights=weights, **columns
    )


def test_ppo_by_hand():
    """Inside the bounds; above with A > 0 and below with A < 0: clipped; above with A < 0: not; far above: the dual clip."""
    inputs = one_sequence([1.1, 1.5, 0.5, 2.0, 9.0], [2.0, 2.0, -1.0, -1.0, -1.0])
    out = policy_loss(inputs, LossConfig(clip_low=0.2, clip_high=0.25))
    expected = torch.tensor([-2.2, -2.5, 0.8, 2.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(out.loss, expected.mean())
    assert out.sums["clip_fraction"].item() == 3 and out.sums["tokens"].item() == 5
    out.loss.backward()
    torch.testing.assert_close(inputs.logprobs.grad, torch.tensor([-2.2, 0, 0, 2.0, 0], dtype=torch.float64) / 5)
    torch.testing.assert_close(out.sums["gradient_mass"], torch.tensor([4.2 / 5]))


def test_dual_clip_can_be_off():
    assert policy_loss(one_sequence([9.0], [-1.0]), LossConfig(dual_clip=0)).loss.item() == pytest.approx(9.0)


def test_gspo_by_hand():
    """Two sequences: ratios (2, 1/2) have geometric mean 1; (4, 1) have 2, clipped at 1.2 for A > 0."""
    inputs = one_sequence([2.0, 0.5, 4.0, 1.0], [3.0, 3.0, 1.0, 1.0], sequence=torch.tensor([0, 0, 1, 1]), sequences=2)
    out = policy_loss(inputs, LossConfig(name="gspo", aggregation="sequence_mean"))
    assert out.loss.item() == pytest.approx((-3.0 - 1.2) / 2)
    out.loss.backward()
    torch.testing.assert_close(inputs.logprobs.grad, torch.tensor([-0.75, -0.75, 0, 0], dtype=torch.float64))


def test_teamtr_by_hand():
    """One message of two tokens: ratio 1.1 x 1.0; the KL estimate is -log 1.1, weighted by beta."""
    inputs = one_sequence([1.1, 1.0], [2.0, 2.0], beta=0.5)
    out = policy_loss(inputs, LossConfig(name="teamtr", aggregation="sequence_mean"))
    assert out.loss.item() == pytest.approx(-2.2 - 0.5 * math.log(1.1))


def test_what_holds_the_policy_back_holds_for_masked_tokens_too():
    """TeamTR's KL, the reference KL and the entropy keep their gradient where the mismatch correction masks the surrogate."""
    terms = {
        "beta": 0.5,
        "reference_logprobs": torch.zeros(2, dtype=torch.float64),
        "entropy": torch.ones(2, dtype=torch.float64),
    }
    gradients = {}
    for high in (2.0, 1e9):
        inputs = one_sequence([1.1, 1.0], [0.0, 0.0], **terms)
        inputs.engine_logprobs = inputs.engine_logprobs - 5
        mismatch = MismatchConfig("mask", 0.5, high)
        config = LossConfig(
            name="teamtr", aggregation="sequence_mean", kl_coef=0.1, kl_estimator="k2", entropy_coef=0.1, mismatch=mismatch
        )
        policy_loss(inputs, config).loss.backward()
        gradients[high] = inputs.logprobs.grad
    assert gradients[2.0].abs().min() > 0.1
    torch.testing.assert_close(gradients[2.0], gradients[1e9])


@pytest.mark.parametrize("estimator,expected", [("k1", -math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 1 - math.log(2))])
def test_kl_by_hand(estimator, expected):
    assert kl_penalty(torch.tensor(0.0), torch.tensor(math.log(2)), estimator).item() == pytest.approx(expected)


log_ratios = (
    st.floats(-1e4, 1e4, width=32)
    | st.floats(15, 25, width=32)
    | st.floats(-1, 1, width=32)
    | st.sampled_from([-3e38, 1e30, 3e38])
)
advantages = st.sampled_from([-1e3, -1.0, -1e-3, 0.0, 1e-3, 1.0, 1e3])


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.tuples(log_ratios, st.integers(0, 2)), min_size=1, max_size=6),
    of_sequence=st.lists(advantages, min_size=3, max_size=3),
    name=st.sampled_from(["gspo", "ppo", "teamtr"]),
    dual_clip=st.sampled_from([0.0, 3.0]),
)
def test_any_ratio_has_a_finite_gradient_of_the_right_sign_or_counts_as_clipped(tokens, of_sequence, name, dual_clip):
    """Against float64: the definition's gradient up to a ratio of e^20, that of e^20 beyond; whatever is limited is counted."""
    ratios, sequence = torch.tensor([r for r, _ in tokens]), torch.tensor([s for _, s in tokens])
    advantage, n = torch.tensor(of_sequence)[sequence], len(tokens)
    total = torch.zeros(3, dtype=torch.float64).index_add_(0, sequence, ratios.double())
    length = torch.bincount(sequence, minlength=3).clamp(min=1)
    log_w = {"ppo": ratios.double(), "gspo": (total / length)[sequence], "teamtr": total[sequence]}[name]
    w, config = log_w.clamp(max=MAX_LOG_RATIO).exp(), LossConfig(name, clip_low=0.2, clip_high=0.3, dual_clip=dual_clip)
    # Not where rounding decides: next to a bound, or in sums of terms that float32 cannot hold together.
    assume(torch.stack([w - 0.8, w - 1.3, w - 3.0, log_w - 20]).abs().min() > 1e-2)
    assume(n == 1 or ratios.abs().max() <= 1e4)
    removed = ((advantage > 0) & (w > 1.3)) | ((advantage < 0) & (w < 0.8))
    if name == "ppo" and dual_clip:
        removed |= (advantage < 0) & (w > 3.0)
    of_token = torch.where(removed, 0.0, -advantage.double() * w)  # d loss / d log w, of each token's loss

    logprobs = ratios.clone().requires_grad_()
    zeros = torch.zeros(n)
    out = policy_loss(LossInputs(logprobs, zeros, advantage, torch.full((n,), 1 / n), sequence, 3, old_logprobs=zeros), config)
    (gradient,) = torch.autograd.grad(out.loss, logprobs)
    if name != "ppo":  # every token of the sequence moves its ratio
        of_sequences = torch.zeros(3, dtype=torch.float64).index_add_(0, sequence, of_token)
        of_token = (of_sequences / length if name == "gspo" else of_sequences)[sequence]
    assert out.loss.isfinite() and gradient.isfinite().all()
    assert (gradient * advantage <= 0).all()
    torch.testing.assert_close(gradient.double(), of_token / n, rtol=1e-2, atol=1e-6)
    limited = removed | ((advantage != 0) & (log_w > MAX_LOG_RATIO))
    assert out.sums["clip_fraction"].item() == limited.sum()


def test_a_message_far_above_its_old_probability_is_pushed_back_and_counted():
    """100 tokens at +0.3: a ratio of e^30; GSPO's of the same message is e^0.3."""
    for name, gradient in (("teamtr", math.exp(20) / 100 * 100), ("gspo", math.exp(0.3) / 100)):
        inputs = one_sequence([math.exp(0.3)] * 100, [-1.0] * 100)
        out = policy_loss(inputs, LossConfig(name, aggregation="sequence_mean"))
        out.loss.backward()
        torch.testing.assert_close(inputs.logprobs.grad, torch.full((100,), gradient, dtype=torch.float64))
        assert out.sums["clip_fraction"].item() == (100 if name == "teamtr" else 0)


@given(logprob=st.floats(-1e4, 0, width=32), reference=st.floats(-1e4, 0, width=32))
def test_the_kl_penalty_pulls_towards_the_reference_from_anywhere(logprob, reference):
    """Log-prob -0.1, reference -25: 1 for k3, 24.9 for k2."""
    for estimator in ("k1", "k2", "k3"):
        leaf = torch.tensor(logprob, requires_grad=True)
        value = kl_penalty(leaf, torch.tensor(reference), estimator)
        value.backward()
        log_r = reference - logprob
        expected = {"k1": 1.0, "k2": -log_r, "k3": 1 - math.exp(min(log_r, 20.0))}[estimator]
        assert leaf.grad.item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert value.isfinite() and (estimator == "k1" or value >= 0)


def test_the_reported_mismatch_has_no_ceiling():
    out = policy_loss(one_sequence([1.0], [1.0], engine_logprobs=torch.tensor([-25.0])), LossConfig())
    assert out.maxima["logprob_diff_max"].item() == out.sums["logprob_diff_mean"].item() == 25.0
    assert out.sums["prob_ratio"].item() == pytest.approx(math.exp(20)) and out.sums["chi_square"].isfinite()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimators_are_unbiased(estimator):
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * kl_penalty(p.log(), q.log(), estimator)).sum(), exact)


def test_kl_gradients_are_those_the_docstring_names():
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    logp = logits.log_softmax(0)
    p = logp.exp().detach()

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    torch.testing.assert_close(gradient((p * kl_penalty(logp, q.log(), "k1")).sum()), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(
        gradient((p * kl_penalty(logp, q.log(), "k2")).sum()), gradient((logp.exp() * (logp - q.log())).sum())
    )
    torch.testing.assert_close(gradient((p * kl_penalty(logp, q.log(), "k3")).sum()), gradient((q * (q.log() - logp)).sum()))


def test_entropy_and_reference_terms():
    inputs = one_sequence(
        [1.0, 1.0], [0.0, 0.0], entropy=torch.tensor([1.0, 3.0]), reference_logprobs=torch.full((2,), math.log(2))
    )
    out = policy_loss(inputs, LossConfig(entropy_coef=0.1, kl_coef=0.5, kl_estimator="k2"))
    assert out.loss.item() == pytest.approx(-0.1 * 2 + 0.5 * math.log(2) ** 2 / 2)
    assert out.sums["entropy"].item() == 4


def test_missing_columns_are_named():
    for config, key in ((LossConfig(entropy_coef=0.1), "entropy_coef"), (LossConfig(kl_coef=0.1), "kl_coef")):
        with pytest.raises(ConfigError, match=key):
            policy_loss(one_sequence([1.0], [1.0]), config)


def test_mismatch_corrections_by_hand():
    ratios = torch.tensor([0.1, 0.9, 3.0, 1.0])
    sequence = torch.tensor([0, 1, 1, 1])
    for correction, weights, corrected in (
        ("none", [1, 1, 1, 1], [0, 0, 0, 0]),
        ("truncate", [0.1, 0.9, 2.0, 1.0], [0, 0, 1, 0]),
        ("mask", [0, 0.9, 0, 1.0], [1, 0, 1, 0]),
        ("sequence_mask", [0, 1, 1, 1], [1, 0, 0, 0]),
    ):
        got, flags = mismatch_correction(ratios.log(), sequence, 2, MismatchConfig(correction))
        torch.testing.assert_close(got, torch.tensor(weights, dtype=torch.float32))
        assert flags.int().tolist() == corrected


def test_no_mismatch_means_no_correction():
    zeros = torch.zeros(5)
    for correction in ("none", "truncate", "mask", "sequence_mask"):
        weights, flags = mismatch_correction(zeros, torch.zeros(5, dtype=torch.int64), 1, MismatchConfig(correction))
        assert weights.eq(1).all() and not flags.any()


def test_correction_scales_the_policy_gradient_only():
    """TIS halves neither the entropy nor the KL term."""
    inputs = one_sequence([1.0], [1.0], engine_logprobs=torch.tensor([-math.log(4)]), entropy=torch.tensor([1.0]))
    out = policy_loss(inputs, LossConfig(entropy_coef=1.0, mismatch=MismatchConfig("truncate", high=2.0)))
    assert out.loss.item() == pytest.approx(-2.0 - 1.0)
    assert out.sums["corrected_fraction"].item() == 1
    assert out.maxima["logprob_diff_max"].item() == pytest.approx(math.log(4))


def batch_inputs(batch, weights, seed=0):
    generator = torch.Generator().manual_seed(seed)
    n = len(batch.engine_logprobs)
    engine = batch.engine_logprobs.double()

    def near(scale):
        return engine + scale * torch.randn(n, generator=generator, dtype=torch.float64)

    return {
        "logprobs": near(0.3),
        "old_logprobs": near(0.2),
        "engine_logprobs": engine,
        "reference_logprobs": near(0.3),
        "entropy": torch.rand(n, generator=generator, dtype=torch.float64),
        "advantages": expand_rows(torch.randn(len(batch), generator=generator, dtype=torch.float64), batch.response_lengths),
        "token_weights": weights.double(),
    }


def gradient_of(columns, batch, rows, config):
    """Loss sums and the gradient of the log-probs of these rows alone, in the whole batch's layout."""
    mask = torch.zeros(len(batch), dtype=torch.bool)
    mask[rows] = True
    tokens = expand_rows(mask, batch.response_lengths)
    part = {name: values[tokens] for name, values in columns.items()}
    part["logprobs"].requires_grad_()
    kept = batch.select(mask)
    sequence = expand_rows(torch.arange(len(kept)), kept.response_lengths)
    agent = expand_rows(kept.agent, kept.response_lengths)
    out = policy_loss(LossInputs(**part, sequence=sequence, sequences=len(kept), agent=agent, agents=3, beta=0.3), config)
    gradient = torch.zeros_like(columns["logprobs"])
    gradient[tokens] = torch.autograd.grad(out.loss, part["logprobs"])[0]
    return out, gradient


@pytest.mark.parametrize("correction", ["none", "truncate", "mask", "sequence_mask"])
@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
def test_gradient_is_the_sum_over_any_split(name, aggregation, correction, random_batch):
    """Micro-batches x data-parallel ranks give the loss, gradient and metrics of one pass."""
    batch = random_batch(6)
    config = LossConfig(
        name,
        aggregation=aggregation,
        fixed_length=9,
        kl_coef=0.1,
        entropy_coef=0.1,
        mismatch=MismatchConfig(correction, 0.8, 1.25),
    )
    columns = batch_inputs(batch, token_weights(batch, config))
    whole, gradient = gradient_of(columns, batch, torch.arange(len(batch)), config)
    for budget, ranks in ((1000, 1), (30, 1), (30, 2), (12, 3)):
        parts = [gradient_of(columns, batch, rows, config) for rank in plan_microbatches(batch, budget, ranks) for rows in rank]
        torch.testing.assert_close(sum(out.loss for out, _ in parts), whole.loss, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(sum(part for _, part in parts), gradient, rtol=1e-10, atol=1e-12)
        for key, total in whole.sums.items():
            torch.testing.assert_close(sum(out.sums[key] for out, _ in parts), total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_no_tokens_no_loss(name):
    empty = torch.zeros(0)
    inputs = LossInputs(empty.clone().requires_grad_(), empty, empty, empty, torch.zeros(0, dtype=torch.int64), 0, agents=2)
    out = policy_loss(inputs, LossConfig(name, mismatch=MismatchConfig("sequence_mask")))
    out.loss.backward()
    assert out.loss.item() == 0 and out.sums["tokens"].tolist() == [0, 0]


def test_token_weights_by_hand(make_batch):
    batch = make_batch([0, 0, 1], [0] * 3, [0, 1, 2], [0] * 3, lengths=[1, 3, 4], agents=2)
    expected = {
        ("token_mean", False): [1 / 8, 1 / 8, 1 / 8],
        ("sequence_mean", False): [1 / 3, 1 / 9, 1 / 12],
        ("fixed_length", False): [1 / 30, 1 / 30, 1 / 30],
        ("token_mean", True): [1 / 8, 1 / 8, 1 / 8],
        ("sequence_mean", True): [1 / 4, 1 / 12, 1 / 8],
        ("fixed_length", True): [1 / 40, 1 / 40, 1 / 20],
    }
    for (aggregation, per_agent), rows in expected.items():
        weights = token_weights(batch, LossConfig(aggregation=aggregation, per_agent=per_agent, fixed_length=10))
        torch.testing.assert_close(weights, torch.tensor(rows).repeat_interleave(batch.response_lengths))


def test_frozen_rows_weigh_nothing(random_batch):
    batch = random_batch(1)
    batch = replace(batch, trainable=batch.agent != 1)
    alone = batch.select(batch.trainable)
    for per_agent in (False, True):
        config = LossConfig(per_agent=per_agent)
        weights = token_weights(batch, config)
        kept = expand_rows(batch.trainable, batch.response_lengths)
        assert weights[~kept].eq(0).all()
        assert torch.equal(weights[kept], token_weights(alone, config))


def test_per_agent_weights_are_equal_for_every_agent_present(random_batch):
    batch = random_batch(2, agents=4)
    batch = batch.select(batch.agent != 2)
    weights = token_weights(batch, LossConfig(per_agent=True))
    mass = torch.zeros(4).index_add_(0, expand_rows(batch.agent, batch.response_lengths), weights)
    torch.testing.assert_close(mass, torch.tensor([1 / 3, 1 / 3, 0, 1 / 3]))


def test_all_frozen_or_empty_is_zero(random_batch, make_batch):
    batch = random_batch(1)
    assert token_weights(replace(batch, trainable=torch.zeros_like(batch.trainable)), LossConfig()).eq(0).all()
    assert token_weights(make_batch([], [], [], []), LossConfig(per_agent=True)).shape == (0,)


@pytest.mark.parametrize(
    "config,key",
    [
        (LossConfig("grpo"), "loss.name"),
        (LossConfig(aggregation="mean"), "loss.aggregation"),
        (LossConfig(aggregation="fixed_length"), "loss.fixed_length"),
        (LossConfig(dual_clip=0.5), "loss.dual_clip"),
        (LossConfig(kl_estimator="k4"), "loss.kl_estimator"),
        (LossConfig("teamtr"), "loss.aggregation"),
        (LossConfig(clip_low=1.5), "loss.clip_low"),
    ],
)
def test_bad_settings_are_named(config, key):
    with pytest.raises(ConfigError, match=key):
        check_loss_config(config)


@pytest.mark.parametrize(
    "config,key", [(MismatchConfig("tis"), "correction"), (MismatchConfig(low=1.5), "low"), (MismatchConfig(high=1.0), "high")]
)
def test_bad_mismatch_settings_are_named(config, key):
    with pytest.raises(ConfigError, match=f"mismatch.{key}"):
        check_settings(config, "algorithm.loss.mismatch")


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="twice"):
        register_loss("ppo")(lambda *_: None)
