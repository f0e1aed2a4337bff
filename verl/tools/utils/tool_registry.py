"""Tools of ``multi_turn.tool_config_path``, a YAML or JSON file."""

from collections.abc import Mapping
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.calls import ToolThread
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.import_utils import load_class_from_fqn, load_extern_type, split_file_name


def initialize_tools_from_config(tools_config_file: str, thread: ToolThread | None = None) -> list[BaseTool]:
    """Return the tools of a file.

    An entry of type ``native`` is one tool, with ``class_name`` (a dotted name or ``path/file.py:Class``), ``config``
    and ``tool_schema``; one of type ``mcp`` is all tools of its servers, or those of ``mcp.tool_selected_list``.

    Args:
        thread: event loop of the connections to MCP servers; None: one of their own.

    Raises:
        ModuleNotFoundError: a class is in no module.
        TypeError: it is no BaseTool.
        ValueError: an entry lacks something.
    """
    from omegaconf import OmegaConf

    content: Any = OmegaConf.to_container(OmegaConf.load(tools_config_file), resolve=True)
    entries = content.get("tools") if isinstance(content, Mapping) else None
    if not isinstance(entries, list):
        raise ValueError(
            f"multi_turn.tool_config_path={tools_config_file}: it has no list 'tools'. Write "
            "tools: [{class_name: ..., config: {type: native}, tool_schema: {...}}]."
        )
    tools: list[BaseTool] = []
    for number, entry in enumerate(entries):
        where = f"multi_turn.tool_config_path={tools_config_file}, tools[{number}]"
        if not isinstance(entry, Mapping) or not entry.get("class_name"):
            raise ValueError(f"{where}: it has no class_name. Give the dotted name of a tool's class.")
        cls, config = _class_of(entry["class_name"], where), dict(entry.get("config") or {})
        kind = config.get("type", "native")
        if kind == "native":
            schema = entry.get("tool_schema")
            schema = None if schema is None else OpenAIFunctionToolSchema.model_validate(schema)
            tools.append(cls(config=config, tool_schema=schema))
        elif kind == "mcp":
            from verl.tools.mcp_base_tool import mcp_tools

            tools += mcp_tools(cls, config, entry.get("mcp") or {}, where, thread or ToolThread())
        else:
            raise ValueError(f"{where}: config.type={kind!r} is no type of tools; it is native or mcp.")
    return tools


def _class_of(name: str, where: str) -> type[BaseTool]:
    in_file = split_file_name(name)
    cls = load_extern_type(*in_file) if in_file else load_class_from_fqn(name, "class_name")
    if not (isinstance(cls, type) and issubclass(cls, BaseTool)):
        raise TypeError(f"{where}: {name} is no subclass of verl.tools.base_tool.BaseTool.")
    return cls
