"""Packed products against double precision, over shapes and variants: alone, in company and on several threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.reference import ReferenceKernels
from engine.models.linear import pack_gated, pack_linear, quantised_linear, rounded_rows
from engine.products import Blocks, Packed, Products, open_products

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
"""Of the whole result's size. Half the distance of neighbouring numbers is 6e-8 and 2e-3 of theirs."""
ROUNDED = {4: 2e-4, 8: 2e-4, 13: 4e-4}
"""On top: a number halfway between two levels may be rounded either way; both factors of 13 bits are rounded."""
rows, outputs = st.integers(1, 70), st.sampled_from([1, 7, 16, 33, 100])


@pytest.fixture(scope="module")
def products() -> Products:
    found = open_products()
    assert found is not None
    return found


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_blocks(bits: int, outputs: int, inputs: int) -> Blocks:
    if bits == 8:
        return Blocks.rounded(torch.randn(outputs, inputs))
    raw = torch.randint(256, (outputs, inputs // 32, 20), dtype=torch.uint8)
    raw[..., :4] = torch.randn(outputs, inputs // 32, 2).half().view(torch.uint8)
    return Blocks(4, raw.flatten(1))


def assert_close(result: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert result.dtype == dtype
    assert (result.double() - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()


def assert_alone_as_in_company(layer: Packed, x: torch.Tensor, result: torch.Tensor) -> None:
    for count in {1, 2, 3, 5, 6, 8, 13} & set(range(1, len(x))):
        assert torch.equal(layer(x[-count:]), result[-count:])


@settings(derandomize=True, max_examples=20, deadline=None)
@given(rows, outputs, st.sampled_from([32, 96, 800]), st.sampled_from([4, 8]), st.sampled_from(DTYPES))
def test_levels(rows: int, outputs: int, inputs: int, bits: int, dtype: torch.dtype) -> None:
    products = open_products()
    assert products is not None
    torch.manual_seed(rows)
    blocks, bias = random_blocks(bits, outputs, inputs), torch.randn(outputs)
    x = (torch.randn(rows, inputs) * torch.logspace(-3, 3, rows).unsqueeze(1)).to(dtype)
    x[0, :32] = 0
    x[:, 32:64] *= 1e-3  # a block whose scale is a small multiple of its row's unit
    wanted = rounded_rows(x).double() @ blocks.floats().double().T + bias
    for variant in products.variants():
        layer = products.levels(blocks, bias, variant=variant)
        result = layer(x)
        # A number halfway between two levels may be rounded either way, hence more than float's own error.
        assert (result.double() - wanted).norm() <= (TOLERANCE[dtype] + 2e-4) * wanted.norm()
        assert_alone_as_in_company(layer, x, result)


@pytest.mark.parametrize("weight", [1.0, -1.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_wide_sums_fit(products: Products, weight: float, sign: float) -> None:
    weights, x = torch.full((20, 192), weight * 4095), torch.full((7, 192), sign)
    for variant in products.variants():
        torch.testing.assert_close(products.wide(weights, variant=variant)(x), x @ weights.T)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_sums_fit(products: Products, bits: int, sign: float) -> None:
    raw = torch.full((20, 3, 20 if bits == 4 else 34), 0xFF if bits == 4 else 0x7F, dtype=torch.uint8)
    raw[..., : 4 if bits == 4 else 2] = torch.ones(20, 3, 2 if bits == 4 else 1).half().view(torch.uint8)
    blocks, x = Blocks(bits, raw.flatten(1)), torch.full((7, 96), sign)
    for variant in products.variants():
        torch.testing.assert_close(products.levels(blocks, variant=variant)(x), x @ blocks.floats().T)


@settings(derandomize=True, max_examples=15, deadline=None)
@given(rows, outputs, st.sampled_from([1, 40, 800]), st.sampled_from(DTYPES))
def test_floats(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    products = open_products()
    assert products is not None
    torch.manual_seed(rows)
    weight, bias, x = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs), torch.randn(rows, inputs).to(dtype)
    layer = products.floats(weight, bias)
    result = layer(x)
    assert_close(result, x.double() @ weight.double().T + bias, dtype)
    assert_alone_as_in_company(layer, x, result)


@settings(derandomize=True, max_examples=20, deadline=None)
@given(rows, outputs, st.sampled_from([64, 192, 1280]), st.sampled_from(DTYPES))
def test_wide(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """As exact as numbers of bfloat16 multiplied in float32, with weights that are none and rows of any size."""
    products = open_products()
    assert products is not None
    torch.manual_seed(rows)
    weight = torch.randn(outputs, inputs) * torch.logspace(-6, 6, outputs).unsqueeze(1)
    bias, x = torch.randn(outputs), (torch.randn(rows, inputs) * torch.logspace(-9, 9, rows).unsqueeze(1)).to(dtype)
    weight[:, :16], x[0, :32] = 0, 0
    x[:, 16:32] *= 1e-3
    wanted = x.double() @ weight.double().T + bias
    size = x.double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1) + bias.abs()
    for variant in products.variants():
        layer = products.wide(weight, bias, variant=variant)
        result = layer(x)
        assert result.dtype == dtype
        rounding = torch.finfo(dtype).eps / 2 * wanted.abs()
        assert ((result.double() - wanted).abs() <= rounding + 3e-4 * size).all()
        assert_alone_as_in_company(layer, x, result)


def test_wide_keeps_the_numbers_of_bfloat16(products: Products) -> None:
    """Those from a sixteenth of a block's largest on; the rest to a part in 4,095 of it."""
    weight = (torch.randn(48, 128) * torch.logspace(-20, 20, 48).unsqueeze(1)).bfloat16().float()
    blocks = weight.unflatten(1, (-1, 64)).abs()
    peak, wanted = blocks.amax(-1, keepdim=True), weight.T
    for variant in products.variants():
        found = products.wide(weight, variant=variant)(torch.eye(128))
        large = (blocks >= peak / 16).flatten(1).T
        torch.testing.assert_close(found[large], wanted[large], rtol=3e-7, atol=0.0)
        assert ((found - wanted).T.unflatten(1, (-1, 64)).abs() <= peak / 4095).all()


@pytest.mark.parametrize(("inputs", "value"), [(96, 1.0), (64, float("inf"))])
def test_wide_wants_whole_blocks_of_numbers(products: Products, inputs: int, value: float) -> None:
    with pytest.raises(ValueError, match=f"rows of {inputs} numbers are not whole blocks of 64, or not finite"):
        products.wide(torch.full((16, inputs), value))
    x, layer = torch.randn(3, inputs), pack_linear(torch.full((16, inputs), value), None, torch.bfloat16)
    torch.testing.assert_close(
        layer(x.bfloat16()), (x.bfloat16() @ torch.full((inputs, 16), value).bfloat16()), equal_nan=True
    )


@settings(derandomize=True, max_examples=20, deadline=None)
@given(rows, st.sampled_from([32, 96]), st.sampled_from([4, 8, 13, 16, 32]), st.sampled_from(DTYPES))
def test_gates(rows: int, outputs: int, bits: int, dtype: torch.dtype) -> None:
    products = open_products()
    assert products is not None
    torch.manual_seed(rows)
    bias, x = torch.randn(outputs), torch.randn(rows, 192).to(dtype)
    if bits < 13:
        blocks = random_blocks(bits, outputs, 192)
        layers = [products.levels(blocks, bias, gated=True, variant=variant) for variant in products.variants()]
        y = rounded_rows(x).double() @ blocks.floats().double().T + bias
    else:
        weight = torch.randn(outputs, 192).to(torch.float32 if bits == 32 else torch.bfloat16)
        layers = [products.floats(weight, bias, gated=True)]
        if bits == 13:
            layers = [products.wide(weight, bias, gated=True, variant=variant) for variant in products.variants()]
        y = x.double() @ weight.double().T + bias
    gate, passing = y.chunk(2, dim=1)
    for layer in layers:
        result = layer(x)
        wanted = torch.nn.functional.silu(gate) * passing
        assert (result.double() - wanted).norm() <= (TOLERANCE[dtype] + ROUNDED.get(bits, 0)) * wanted.norm()
        assert_alone_as_in_company(layer, x, result)


def test_gates_at_their_ends(products: Products) -> None:
    weight = torch.cat([torch.eye(32), torch.eye(32)])
    gates = torch.tensor([0.0, -0.0, 1e-30, -60.0, -87.0, -200.0, -3e38, 3e38, float("inf"), float("nan")])
    x = torch.zeros(1, 32)
    for gate in gates:
        x[0, 5] = gate  # by itself: infinity times the zeros beside it is no number
        result = products.floats(weight, gated=True)(x)[0, 5]
        torch.testing.assert_close(result, (torch.nn.functional.silu(gate.double()) * gate).float(), equal_nan=True)


def test_gates_are_whole_panels(products: Products) -> None:
    with pytest.raises(ValueError, match="48 outputs are not whole panels of gates and of others"):
        products.floats(torch.randn(48, 32), gated=True)


@pytest.mark.parametrize("wide", [64, 72])
@pytest.mark.parametrize("bits", [4, 32])
def test_a_gated_layer_is_the_activation_of_the_product(bits: int, wide: int) -> None:
    weights = random_blocks(4, 2 * wide, 96) if bits == 4 else torch.randn(2 * wide, 96)
    product = (
        quantised_linear(weights, None) if isinstance(weights, Blocks) else pack_linear(weights, None, torch.float32)
    )
    x, kernels = torch.randn(7, 96), ReferenceKernels(torch.float32)
    layer = pack_gated(weights, torch.float32, kernels.silu_mul)
    torch.testing.assert_close(layer(x), kernels.silu_mul(product(x)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 20, 200])
def test_threads_change_no_bit(products: Products, threads: None, count: int, rows: int) -> None:
    torch.manual_seed(rows)
    layers: list[tuple[Packed, torch.dtype]] = [
        (products.levels(random_blocks(4, 700, 768)), torch.float32),
        (products.levels(random_blocks(8, 700, 768)), torch.bfloat16),
        (products.floats(torch.randn(700, 768).bfloat16()), torch.bfloat16),
        (products.floats(torch.randn(704, 768).bfloat16(), gated=True), torch.bfloat16),
        (products.levels(random_blocks(4, 704, 768), gated=True), torch.bfloat16),
        (products.wide(torch.randn(700, 768)), torch.float32),
        (products.wide(torch.randn(704, 768), gated=True), torch.bfloat16),
    ]
    for layer, dtype in layers:
        x = torch.randn(rows, 768).to(dtype)
        torch.set_num_threads(1)
        wanted = layer(x)
        torch.set_num_threads(count)
        assert torch.equal(layer(x), wanted)


@pytest.mark.parametrize("bits", [4, 8, 13])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_none_and_in_its_row(products: Products, bits: int, bad: float) -> None:
    x = torch.randn(6, 128)
    x[2, 50] = bad
    for variant in products.variants():
        layer = (
            products.wide(torch.randn(20, 128), variant=variant)
            if bits == 13
            else products.levels(random_blocks(bits, 20, 128), variant=variant)
        )
        result = layer(x)
        assert result.isfinite().all(1).tolist() == [True, True, False, True, True, True]


def test_a_variant_that_disagrees_is_not_used(products: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    assert products.variant == products.variants()[0]
    monkeypatch.setattr(Products, "_agrees", lambda self, variant: False)
    assert Products().variant == 0


def test_rows_may_have_several_axes_and_lie_apart(products: Products) -> None:
    layer = products.floats(torch.randn(20, 32))
    x = torch.randn(4, 3, 64)[..., ::2]
    assert torch.equal(layer(x), layer(x.reshape(12, 32)).view(4, 3, 20))


def test_rows_of_another_width_are_refused(products: Products) -> None:
    with pytest.raises(ValueError, match="rows of 64 numbers times a matrix of 96 inputs"):
        products.levels(random_blocks(4, 16, 96))(torch.randn(2, 64))


@pytest.mark.parametrize("avx512", [False, True])
@pytest.mark.parametrize("compiler", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_is_right_on_any_processor(
    dtype: torch.dtype, avx512: bool, compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    if not torch.cpu._is_avx512_bf16_supported() and not avx512:
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    if not compiler:
        monkeypatch.setattr("engine.models.linear.open_products", lambda: None)
    torch.manual_seed(4)
    weight, bias, x = torch.randn(96, 192), torch.randn(96), torch.randn(33, 192).to(dtype)
    layer = pack_linear(weight, bias, dtype)
    result = layer(x)
    assert_close(result, x.double() @ weight.to(dtype).double().T + bias, dtype)
    assert all(torch.equal(layer(x[r : r + 1])[0], result[r]) for r in range(len(x)))
