#!/usr/bin/env bash
# requirements/apex.sh   Builds NVIDIA's apex into .venv from its source; `make apex` calls it.
#
# Megatron-core takes apex's fused optimizer, norms and gradient accumulation by itself when they import. The package
# called `apex` on PyPI is an unrelated program: this script takes it away if it is there. Needs git, nvcc of the CUDA
# that torch was built for, and about 15 minutes. MAX_JOBS bounds the compilers at work at once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
COMMIT=10417aceddd7d5d05d7cbf7b0fc2daad1105f8b4         # builds against torch 2.9 and later
PY=$PWD/.venv/bin/python SRC=$PWD/.venv/src/apex LOG=$PWD/.venv/apex.log
die() { printf 'apex: %s\n' "$*" >&2; exit 1; }

want=$("$PY" -c 'import torch; print(torch.version.cuda or "")')
[ -n "$want" ] || die "torch in .venv is a CPU build; apex is for CUDA only (on a GPU machine: make setup CUDA=13)"
if [ -x "$PWD/.venv/cuda/bin/nvcc" ]; then export CUDA_HOME=$PWD/.venv/cuda; fi
nvcc=${CUDA_HOME:+$CUDA_HOME/bin/}nvcc
have=$("$nvcc" --version 2>/dev/null | sed -nE 's/.*release ([0-9]+\.[0-9]+).*/\1/p') || true
[ "$have" = "$want" ] || die "nvcc ${have:-was not found, }${have:+is of CUDA $have, }but torch was built for CUDA $want: install that toolkit and set CUDA_HOME"
command -v git >/dev/null || die "git was not found: apt-get install git"
if "$PY" -c 'import apex.optimizers, amp_C' 2>/dev/null; then echo "apex: already there"; exit 0; fi

"$PY" -m pip uninstall -q -y apex 2>/dev/null || true
mkdir -p "$SRC"; git -C "$SRC" init -q
git -C "$SRC" fetch -q --depth 1 https://github.com/NVIDIA/apex.git "$COMMIT" 2>"$LOG" || die "cannot fetch commit $COMMIT from github.com/NVIDIA/apex: $(tail -1 "$LOG")"
git -C "$SRC" checkout -q "$COMMIT"
echo "apex: building $COMMIT for CUDA $want; its output is in $LOG"
APEX_CPP_EXT=1 APEX_CUDA_EXT=1 NVCC_APPEND_FLAGS="--threads 4" MAX_JOBS=${MAX_JOBS:-$(nproc)} \
  "$PY" -m pip install -v --no-deps --no-build-isolation --config-settings "--build-option=--cpp_ext --cuda_ext" "$SRC" >>"$LOG" 2>&1 ||
  die "the build failed: $(grep -iE 'error' "$LOG" | tail -1) (all of it: $LOG)"
"$PY" -c 'import apex.optimizers, amp_C' || die "apex was built but does not import"
echo "apex: ready in $SECONDS s"
