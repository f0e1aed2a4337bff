#!/usr/bin/env bash
# Make .venv and install what requirements.txt pins, and requirements-cuda.txt where there is an NVIDIA GPU. Does nothing
# when .venv is already up to date.
#
#   bash scripts/setup_env.sh            what training needs
#   bash scripts/setup_env.sh --test     the same plus the test tools
#
# VERL_PYTHON        the Python to use (3.10 to 3.12). Default: the first such Python found in PATH.
# VERL_TORCH_INDEX   wheel index to take torch from, e.g. https://download.pytorch.org/whl/cu130. Default: pip's own
#                    configuration, plus PyTorch's CPU index where no NVIDIA GPU is found and that index answers.
#
# A .venv that was made without a GPU, or from another index, gets the torch of this machine or index on the next call.
set -euo pipefail
cd "$(dirname "$0")/.."

CPU_INDEX=https://download.pytorch.org/whl/cpu
want_test=0
for arg in "$@"; do
    case $arg in
        --test) want_test=1 ;;
        *) echo "setup_env.sh: unknown option $arg (known: --test)" >&2; exit 2 ;;
    esac
done

is_supported() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1; }

find_python() {
    if [ -n "${VERL_PYTHON:-}" ]; then
        is_supported "$VERL_PYTHON" && { echo "$VERL_PYTHON"; return; }
        echo "VERL_PYTHON=$VERL_PYTHON is not a Python 3.10, 3.11 or 3.12." >&2
        exit 1
    fi
    for name in python3 python3.12 python3.11 python3.10 python; do
        if is_supported "$name"; then echo "$name"; return; fi
    done
    echo "No Python 3.10, 3.11 or 3.12 in PATH (python3 is: $(python3 --version 2>&1 || true))." >&2
    echo "Install one, or name one: VERL_PYTHON=/path/to/python3.11 bash scripts/setup_env.sh" >&2
    exit 1
}

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 || [ -e /dev/nvidiactl ]; }

answers() {
    .venv/bin/python -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' "$1/torch/" \
        >/dev/null 2>&1
}

# The CUDA version that torch in .venv was built for, "cpu" for a CPU build, nothing without torch.
installed_build() { .venv/bin/python -c 'import torch.version as v; print(v.cuda or v.hip or "cpu")' 2>/dev/null || true; }

# The highest CUDA version this machine's driver runs, as "13"; nothing where it cannot be asked.
driver_cuda() { nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\)\..*/\1/p'; }

gpu=no
if has_gpu; then gpu=yes; fi
# The stamp names everything an installation depends on; equal stamp, nothing to do.
files_sum=$(cat requirements.txt requirements-cuda.txt requirements-test.txt setup.py verl/version.py | cksum)
stamp_text="$files_sum $PWD ${VERL_TORCH_INDEX:-} gpu=$gpu"
stamp=.venv/.verl-runtime
if [ $want_test = 1 ]; then stamp=.venv/.verl-test; fi
if [ "$(cat $stamp 2>/dev/null)" = "$stamp_text" ]; then exit 0; fi

if [ -x .venv/bin/python ] && ! is_supported .venv/bin/python; then
    echo ".venv holds $(.venv/bin/python --version 2>&1 || echo 'no working Python'); 3.10 to 3.12 are supported." >&2
    echo "Remove it (rm -r .venv) and run this again." >&2
    exit 1
fi
if [ ! -x .venv/bin/python ]; then
    python=$(find_python)
    if [ ! -w . ]; then
        echo "No permission to write .venv into $PWD. Clone the repository into a folder of your own." >&2
        exit 1
    fi
    echo "Making .venv with $("$python" --version) ($python)"
    if ! "$python" -m venv .venv; then
        echo "$python cannot make a virtual environment. On Debian and Ubuntu: apt install python3-venv" >&2
        rm -rf .venv
        exit 1
    fi
fi

