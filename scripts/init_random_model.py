"""Make a model with random weights: of a size, or as the configuration of another model says, changed in places.

    python scripts/init_random_model.py --output_path models/tiny                       80 thousand parameters
    python scripts/init_random_model.py --size 2.5M --family llama --output_path models/tiny
    python scripts/init_random_model.py --hf_model_path Qwen/Qwen2.5-7B-Instruct --output_path models/small \\
        --new_config '{"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}'

With --hf_model_path tokenizer and generation config are those of that model, and its weights are not read; what
--new_config (JSON, or --new_config_path, a file of it) does not name is as there.
"""

from __future__ import annotations

import argparse
import json
import sys
from math import prod
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # works from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).parents[1]))

from verl.config.base import did_you_mean
from verl.utils.tiny_model import SIZES, make_tiny_model, save_model


def random_model_like(source: str, changes: dict[str, Any], folder: str, seed: int = 0, trusts: bool = False) -> str:
    """Save a causal language model with the configuration of ``source``, ``changes`` applied, and random weights.

    Raises:
        ValueError: a change names what the configuration has not.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    config = AutoConfig.from_pretrained(source, trust_remote_code=trusts)
    for name, value in changes.items():
        if not hasattr(config, name):
            near = did_you_mean(name, config.to_dict())
            raise ValueError(f"{name} is not in the configuration of {source}{near}. Correct --new_config.")
        setattr(config, name, value)
    if "num_hidden_layers" in changes and hasattr(config, "layer_types"):  # one entry a layer
        config.layer_types = (config.layer_types or [])[: changes["num_hidden_layers"]] or None
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trusts)
    try:
        model.generation_config = GenerationConfig.from_pretrained(source)
    except OSError:  # a model without one has the defaults of its configuration
        model.generation_config = GenerationConfig.from_model_config(config)
    return save_model(model, AutoTokenizer.from_pretrained(source, trust_remote_code=trusts), folder)


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    text = options.new_config or "{}"
    if options.new_config_path:
        text = Path(options.new_config_path).read_text(encoding="utf-8")
    changes = json.loads(text)
    if not isinstance(changes, dict):
        raise ValueError(f"--new_config is a JSON {type(changes).__name__}: write an object, {{...}}.")
    return changes


def main() -> None:
    """Command line: print the folder and the number of parameters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_path", required=True)
    parser.add_argument("--hf_model_path", help="folder or hub name of the model whose configuration is taken")
    parser.add_argument("--new_config", help="JSON object: entries of the configuration that differ")
    parser.add_argument("--new_config_path", help="a file of the same")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny", help="without --hf_model_path")
    parser.add_argument("--family", default="qwen2", help="model type of transformers, without --hf_model_path")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code of --hf_model_path")
    options = parser.parse_args()
    try:
        print(_make(options))
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _make(options: argparse.Namespace) -> str:
    from verl.models.heads import stored_shapes

    folder = options.output_path
    if (Path(folder).expanduser() / "config.json").exists():
        raise ValueError(f"{folder} holds a model already, and nothing is overwritten. Name another folder.")
    changes = _changes(options)
    if options.hf_model_path:
        folder = random_model_like(options.hf_model_path, changes, folder, options.seed, options.trust_remote_code)
    else:
        folder = make_tiny_model(folder, options.family, options.size, seed=options.seed, **changes)
    return f"{folder}: {sum(map(prod, stored_shapes(folder).values())):,} parameters, random"


if __name__ == "__main__":
    main()
