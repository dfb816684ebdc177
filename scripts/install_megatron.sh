#!/usr/bin/env bash
# Megatron Core into the active environment: `bash scripts/install_megatron.sh [python]`.
#
# Without what it asks for: torch, numpy and packaging are here, in the tested versions, and its extras bring CUDA
# packages. einops, which it imports where it finds it, asks for nothing.
set -euo pipefail
python="${1:-python}"
wanted=0.16.1
einops=0.8.2

has() { "$python" -c "from importlib.metadata import version; raise SystemExit(version('$1') != '$2')" 2>/dev/null; }

if has megatron-core "$wanted"; then
    echo "megatron-core $wanted is there"
    exit 0
fi
if [ "$(uname -s)" != Linux ]; then
    echo "megatron-core is built for Linux alone: its tests skip here"
    exit 0
fi
"$python" -m pip --disable-pip-version-check --no-input install --quiet --no-deps --only-binary :all: \
    "megatron-core==$wanted" "einops==$einops"
"$python" -W ignore -c 'import megatron.core'
echo "megatron-core $wanted is installed"
