"""FP8 emulation: rounding laws, scaling recipes, and an actor that trains and resumes with it."""

import pytest
import torch

from megatron_drmas.actor.fp8_emulation import (
    FORMATS,
    GRADIENT,
    INPUT,
    WEIGHT,
    BlockwiseScaling,
    DelayedScaling,
    TensorwiseScaling,
    _Fp8Linear,
    make_scaling,
    round_to_fp8,
    scale_for,
)
from megatron_drmas.actor.precision import check_precision, environment, fp8_arguments, token_multiple
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.schema import Fp8Config, PrecisionConfig

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype,mantissa_bits", [(E4M3, 3), (E5M2, 2)])
def test_rounding_is_idempotent_and_within_half_a_step(dtype, mantissa_bits):
    values = normal(4096)
    scale = scale_for(values.abs().amax(), dtype)
    rounded = round_to_fp8(values, scale, dtype)
    assert torch.equal(round_to_fp8(rounded, scale, dtype), rounded)
    regular = values.abs() * scale > torch.finfo(dtype).smallest_normal
    assert ((rounded - values).abs() / values.abs())[regular].max() <= 2.0 ** -(mantissa_bits + 1)
    assert len((rounded * scale).unique()) < 256


@pytest.mark.parametrize("dtype,largest", [(E4M3, 448.0), (E5M2, 57344.0)])
def test_out_of_range_saturates_and_nan_stays(dtype, largest):
    rounded = round_to_fp8(torch.tensor([1e9, -1e9, float("nan")]), 1.0, dtype)
    assert rounded[:2].tolist() == [largest, -largest] and rounded[2].isnan()


def test_zeros_stay_zero():
    for scaling in (TensorwiseScaling(), BlockwiseScaling(), DelayedScaling(Fp8Config())):
        assert scaling.quantize(torch.zeros(3, 5), INPUT, True).eq(0).all()
        assert scaling.quantize(torch.zeros(0, 5), INPUT, True).shape == (0, 5)


def test_an_outlier_costs_the_whole_tensor_or_its_block_only():
    values = normal(4, 256) * 1e-3
    values[0, 0] = 1e4
    error = {
        name: (scaling.quantize(values, INPUT, True) - values)[1:].abs().max()
        for name, scaling in {"tensor": TensorwiseScaling(), "block": BlockwiseScaling()}.items()
    }
    assert error["block"] < 2e-4 < error["tensor"]
    assert (BlockwiseScaling().quantize(values, INPUT, True) - values)[0, 128:].abs().max() < 2e-4


def test_blocks_follow_the_summed_dimension():
    """Scaling a row by a power of two scales its rounding: 1 x 128 for products over columns, 128 x 1 over rows."""
    values, blockwise = normal(130, 200), BlockwiseScaling()
    by_row, by_column = values.clone(), values.clone()
    by_row[7] *= 2.0**12
    by_column[:, 7] *= 2.0**12
    plain = blockwise.quantize(values, GRADIENT, True)
    assert torch.equal(blockwise.quantize(by_row, GRADIENT, True)[8:], plain[8:])
    transposed = blockwise.for_weight_gradient(values, plain, GRADIENT)
    assert torch.equal(blockwise.for_weight_gradient(by_column, plain, GRADIENT)[:, 8:], transposed[:, 8:])
    assert not torch.equal(
        blockwise.quantize(by_row.t().contiguous(), WEIGHT, True), blockwise.quantize(values.t().contiguous(), WEIGHT, True)
    )


def test_delayed_scale_comes_from_the_window_of_earlier_uses():
    scaling = DelayedScaling(Fp8Config(recipe="delayed", amax_history_len=2, margin=1))
    values = normal(8, 16)
    for use, amax in enumerate([None, 4.0, 4.0, 1.0, 1.0]):
        scale = 1.0 if amax is None else 448 / amax / 2
        scaled = values * {0: 4.0, 1: 1.0}.get(use, 1.0) / values.abs().max()
        assert torch.equal(scaling.quantize(scaled, INPUT, True), round_to_fp8(scaled, scale, E4M3))
    assert scaling.history[WEIGHT].eq(0).all()


