"""The model: a decoder-only transformer as single-device code, and the torch-free data that lies beside it.

tree       what a model is made of: config nodes, each naming the module it builds; decoder_nodes: the decoder's
config     the options that users set: `model=tiny model.dim=96`; presets: published sizes, `model=llama3-8b`, ...
plan       a configuration's tree and its `gangline.plan.Plan`
compose    model, then its edits; build: the modules on the meta device; init: their first weights; buffers: each once
decoder    embed, blocks, head; block, attention, rope, norm, feed_forward, head, loss, linear hold one idea each
kept       frozen weights in fewer bits; kept_node: which, and the node around a linear of codes
flops      what a token costs
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline.plugin.lazy import lazily

if TYPE_CHECKING:
    from gangline.interop.adapter import Adapter as Adapter
    from gangline.interop.config import read_config as read_config
    from gangline.interop.fields import checked as checked, refuse_unknown as refuse_unknown
    from gangline.interop.names import theirs_of as theirs_of
    from gangline.model.attention import (
        PLAIN as PLAIN,
        PlainAttention as PlainAttention,
        plain as plain,
    )
    from gangline.model.build import Wrapper as Wrapper, construct as construct
    from gangline.model.cache import (
        Cache as Cache,
        Carried as Carried,
        KeptTokens as KeptTokens,
        KeyValues as KeyValues,
        one_query as one_query,
    )
    from gangline.model.calls import (
        LOSS_CHUNK as LOSS_CHUNK,
        AttentionCall as AttentionCall,
        Call as Call,
        LossCall as LossCall,
    )
    from gangline.model.compose import compose_model as compose_model
    from gangline.model.config import DecoderConfig as DecoderConfig, Tiny as Tiny
    from gangline.model.decoder_nodes import (
        LINEAR as LINEAR,
        AttentionNode as AttentionNode,
        BlockNode as BlockNode,
        DecoderNode as DecoderNode,
        EmbeddingNode as EmbeddingNode,
        FeedForwardNode as FeedForwardNode,
        HeadNode as HeadNode,
        LinearNode as LinearNode,
        NormNode as NormNode,
        SinksNode as SinksNode,
        fitted as fitted,
    )
    from gangline.model.feed_forward import (
        FeedForward as FeedForward,
        bounded_gradients as bounded_gradients,
        gated as gated,
    )
    from gangline.model.flops import (
        computes_frozen as computes_frozen,
        flops_per_token as flops_per_token,
        parameter_count as parameter_count,
    )
    from gangline.model.gating import SWIGLU as SWIGLU, Gating as Gating
    from gangline.model.init import shards_of as shards_of, whole_model as whole_model
    from gangline.model.kept import Codes as Codes, decode as decode, encode as encode
    from gangline.model.kept_node import (
        EightBitNode as EightBitNode,
        keep_in_8_bits as keep_in_8_bits,
        keep_in_bf16 as keep_in_bf16,
    )
    from gangline.model.kernels import takes_kernels as takes_kernels
    from gangline.model.linear import Embedding as Embedding, Linear as Linear
    from gangline.model.local_sizes import CommVolume as CommVolume, LocalSizes as LocalSizes
    from gangline.model.loss import (
        CrossEntropy as CrossEntropy,
        by_chunks as by_chunks,
        cap_logits_ as cap_logits_,
        gradients_by_chunks as gradients_by_chunks,
        log_sum_exp as log_sum_exp,
        logits_gradient as logits_gradient,
        uncapped_gradient_ as uncapped_gradient_,
        wide as wide,
    )
    from gangline.model.norm import RMSNorm as RMSNorm
    from gangline.model.plan import plan_decoder as plan_decoder
    from gangline.model.products import (
        AttentionProduct as AttentionProduct,
        MatrixProduct as MatrixProduct,
        Product as Product,
    )
    from gangline.model.recall import Recall as Recall
    from gangline.model.rope import rotated as rotated
    from gangline.model.rope_rates import (
        BandScaling as BandScaling,
        Rope as Rope,
        RopeScaling as RopeScaling,
        frequencies as frequencies,
        plain_rates as plain_rates,
    )
    from gangline.model.tree import (
        Decoding as Decoding,
        Node as Node,
        Shape as Shape,
        WrapNode as WrapNode,
        by_path as by_path,
        children as children,
        nodes as nodes,
        parameter_shapes as parameter_shapes,
        replaced as replaced,
    )
    from gangline.plan import (
        Cut as Cut,
        Fold as Fold,
        Init as Init,
        Kept as Kept,
        Name as Name,
        Plan as Plan,
        Seam as Seam,
        chosen as chosen,
        matches as matches,
        names as names,
    )

__getattr__, __all__ = lazily(
    __name__,
    {
        "gangline.plan": "Cut Fold Init Kept Name Plan Seam chosen matches names",
        "gangline.model.tree": "Decoding Node Shape WrapNode by_path children nodes parameter_shapes replaced",
        "gangline.model.decoder_nodes": (
            "LINEAR AttentionNode BlockNode DecoderNode EmbeddingNode FeedForwardNode HeadNode LinearNode NormNode "
            "SinksNode fitted"
        ),
        "gangline.model.kernels": "takes_kernels",
        "gangline.model.local_sizes": "CommVolume LocalSizes",
        "gangline.model.cache": "Cache Carried KeptTokens KeyValues one_query",
        "gangline.model.rope_rates": "BandScaling Rope RopeScaling frequencies plain_rates",
        "gangline.model.rope": "rotated",
        "gangline.model.products": "AttentionProduct MatrixProduct Product",
        "gangline.model.plan": "plan_decoder",
        "gangline.model.config": "DecoderConfig Tiny",
        "gangline.model.compose": "compose_model",
        "gangline.model.calls": "LOSS_CHUNK AttentionCall Call LossCall",
        "gangline.model.loss": (
            "CrossEntropy by_chunks cap_logits_ gradients_by_chunks log_sum_exp logits_gradient uncapped_gradient_ wide"
        ),
        "gangline.model.build": "Wrapper construct",
        "gangline.model.attention": "PLAIN PlainAttention plain",
        "gangline.model.feed_forward": "FeedForward bounded_gradients gated",
        "gangline.model.gating": "SWIGLU Gating",
        "gangline.model.kept": "Codes decode encode",
        "gangline.model.kept_node": "EightBitNode keep_in_8_bits keep_in_bf16",
        "gangline.model.linear": "Embedding Linear",
        "gangline.model.norm": "RMSNorm",
        "gangline.model.recall": "Recall",
        "gangline.model.flops": "computes_frozen flops_per_token parameter_count",
        "gangline.model.init": "shards_of whole_model",
        "gangline.interop.adapter": "Adapter",
        "gangline.interop.config": "read_config",
        "gangline.interop.names": "theirs_of",
        "gangline.interop.fields": "checked refuse_unknown",
    },
)
