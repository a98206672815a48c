"""flash-linear-attention's chunked gated delta rule with `cu_seqlens`: [1, T, H, D]."""

import torch


def chunk_gated_delta_rule(
    q, k, v, g=None, beta=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):  # fmt: skip
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    assert initial_state is None and (cu_seqlens is None or q.shape[0] == 1)
    plain = torch_chunk_gated_delta_rule.__wrapped__
    lengths = [q.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    pieces = zip(*(x.split(lengths, dim=1) for x in (q, k, v, g, beta)), strict=True)
    outputs = [
        plain(*piece[:3], g=piece[3], beta=piece[4], use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)[0]
        for piece in pieces
    ]
    return torch.cat(outputs, dim=1), None


def fused_recurrent_gated_delta_rule(*args, **kwargs):
    raise AssertionError("a packed batch has no cache")
