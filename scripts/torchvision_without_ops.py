"""Lets a torchvision built for CUDA be imported with a torch built for CPU; installs itself when run.

Two modules of torchvision describe its compiled operators to torch, and fail where these did not load; transformers
imports torchvision with every model and would fail with it. Image processors need its Python parts only. A package
index that has but one build of torchvision brings this about; PyTorch's own CPU index does not.

    .venv/bin/python scripts/torchvision_without_ops.py
"""

import shutil
import sys
import sysconfig
import types
from pathlib import Path

if __name__ == "__main__":
    here, site = Path(__file__), Path(sysconfig.get_paths()["purelib"])
    shutil.copy(here, site / here.name)
    (site / f"{here.stem}.pth").write_text(f"import {here.stem}\n")  # read at the start of every interpreter
else:
    for name in ("torchvision._meta_registrations", "torchvision._autograd_registrations"):
        sys.modules.setdefault(name, types.ModuleType(name))
