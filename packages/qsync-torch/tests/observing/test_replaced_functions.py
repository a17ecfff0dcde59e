import torch
import torch.nn.functional as F

from qsync_torch.observing.replaced_functions import PairedDropout


def _seeded(function, *args, **kwargs):
    torch.manual_seed(3)
    with PairedDropout():
        return function(*args, **kwargs)


def test_masks_do_not_depend_on_the_format():
    x = torch.randn(7, 33)
    full, low = (_seeded(F.dropout, x.to(dtype), 0.4) for dtype in (torch.float32, torch.bfloat16))
    assert low.dtype is torch.bfloat16
    assert torch.equal(full == 0, low == 0)
    assert 0 < (full == 0).sum() < x.numel()
    assert torch.allclose(full[full != 0], (x / 0.6)[full != 0])


def test_whole_channels_are_dropped_in_pairs():
    x = torch.randn(4, 9, 3, 3)
    full, low = (_seeded(F.dropout2d, x.to(dtype), 0.5) for dtype in (torch.float32, torch.bfloat16))
    dropped = (full == 0).flatten(2).all(2)
    assert torch.equal((full == 0).flatten(2).any(2), dropped)
    assert torch.equal((low == 0).flatten(2).all(2), dropped)


def test_attention_is_pytorchs_but_for_the_masks():
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    mask = torch.rand(5, 5) < 0.8
    mask[:, 0] = True
    additive = torch.randn(5, 5)
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": additive}, {"scale": 0.3}):
        expected = F.scaled_dot_product_attention(q, k, v, **options)
        assert torch.allclose(_seeded(F.scaled_dot_product_attention, q, k, v, dropout_p=1e-9, **options), expected, atol=1e-5)
    torch.manual_seed(3)
    kept = torch.empty(2, 4, 5, 5).bernoulli_(0.8) / 0.8
    by_hand = ((q @ k.transpose(-2, -1) / 8**0.5).softmax(-1) * kept) @ v
    assert torch.allclose(_seeded(F.scaled_dot_product_attention, q, k, v, dropout_p=0.2), by_hand, atol=1e-5)


def test_nothing_is_dropped_in_evaluation():
    x = torch.randn(5, 5)
    assert _seeded(F.dropout, x, 0.5, False) is x
    assert _seeded(torch.nn.Dropout(0.5).eval(), x) is x
    in_place = x.clone()
    assert _seeded(F.dropout, in_place, 0.5, True, True) is in_place
