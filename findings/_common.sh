# Read by each finding: goes to a temporary folder, which is removed at the end. `packages` installs there.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1

packages() {
  "${PYTHON:-python3}" -m venv venv
  venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "$@"
  echo "versions: $*"
}
