"""Tags of chat templates beyond Jinja's own. Imported only when a template is read, because it needs jinja2."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro

MARK = "_answer_mark"  # template variable; its text is rendered before and after each answer, to find the answer


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks answers. It is compiled to a Jinja call block, as in transformers.

    seen: whether the template has this tag.
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
