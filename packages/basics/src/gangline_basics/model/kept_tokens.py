"""KV cache: features of earlier tokens, stored by attention during decoding (Pope et al., arXiv 2211.05102, section 2).

Prompts of different lengths are padded on the left. Padding has document number 0 and text has 1, so document
masks exclude padding.

B batch, T tokens, S keys, H query heads, K key-value heads, C width
G queries per key-value head, M rows of a batched matmul (here B · K)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gangline.model.calls import AttentionCall

NARROW = (torch.bfloat16, torch.float16)  # dtypes whose attention scores are cast to float32 before the softmax


class KeptTokens:
    """Cache of the features of tokens that a later token may see: contiguous tensors (B, K, S, C).

    With a sliding window of W tokens, it stores the last W tokens. The buffer has room for 2 W tokens, so tokens are
    moved to the front of the buffer only once in W tokens.
    """

    def __init__(self, length: int, window: int | None = None) -> None:
        self._window = min(window or length, length)
        self._room = min(2 * self._window, length)
        self._kept: tuple[Tensor, ...] = ()  # buffers (B, K, _room, C), whose first `_used` tokens are filled
        self._used = 0
        self._text: Tensor | None = None  # (B, 1, 1, _room), False for padding; None: no padding

    @property
    def empty(self) -> bool:
        return not self._kept

    def begin(self, features: Sequence[Tensor], document_BT: Tensor | None) -> None:
        """Store the features of the first tokens, (B, K, T, C) each."""
        B, _, T, _ = features[0].shape
        self._used = min(T, self._window)
        self._kept = tuple(x.new_empty(B, x.shape[1], self._room, x.shape[-1]) for x in features)
        for buffer, new in zip(self._kept, features, strict=True):
            buffer[:, :, : self._used] = new[:, :, T - self._used :]
        if document_BT is not None:
            self._text = torch.ones(B, 1, 1, self._room, dtype=torch.bool, device=document_BT.device)
            self._text[:, 0, 0, : self._used] = (document_BT == document_BT[:, -1:])[:, T - self._used :]

    def add(self, features: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Store the features of one more token, (B, K, 1, C) each, of the same document as the token before it.

        Returns the features that the token sees, with its own at the end, and a mask (B, 1, 1, S) that is False for
        padding; None: no padding. Raises ValueError for several tokens at a time, and if the buffer is full.
        """
        if features[0].shape[2] != 1:
            raise ValueError(
                f"{features[0].shape[2]} tokens cannot be added to the KV cache at once; add one token at a time"
            )
        if self._used == self._room:
            if self._window >= self._room:
                raise ValueError(f"the KV cache is full: it has room for {self._room} tokens")
            self._forget()
        for buffer, new in zip(self._kept, features, strict=True):
            buffer[:, :, self._used] = new[:, :, 0]
        self._used += 1
        first = max(0, self._used - self._window)
        text = None if self._text is None else self._text[..., first : self._used]
        return tuple(buffer[:, :, first : self._used] for buffer in self._kept), text

    def _forget(self) -> None:
        """Move the last W - 1 tokens to the front of the buffer; the next token completes a window of W tokens."""
        keep = self._window - 1
        for buffer in self._kept:
            buffer[:, :, :keep] = buffer[:, :, self._used - keep : self._used].clone()
        if self._text is not None:
            self._text[..., :keep] = self._text[..., self._used - keep : self._used].clone()
            self._text[..., keep:] = True
        self._used = keep


class KeyValues:
    """KV cache of one attention module with grouped heads: rotated keys and values that a later query may see."""

    def __init__(self, attention: Callable[..., Tensor], call: AttentionCall, length: int) -> None:
        self._attention, self._call = attention, call
        self._kept = KeptTokens(length, call.window)

    def attend(
        self,
        q_BHTC: Tensor,
        k_BKTC: Tensor,
        v_BKTC: Tensor,
        document_BT: Tensor | None,
        position_BT: Tensor,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Return the output of the seam `attention`, (B, H, T, C), for the prompt's tokens or for one next token."""
        if self._kept.empty:
            more = () if sinks_H is None else (sinks_H,)
            out = self._attention(q_BHTC, k_BKTC, v_BKTC, document_BT, position_BT, *more)
            self._kept.begin((k_BKTC, v_BKTC), document_BT)
            return out
        (keys, values), text = self._kept.add((k_BKTC, v_BKTC))
        return attend_one_query(q_BHTC, keys, values, text, self._call, sinks_H)


def attend_one_query(
    q_BH1C: Tensor,
    k_BKSC: Tensor,
    v_BKSC: Tensor,
    seen_B11S: Tensor | None,
    call: AttentionCall,
    sinks_H: Tensor | None,
) -> Tensor:
    """Return the attention of one query per row to all given keys, as `AttentionCall` defines: (B, H, 1, C).

    Query heads that share a key head are multiplied together, so keys are read once and never repeated.
    """
    B, H, _, C = q_BH1C.shape
    K, S = k_BKSC.shape[1:3]
    q_MGC = q_BH1C.reshape(B * K, H // K, C) * (C**-0.5 if call.scale is None else call.scale)
    z_MGS = torch.bmm(q_MGC, k_BKSC.flatten(0, 1).mT)
    if z_MGS.dtype in NARROW:
        z_MGS = z_MGS.float()
    if call.soft_cap is not None:
        z_MGS = call.soft_cap * (z_MGS / call.soft_cap).tanh()
    if seen_B11S is not None:
        z_MGS = z_MGS.view(B, H, 1, S).masked_fill(~seen_B11S, -torch.inf).view(B * K, H // K, S)
    if sinks_H is not None:
        sinks = sinks_H.to(z_MGS.dtype).view(1, K, H // K, 1).expand(B, -1, -1, -1).flatten(0, 1)
        p_MGS = torch.cat((z_MGS, sinks), dim=-1).softmax(-1)[..., :S]
    else:
        p_MGS = z_MGS.softmax(-1)
    return torch.bmm(p_MGS.to(v_BKSC.dtype), v_BKSC.flatten(0, 1)).view(B, H, 1, -1)
