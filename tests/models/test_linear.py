"""Linear layers on whatever processor this is."""

from __future__ import annotations

import pytest
import torch

from engine.models.linear import pack_linear

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("without_bf16", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_exact_enough_and_alone_as_in_company(
    dtype: torch.dtype, without_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without_bf16:
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    torch.manual_seed(4)
    weight, bias, x = torch.randn(96, 192), torch.randn(96), torch.randn(33, 192).to(dtype)
    wanted = x.double() @ weight.to(dtype).double().T + bias.double()
    layer = pack_linear(weight, bias, dtype)
    result = layer(x)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), wanted, rtol=TOLERANCE[dtype], atol=50 * TOLERANCE[dtype])
    assert all(torch.equal(layer(x[r : r + 1])[0], result[r]) for r in range(len(x)))
