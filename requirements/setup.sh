#!/usr/bin/env bash
# requirements/setup.sh   Makes .venv at the pins and hashes of requirements/; `make setup` calls it.
#
# A second call finds the stamp of the first and installs nothing. Settings (environment):
#   TORCH_INDEX=URL    where to take torch from, for example PyTorch's CPU wheel index
#   CUDA=13|12|none    the CUDA of the torch build: by default 13 where nvidia-smi finds a GPU, else none
#   KERNEL_INDEX=URL   with CUDA=12: SGLang's wheel index for CUDA 12.9 (see cuda12.txt)
#   PYTHON=PROGRAM     the Python to use: by default python3.11, else a python3 that is 3.11 or 3.12
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=$PWD/.venv; STAMP=$VENV/.laminar-setup; BUILT=$VENV/.laminar-built; LOG=$VENV/setup.log
CUDA=${CUDA:-}; TORCH_INDEX=${TORCH_INDEX:-}; KERNEL_INDEX=${KERNEL_INDEX:-}
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

if [ -z "$CUDA" ]; then if nvidia-smi -L >/dev/null 2>&1; then CUDA=13; else CUDA=none; fi; fi
case $CUDA in
  none|13) ;;
  12) [ -n "$TORCH_INDEX" ] && [ -n "$KERNEL_INDEX" ] ||
        die "CUDA=12 needs TORCH_INDEX=<PyTorch's cu129 wheel index> and KERNEL_INDEX=<SGLang's>: PyPI has CUDA 13 builds only" ;;
  *) die "CUDA=$CUDA is not known: name 13, 12 or none" ;;
esac

exec 9<requirements
flock -w 900 9 || die "another set-up of this folder has run for 15 minutes; wait for it or end it"
key=$({ cat requirements/* setup.py csrc/* src/laminar_hpc/__init__.py; echo "$CUDA $TORCH_INDEX $KERNEL_INDEX $PWD"; } | sha256sum | cut -c1-64)
built() { while read -r name; do [ -e "$name" ] || return 1; done <"$BUILT"; }  # `git clean` takes the extensions and leaves .venv
if [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$key" ] && built; then exit 0; fi

# ---- a Python and its venv ---------------------------------------------------------------------
fits() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; }
if ! fits "$VENV/bin/python" || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
  py=
  for p in ${PYTHON:-python3.11 python3 python3.12}; do if fits "$p"; then py=$p; break; fi; done
  [ -n "$py" ] || die "no Python 3.11 or 3.12 found: 'apt-get install python3.11 python3.11-venv', or name one with PYTHON=/path/to/python"
  rm -rf "$VENV"
  "$py" -m venv "$VENV" >/dev/null 2>&1 || { rm -rf "$VENV"
    die "'$py -m venv' failed: 'apt-get install $("$py" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')'"; }
fi
rm -f "$STAMP"; : >"$LOG"
pip() { PIP_DISABLE_PIP_VERSION_CHECK=1 "$VENV/bin/python" -m pip "$@"; }

# ---- stages: one line each; pip's own words go to the log ----------------------------------------
why() { # the reason of a failed stage in a few words
  if grep -qE 'NewConnectionError|NameResolutionError|Temporary failure in name|ProxyError|unreachable|ConnectTimeout|ReadTimeout|from versions: none' "$LOG"; then
    echo "no package index that has it could be reached: check the network, or the proxy and index settings of pip"
  elif grep -q 'DO NOT MATCH THE HASHES' "$LOG"; then
    echo "a package's file is not the one that its pin was made with: look at your package index or mirror"
  elif grep -q 'No space left on device' "$LOG"; then
    echo "the disk is full: the environment takes about 2.5 GB without CUDA and 10 GB with it"
  else grep -iE '^ *error' "$LOG" | tail -1 || true; fi
}
stage() { # words, command...
  local words=$1 t0=$SECONDS; shift
  printf 'setup: %-58s' "$words"
  if ! "$@" >>"$LOG" 2>&1 </dev/null; then printf ' failed\n'; die "$words: $(why) (all of it: $LOG)"; fi
  printf ' %4d s\n' $((SECONDS-t0))
}
pinned() { grep -hE "^$1==" requirements/{torch,lock,nodeps}.txt; }

hashed() { # NAME...: their lines of lock.hashes
  local name; for name; do sed -n "/^$name==/,/[^\\\\]\$/p" requirements/lock.hashes; done
}
checked() { pip install --no-deps --require-hashes "$@"; }

stage "pip and build tools" checked -r <(hashed pip setuptools wheel)
stage "libraries and test tools ($(cat requirements/{lock,dev}.txt | grep -c '^[^#]') packages)" \
  checked --no-build-isolation -r requirements/lock.hashes -r requirements/dev.hashes
torch=$(pinned torch); pins=(-c requirements/lock.txt)
[ "$CUDA" = none ] || pins+=(-c "requirements/cuda$CUDA.txt")
kernels() { echo "kernels for CUDA $CUDA ($(grep -c '^[^#]' "requirements/cuda$CUDA.txt") packages)"; }
if [ -n "$TORCH_INDEX" ]; then
  vision=(); [ "$CUDA" = none ] || vision=("$(pinned torchvision)")
  stage "$torch from TORCH_INDEX" pip install --no-deps --index-url "$TORCH_INDEX" "$torch" "${vision[@]}"
elif [ "$CUDA" = 13 ]; then  # the hashes choose PyPI's build, even where pip also sees a +cpu one
  stage "$torch" checked -r requirements/torch.hashes
elif [[ $(pip index versions torch 2>/dev/null || true) != *"${torch#*==}+cpu"* ]]; then
  echo "setup: pip finds no CPU build of torch and takes the CUDA one; TORCH_INDEX=<PyTorch's CPU wheel index> saves several GB"
fi
[ "$CUDA" != 13 ] || stage "$(kernels)" checked -r requirements/cuda13.hashes
stage "$torch and its own needs" pip install "${pins[@]}" "$torch"
stage "$(pinned sglang), $(pinned triton)" checked -r requirements/nodeps.hashes
[ "$CUDA" != 12 ] || stage "$(kernels)" pip install --no-deps --extra-index-url "$KERNEL_INDEX" -r requirements/cuda12.txt
[ -n "$(command -v "${CXX:-c++}" || command -v g++)" ] || {
  echo "setup: no C++ compiler, so no KV-cache migration: 'apt-get install g++', rm $STAMP, then make setup"; }
stage "laminar" pip install --no-deps --no-build-isolation -e .
if [ "$CUDA" != none ] && nvidia-smi -L >/dev/null 2>&1; then
  # not needed: an engine that finds no kernels compiles them at its start
  printf 'setup: %-58s' "SGLang's kernels for this GPU"; t0=$SECONDS
  if timeout 1200 "$VENV/bin/python" -m laminar_hpc.engine.sglang.plugin.compile_units >>"$LOG" 2>&1 </dev/null
  then printf ' %4d s\n' $((SECONDS-t0)); else printf ' not all; engines compile them at their start (%s)\n' "$LOG"; fi
fi

find src/laminar_hpc -name "*.so" >"$BUILT"
echo "$key" >"$STAMP"
echo "setup: ready in $SECONDS s: .venv with $("$VENV/bin/python" -c 'import importlib.metadata as m; print("torch", m.version("torch"))')"
