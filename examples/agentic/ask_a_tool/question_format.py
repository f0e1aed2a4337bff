"""Format of tool calls that a policy can find by chance: a turn that ends with ``?`` calls ``ask``."""

from verl.agents.tool_parser import ToolCall, ToolParser


class QuestionParser(ToolParser):
    """Parser of turns that end with a question mark; all others are answers."""

    def parse(self, token_ids, text, tools=()):
        if not text.endswith("?"):
            return text, []
        return text[:-1], [ToolCall("ask", {}, raw="?")]