# Errors only: pip warns of every index that does not have a package, and of root.
pip=(.venv/bin/python -m pip install -qq --disable-pip-version-check)
torch=$(grep '^torch==' requirements.txt) torchvision=$(grep '^torchvision==' requirements.txt)
build=$(installed_build)
# pip takes 2.13.0+cpu for torch==2.13.0, so another build of the same version has to be forced in. The file says which
# index the build in .venv came from.
source_file=.venv/.verl-torch-source
index=()
if [ -n "${VERL_TORCH_INDEX:-}" ]; then
    echo "Installing $torch from $VERL_TORCH_INDEX"
    index=(--extra-index-url "$VERL_TORCH_INDEX")
    force=()
    if [ -n "$build" ] && [ "$(cat "$source_file" 2>/dev/null)" != "$VERL_TORCH_INDEX" ]; then force=(--force-reinstall); fi
    "${pip[@]}" ${force[@]+"${force[@]}"} --no-deps --index-url "$VERL_TORCH_INDEX" "$torch" "$torchvision"
elif [ $gpu = yes ]; then
    cuda=$(driver_cuda)
    if [ -n "$cuda" ] && [ "$cuda" -lt 13 ]; then
        echo "This machine's NVIDIA driver runs CUDA $cuda, and $torch of the package index is built for CUDA 13, which" >&2
        echo "needs driver 580 or newer. Update the driver, or take a build for CUDA 12:" >&2
        echo "    VERL_TORCH_INDEX=https://download.pytorch.org/whl/cu126 bash scripts/setup_env.sh" >&2
        exit 1
    fi
    if [ "$build" = cpu ]; then
        echo "NVIDIA GPU found, and .venv holds the CPU build of torch: installing $torch for CUDA"
        "${pip[@]}" --force-reinstall --no-deps "$torch" "$torchvision"
    fi
elif [ "$(uname -s)" = Linux ] && answers "$CPU_INDEX"; then
    echo "No NVIDIA GPU found: taking the CPU build of torch from $CPU_INDEX (VERL_TORCH_INDEX chooses another)"
    index=(--extra-index-url "$CPU_INDEX")
fi

files=(-r requirements.txt)
if [ $want_test = 1 ]; then files+=(-r requirements-test.txt); fi
echo "Installing pinned packages into .venv (once; some minutes)"
# torch in the same command as the rest, so that pip picks one set that fits together.
# ${index[@]+...}: bash before 4.4 calls an empty array unset.
"${pip[@]}" ${index[@]+"${index[@]}"} "${files[@]}"
# Before the project itself: both bring bin/verl. This checkout was installed as "verl" once, which is another project's.
for old in .venv/lib/python3*/site-packages/verl-*.dist-info; do
    if [ -d "$old" ]; then
        echo "Removing the distribution verl from .venv: this project is installed as verl-trainer"
        .venv/bin/python -m pip uninstall -qq --disable-pip-version-check --yes verl
    fi
done
rm -rf verl.egg-info
"${pip[@]}" --no-deps --no-build-isolation -e .
# An index may have torchvision for CUDA only; with a CPU torch it would take the import of transformers with it.
if ! .venv/bin/python -c 'import torchvision' >/dev/null 2>&1; then
    .venv/bin/python scripts/torchvision_without_ops.py
    .venv/bin/python -c 'import torchvision'
fi
build=$(installed_build)
# --no-deps: torch for CUDA has brought Triton, which nothing may move
if [ $gpu = yes ] && [ "$build" != cpu ]; then "${pip[@]}" --no-deps -r requirements-cuda.txt; fi
if [ $gpu = yes ] && [ "$build" = cpu ] && [ -z "${VERL_TORCH_INDEX:-}" ]; then
    echo "setup_env.sh: the package index gave the CPU build of torch, and this machine has an NVIDIA GPU. Runs on it need" >&2
    echo "    VERL_TORCH_INDEX=https://download.pytorch.org/whl/cu130 bash scripts/setup_env.sh" >&2
fi
echo "${VERL_TORCH_INDEX:-}" >"$source_file"
echo "$stamp_text" >"$stamp"
if [ $want_test = 1 ]; then echo "$stamp_text" >.venv/.verl-runtime; fi
