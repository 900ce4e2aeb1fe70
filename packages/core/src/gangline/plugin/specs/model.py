"""Hooks of models and of edits to models."""

from __future__ import annotations

from collections.abc import Iterable

from gangline.plugin.hooks import hookspec
from gangline.plugin.parts import Part


@hookspec
def gangline_models() -> Iterable[Part]:
    """Offer models. Users choose one: ``model=<name>``.

    ::

        # gangline_tapered.py: a decoder whose feed-forwards widen from block to block. train model=tapered model.last=8
        # (Mehta et al., arXiv 2404.14619, section 2.1)
        from dataclasses import dataclass, replace

        from gangline import Part, hookimpl
        from gangline.config import PositiveInt
        from gangline_basics.model.config import Tiny
        from gangline_basics.model.plan import plan_decoder


        @dataclass
        class Tapered(Tiny):
            first: PositiveInt = 2  # feed-forward width of the first block, in multiples of model.dim
            last: PositiveInt = 4  # feed-forward width of the last block, in multiples of model.dim


        def build(config, run):
            tree, plan = plan_decoder(config, run)
            step = (config.last - config.first) / max(1, config.layers - 1)
            widths = [round(config.dim * (config.first + step * depth)) for depth in range(config.layers)]
            blocks = [
                replace(block, feed_forward=replace(block.feed_forward, ffn_dim=width))
                for block, width in zip(tree.blocks, widths, strict=True)
            ]
            return replace(tree, blocks=tuple(blocks)), plan


        @hookimpl
        def gangline_models():
            yield Part(name="tapered", config=Tapered, build="gangline_tapered:build", summary="Widening blocks")
    """
    return ()


@hookspec
def gangline_model_edits() -> Iterable[Part]:
    """Offer model edits, each in the group that it names. Users switch them on: ``<group>=<name>``.

    ::

        # gangline_narrow.py: feed-forwards of a fraction of their width. train narrow=on narrow.by=4
        from dataclasses import dataclass, replace

        from gangline import Part, hookimpl
        from gangline.config import EditConfig, PositiveInt


        @dataclass
        class Narrow(EditConfig):
            by: PositiveInt = 2  # divisor of the feed-forward width


        def edit(tree, plan, options):
            from gangline_basics.model.decoder_nodes import FeedForwardNode
            from gangline.model.tree import iterate_nodes, replace_node

            found = {path: node for path, node in iterate_nodes(tree) if isinstance(node, FeedForwardNode)}
            for path, node in found.items():
                tree = replace_node(tree, path, replace(node, ffn_dim=node.ffn_dim // options.by))
            return tree, plan, list(found)  # claimed paths: another edit that claims one of them is refused


        @hookimpl
        def gangline_model_edits():
            yield Part(group="narrow", name="on", config=Narrow, build="gangline_narrow:edit", summary="Less width")
    """
    return ()
