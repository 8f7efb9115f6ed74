"""Linear, norm, activation and expert kernels against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gpuworker.kernels.activation import ACTIVATIONS, gated_activation
from gpuworker.kernels.experts import expert_mlp, route
from gpuworker.kernels.linear import Linear
from gpuworker.kernels.norm import RmsNorm
from gpuworker.kernels.rope import Rotation, apply_rope

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 5, 6, 12, 32, 64, 65, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_size", [24, 20_000])
def test_linear_equals_float64(rows: int, dtype: torch.dtype, bias: bool, out_size: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 40, generator=generator).to(dtype)
    weight = torch.randn(out_size, 40, generator=generator).to(dtype)
    offset = torch.randn(out_size, generator=generator).to(dtype) if bias else None
    result = Linear(dtype, CPU)(x, weight, offset)
    expected = x.double() @ weight.double().t()
    if offset is not None:
        expected += offset.double()
    assert result.dtype is dtype
    error = (result.double() - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]


def test_linear_sees_a_weight_that_changed_in_place() -> None:
    linear = Linear(torch.bfloat16, CPU)
    x, weight = torch.ones(16, 8, dtype=torch.bfloat16), torch.ones(4, 8, dtype=torch.bfloat16)
    assert linear(x, weight).unique().tolist() == [8.0]
    weight.fill_(2.0)
    assert linear(x, weight).unique().tolist() == [16.0]


@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_its_definition(one_plus: bool, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = torch.linspace(-1, 2, 32).to(dtype)
    wide = x.double()
    scale = (wide.square().mean(-1, keepdim=True) + 0.1).rsqrt()
    expected = wide * scale * (weight.double() + (1.0 if one_plus else 0.0))
    result = RmsNorm(0.1, one_plus=one_plus, device=CPU)(x, weight)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    assert result.dtype is dtype


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_activation_keeps_the_input(name: str) -> None:
    gate_up = torch.randn(4, 12, generator=torch.Generator().manual_seed(2))
    before = gate_up.clone()
    result = gated_activation(gate_up, name)  # type: ignore[arg-type]
    torch.testing.assert_close(result, ACTIVATIONS[name](before[:, :6]) * before[:, 6:])
    assert torch.equal(gate_up, before)


def test_partial_rope_passes_the_rest_through() -> None:
    x = torch.randn(2, 3, 8)
    angles = torch.tensor([[0.3, 1.1], [2.0, 0.1]])
    cos = torch.cat((angles.cos(), angles.cos()), -1)[:, None]
    sin = torch.cat((-angles.sin(), angles.sin()), -1)[:, None]
    result = apply_rope(x, Rotation(cos, sin))
    assert torch.equal(result[..., 4:], x[..., 4:])
    turned = torch.complex(x[..., :2], x[..., 2:4]) * torch.polar(
        torch.ones(2, 1, 2), angles[:, None]
    )
    torch.testing.assert_close(result[..., :2], turned.real)
    torch.testing.assert_close(result[..., 2:4], turned.imag)


@pytest.mark.parametrize("normalize", [False, True])
def test_experts_equal_a_sum_over_all_experts(normalize: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    num_experts, size, hidden, top_k = 5, 6, 8, 2
    x = torch.randn(7, hidden, generator=generator)
    gate_up = torch.randn(num_experts, 2 * size, hidden, generator=generator)
    down = torch.randn(num_experts, hidden, size, generator=generator)
    logits = torch.randn(7, num_experts, generator=generator)
    weights, experts = route(logits, top_k, normalize=normalize)
    result = expert_mlp(x, gate_up, down, weights, experts, "silu", Linear(torch.float32, CPU))
    dense = torch.zeros(7, num_experts).scatter_(1, experts, weights)
    expected = torch.zeros_like(x)
    for expert in range(num_experts):
        gate, up = F.linear(x, gate_up[expert]).chunk(2, -1)
        expected += dense[:, expert, None] * F.linear(F.silu(gate) * up, down[expert])
    torch.testing.assert_close(result, expected)
    total = weights.sum(-1)
    assert bool((total - 1).abs().max() < 1e-6) is normalize
