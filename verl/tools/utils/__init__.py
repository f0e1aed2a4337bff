"""How tools are made from files."""