def test_delayed_scaling_without_gradient_leaves_no_trace():
    scaling = DelayedScaling(Fp8Config(recipe="delayed"))
    scaling.quantize(normal(2, 3), INPUT, False)
    assert scaling.history.eq(0).all()


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("shape", [(0, 96), (0, 1, 96)])
def test_an_expert_without_a_token(recipe, shape):
    x, weight = torch.zeros(shape, requires_grad=True), normal(40, 96).requires_grad_()
    output = _Fp8Linear.apply(x, weight, make_scaling(Fp8Config(recipe=recipe)), True)
    assert output.shape == (*shape[:-1], 40)
    output.sum().backward()
    assert x.grad.shape == shape and weight.grad.eq(0).all()


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_linear_equals_products_of_rounded_tensors(recipe):
    x, weight, gradient = normal(2, 70, 96), normal(40, 96, seed=1), normal(2, 70, 40, seed=2)
    config = Fp8Config(recipe=recipe)
    x.requires_grad_(), weight.requires_grad_()
    output = _Fp8Linear.apply(x, weight, make_scaling(config), True)
    output.backward(gradient)

    scaling = make_scaling(config)
    flat, g = x.detach().reshape(-1, 96), gradient.reshape(-1, 40)
    qx, qw = scaling.quantize(flat, INPUT, True), scaling.quantize(weight.detach(), WEIGHT, True)
    qg = scaling.quantize(g, GRADIENT, True)
    torch.testing.assert_close(output, (qx @ qw.t()).view(2, 70, 40))
    torch.testing.assert_close(x.grad, (qg @ qw).view(2, 70, 96))
    expected = scaling.for_weight_gradient(g, qg, GRADIENT).t() @ scaling.for_weight_gradient(flat, qx, INPUT)
    torch.testing.assert_close(weight.grad, expected)
    exact = gradient.reshape(-1, 40).t() @ flat
    assert 0 < (weight.grad - exact).norm() / exact.norm() < 0.15
    assert FORMATS[INPUT] == FORMATS[WEIGHT] == E4M3 and FORMATS[GRADIENT] == E5M2


def test_what_megatron_is_told():
    assert fp8_arguments(PrecisionConfig("bf16")) == fp8_arguments(PrecisionConfig("fp8_emulated")) == {}
    told = fp8_arguments(PrecisionConfig("fp8", fp8=Fp8Config("blockwise", 1, 16, bf16_first_layers=2, bf16_last_layers=1)))
    assert told == {
        "fp8": "hybrid",
        "fp8_recipe": "blockwise",
        "fp8_margin": 1,
        "fp8_amax_history_len": 16,
        "fp8_amax_compute_algo": "max",
        "fp8_param": False,
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 2,
        "num_layers_at_end_in_bf16": 1,
    }
    assert not fp8_arguments(PrecisionConfig("fp8"))["first_last_layers_bf16"]


def test_token_multiples_and_environment():
    assert token_multiple(PrecisionConfig("fp8_emulated")) == token_multiple(PrecisionConfig("bf16")) == 1
    assert token_multiple(PrecisionConfig("fp8", fp8=Fp8Config("blockwise"))) == 128
    assert token_multiple(PrecisionConfig("fp8", fp8=Fp8Config("delayed"))) == 16
    assert environment(PrecisionConfig("fp8")) == {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    assert environment(PrecisionConfig("fp8_emulated")) == {}


@pytest.mark.parametrize(
    "precision,device,key",
    [
        (PrecisionConfig("fp16"), "cpu", "precision.mode"),
        (PrecisionConfig("fp8"), "cpu", "precision.mode"),
        (PrecisionConfig("fp8_emulated", fp8=Fp8Config("mxfp8")), "cpu", "precision.fp8.recipe"),
        (PrecisionConfig("fp8_emulated", fp8=Fp8Config(amax_history_len=0)), "cpu", "precision.fp8.amax_history_len"),
        (
            PrecisionConfig("fp8_emulated", fp8=Fp8Config(bf16_first_layers=2, bf16_last_layers=1)),
            "cpu",
            "precision.fp8.bf16_first_layers",
        ),
        (PrecisionConfig("fp8_emulated", fp8=Fp8Config("delayed", bf16_first_layers=1)), "cpu", "precision.fp8.recipe"),
    ],
)
def test_what_cannot_work_is_named(precision, device, key):
    with pytest.raises(ConfigError, match=key):
        check_precision(precision, device, layers=2)
