#!/usr/bin/env bash
# A Python environment for a simulator and Quintet's environment server: `bash scripts/install_simulator.sh NAME
# DIRECTORY [python]`. docs/simulators.md lists the names, and what has to be downloaded in addition.
#
# Simulators need versions of MuJoCo and NumPy that exclude each other, so each has an environment of its own. The
# server imports only a few of Quintet's dependencies; torch is installed where the simulator itself needs it.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
name="${1:-}"
directory="${2:-}"
python="${3:-python3}"

# The set that is tested.
case "$name" in
    metaworld) packages=(metaworld==3.1.1 mujoco==3.3.0 gymnasium==1.4.0) ;;
    gymnasium_robotics) packages=(gymnasium-robotics==1.4.2 mujoco==3.9.0 gymnasium==1.4.0) ;;
    robosuite) packages=(robosuite==1.5.2 mujoco==3.3.7) ;;
    libero) packages=(hf-libero==0.1.4 mujoco==3.3.7) ;;
    maniskill) packages=(mani_skill==3.0.1) ;;
    *)
        echo "usage: install_simulator.sh NAME DIRECTORY [python]" >&2
        echo "NAME is metaworld, gymnasium_robotics, robosuite, libero or maniskill" >&2
        exit 2
        ;;
esac
[ -n "$directory" ] || {
    echo "usage: install_simulator.sh $name DIRECTORY [python]" >&2
    exit 2
}
server=(
    "fastapi>=0.120,<1" "h11>=0.16,<1" "hydra-core>=1.3.2,<1.4" "msgpack>=1.1,<2" packaging "pillow>=11,<14" "pydantic>=2.14.3,<3"
    "pyyaml>=6.0,<7" "rapidfuzz>=3.9,<4" "rich>=14,<16" "safetensors>=0.8,<1" "typer>=0.20,<1" "uvicorn>=0.50,<0.55"
)

"$python" -m venv "$directory"
pip=("$directory/bin/python" -m pip --disable-pip-version-check --no-input install --quiet)
"${pip[@]}" "${packages[@]}" "${server[@]}"
"${pip[@]}" --no-deps "$root"
"$directory/bin/python" -c "
from quintet.envs.simulators.registry import load_simulator
load_simulator('$name')"
echo "$name is installed; start its server with: $directory/bin/quintet serve-envs --env $name"
