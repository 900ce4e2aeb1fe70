"""Tags of chat templates beyond Jinja's own. Imported where templates are read, for it needs jinja2."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro

MARK = "_answer_mark"  # the variable with a word to write before and behind each answer; without it none is written


class GenerationTag(Extension):
    """`{% generation %}` marks answers for transformers. Its scope is that of a call block, as there.

    seen: whether the template has one.
    """

    tags = {"generation"}
    seen = False

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        self.seen = True
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_answer", [nodes.ContextReference()]), [], [], body).set_lineno(line)

    def _answer(self, context: Context, caller: Macro) -> str:
        mark = context.get(MARK, "")
        return f"{mark}{caller()}{mark}"
