#!/usr/bin/env bash
# requirements/wheel.sh [DIST]   Builds dist/: the wheel, and beside it the pins and hashes of everything that it runs with;
# `make wheel` calls it after set-up. What it leaves is all that another machine needs, with a package index:
#
#   pip install --no-deps --find-links dist -r dist/cuda13.txt      with a GPU, Python 3.11 or 3.12
#   pip install --no-deps --find-links dist -r dist/cpu.txt         without one, Python 3.11; torch's CPU build is on
#                                                                   PyTorch's CPU wheel index (--extra-index-url)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
DIST=${1:-dist}; PYTHON=${PYTHON:-.venv/bin/python}
mkdir -p "$DIST"
new=$(mktemp -d "$DIST/.new.XXXXXX"); trap 'rm -rf "$new"' EXIT
# a copy is built: setuptools leaves a folder of its own in the tree, and what is in there goes into the next wheel
mkdir "$new/tree"
cp -r src conf csrc examples requirements slurm setup.py MANIFEST.in pyproject.toml LICENSE "$new/tree"
if ! "$PYTHON" -m pip wheel -q --no-deps --no-build-isolation -w "$new" "$new/tree" >"$new/log" 2>&1; then
  cat "$new/log" >&2; echo "wheel: it could not be built; the lines above are pip's" >&2; exit 1
fi
grep '^ *laminar_hpc: ' "$new/log" >&2 || true    # an extension that is left out
wheel=$(cd "$new" && echo ./*.whl); version=$(echo "$wheel" | cut -d- -f2)
own="laminar_hpc==$version --hash=sha256:$(sha256sum "$new/$wheel" | cut -c1-64)"
tested=$(sed -n 's/^torch==/torch==/p' requirements/torch.txt)
{ cat requirements/lock.hashes requirements/nodeps.hashes; echo "$tested+cpu --hash=sha256:$(<requirements/torch_cpu.sha256)"; echo "$own"; } >"$new/cpu.txt"
once() { awk '/^[^ #]/ { keep = !seen[$1]++ } keep'; }  # a pin that two files share stands in one of them
{ cat requirements/{lock,torch,cuda13,nodeps}.hashes | once; echo "$own"; } >"$new/cuda13.txt"
rm -f "$DIST"/laminar_hpc-*.whl
mv "$new"/*.whl "$new"/c*.txt "$DIST"
echo "wheel: $DIST/${wheel#./}, with $DIST/cuda13.txt and $DIST/cpu.txt beside it"
