#!/usr/bin/env bash
# Runs a part of the tests with the newest and with the lowest versions that pyproject.toml allows:
#
#     bash scripts/newest_dependencies.sh [newest] [lowest]
#
# Each environment, build/dependencies/<name>, lies over the one of $PYTHON (default .venv/bin/python), from which it has
# the packages that the tests need. Torch stays as it is there: another one brings gigabytes on a machine without a GPU.
# Ends with a table of the versions and results, and with 1 if a test file failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="$(realpath --no-symlinks "${PYTHON:-.venv/bin/python}")"
folder=build/dependencies
# The extras whose packages the tests below use.
extras="embodied service"
tests=(
    tests/unit/policies/test_training_decoder.py
    tests/unit/policies/test_model_families.py
    tests/unit/policies/test_lora.py
    tests/unit/policies/vla/test_openvla.py
    tests/unit/rollout/engines/test_hf_engine.py
    tests/unit/rollout/chat
    tests/unit/config/test_schema.py
    tests/unit/envs/simulators/test_arm.py
    tests/unit/runtime/http_service
    tests/unit/cli/test_doctor.py
    tests/unit/tracking/test_tracking.py
    tests/system/test_train.py::test_a_run_leaves_what_it_promises
    tests/system/test_train.py::test_adapters_lie_beside_the_merged_model_as_peft_stores_them
    tests/system/test_fine_tuning.py::test_episodes_are_solved_learnt_and_played
    tests/system/test_serving_commands.py
)

# Prints a requirement of pyproject.toml a line; for `lowest` with the lower bound as the version.
requirements() {
    "$python" - "$1" "$extras" <<'PY'
import sys
import tomllib

from packaging.requirements import Requirement

chosen, extras = sys.argv[1], sys.argv[2].split()
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
for requirement in map(Requirement, lines):
    if requirement.name == "torch":
        continue
    lower = [bound.version for bound in requirement.specifier if bound.operator in (">=", "==")]
    print(f"{requirement.name}=={lower[0]}" if chosen == "lowest" else requirement)
PY
}

create() {
    local environment="$folder/$1"
    rm -rf "$environment"
    "$python" -m venv --without-pip "$environment"
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        >"$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
    requirements "$1" >"$environment/requirements.txt"
    "$python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$environment/constraints.txt"
    "$environment/bin/python" -m pip --disable-pip-version-check install --quiet --upgrade \
        -c "$environment/constraints.txt" -r "$environment/requirements.txt"
}

# Prints the versions of pyproject.toml's packages in an environment.
versions() {
    requirements "$1" | sed 's/[^A-Za-z0-9_.-].*//' | "$folder/$1/bin/python" -c '
import sys
from importlib.metadata import version

print(*(f"{name} {version(name)}" for name in ["torch", *sys.stdin.read().split()]), sep=", ")'
}

run_tests() {
    local state
    for file in "${tests[@]}"; do
        state=passed
        PYTHONPATH="$PWD/src" OMP_NUM_THREADS=1 timeout "${TIMEOUT:-1200}" "$folder/$1/bin/python" -m pytest -q "$file" \
            >"$folder/$1.log" 2>&1 || state=failed
        [[ $state = passed ]] || { tail -n 40 "$folder/$1.log" >&2; failed=1; }
        rows+=("$(printf '| %-6s | %-6s | %-55s | %s' "$1" "$state" "$file" "$(grep -E '(passed|failed)' "$folder/$1.log" | tail -n 1)")")
    done
}

if [[ ${1:-} = requirements ]]; then
    requirements "$2"
    exit
fi
failed=0
rows=()
(($#)) || set -- newest lowest
for environment in "$@"; do
    create "$environment"
    rows+=("| $environment: $(versions "$environment")")
    run_tests "$environment"
done
printf '%s\n' "${rows[@]}"
exit "$failed"
