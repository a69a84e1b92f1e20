"""Feeds the token ids that the last step sampled to the next one, on the device.

The host need not know them: a step that is launched while the one before runs says for each request
which row of that step its id comes from.
"""

from __future__ import annotations

import torch


def feed_tokens(input_ids: torch.Tensor, token_source: torch.Tensor, sampled: torch.Tensor) -> None:
    """Write `sampled[token_source]` to `input_ids` where `token_source` is not negative.

    Args:
        input_ids: `[num_rows]` int64, changed in place.
        token_source: `[num_rows]` int32, rows of `sampled`; negative leaves the id alone.
        sampled: `[max_batch_size]` int64.
    """
    if input_ids.is_cuda:
        from runners.attention.triton_kernels import launch_feed_tokens

        launch_feed_tokens(input_ids, token_source, sampled)
        return
    input_ids.copy_(fed_tokens_torch(input_ids, token_source, sampled))


def fed_tokens_torch(
    input_ids: torch.Tensor, token_source: torch.Tensor, sampled: torch.Tensor
) -> torch.Tensor:
    """What `feed_tokens` makes of `input_ids`, as a tensor of its own: the plain twin of both kernels."""
    rows = token_source.long()
    return torch.where(rows >= 0, sampled[rows.clamp(min=0)], input_ids)
