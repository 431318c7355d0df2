#!/usr/bin/env bash
# unpack.sh [REPOSITORY]   Makes REPOSITORY/.venv (default: the current folder) from the parts beside it, for a
# machine without a network. Written by bench/gpu_carry. A second call does what is left to do.
#
# PYTHON=PROGRAM (default python3) is the target's Python, whose packages serve where none is carried.
set -euo pipefail
PARTS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
REPOSITORY=${1:-.}; PYTHON=${PYTHON:-python3}
die() { printf 'unpack: %s\n' "$*" >&2; exit 1; }
SUMS='@SUMS@'

[ -f "$REPOSITORY/setup.py" ] && [ -d "$REPOSITORY/src/laminar_hpc" ] ||
  die "$REPOSITORY is no checkout of laminar_hpc: bash unpack.sh REPOSITORY"
REPOSITORY=$(cd "$REPOSITORY" && pwd); VENV=$REPOSITORY/.venv; SITE=$VENV/carried
for program in "$PYTHON" xz tar sha256sum; do
  command -v "$program" >/dev/null || die "there is no $program on this machine"
done
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$version" = @PYTHON@ ] ||
  die "the parts are for Python @PYTHON@ and $PYTHON is $version: name another with PYTHON=, or pack with --python $version"
[ ! -e "$VENV" ] || [ -d "$SITE" ] || die "$VENV was not made by unpack.sh: move it away"
mkdir -p "$SITE"; LOG=$VENV/unpack.log; STAMP=$VENV/carried.stamp; BUILT=$VENV/built.stamp; : >"$LOG"
unset PYTHONPATH

stage() { # words, command...
  local words=$1 t0=$SECONDS; shift
  "$@" >>"$LOG" 2>&1 </dev/null || die "$words: failed: $(grep -v '^ *$' "$LOG" | tail -1) (all of it: $LOG)"
  printf 'unpack: %-40s %4d s\n' "$words" $((SECONDS - t0))
}
whole() { # all parts are there, with their sums
  local name
  while read -r _ name; do
    [ -f "$PARTS/$name" ] || { echo "$PARTS/$name is missing: copy it there"; return 1; }
  done <<<"$SUMS"
  (cd "$PARTS" && sha256sum --quiet -c - <<<"$SUMS" 2>/dev/null) || { echo "a part is damaged: copy it again"; return 1; }
}
unpacked() {
  rm -rf "$SITE" "$STAMP" "$BUILT"; mkdir "$SITE"
  (cd "$PARTS" && awk '{print $2}' <<<"$SUMS" | xargs cat) | xz -dc -T0 | tar x -C "$SITE" || return 1
  echo "$SUMS" >"$STAMP"
}
environment() {
  "$PYTHON" -m venv --without-pip "$VENV" || return 1
  printf '#!%s\nimport sys\nfrom laminar_hpc.launch.cli import main\nsys.exit(main())\n' "$VENV/bin/python" >"$VENV/bin/laminar"
  chmod +x "$VENV/bin/laminar"
  "$PYTHON" - "$REPOSITORY/src" "$SITE" "$("$VENV/bin/python" -c 'import site; print(site.getsitepackages()[0])')" <<'PROGRAM'
"""The order of packages: the checkout's, the carried ones, then the target's own."""
import importlib.util
import os
import sys
from pathlib import Path

source, carried, packages = map(Path, sys.argv[1:])
own = [path for path in sys.path if path.endswith("-packages")]
lines = [source, carried, *(f"import site; site.addsitedir({path!r})" for path in own)]
(packages / "carried.pth").write_text("".join(f"{line}\n" for line in lines))


def link(theirs: Path, ours: Path) -> None:
    """Torch looks for CUDA's libraries beside itself: links to those that are not carried."""
    for item in theirs.iterdir():
        mine = ours / item.name
        if not os.path.lexists(mine):
            mine.symlink_to(item)
        elif item.is_dir() and not mine.is_symlink():
            link(item, mine)


spec = importlib.util.find_spec("nvidia")
(carried / "nvidia").mkdir(exist_ok=True)
for folder in spec.submodule_search_locations or () if spec else ():
    link(Path(folder), carried / "nvidia")
PROGRAM
}
extension() {
  "$VENV/bin/python" setup.py -q egg_info build_ext --inplace --force || return 1
  # setup.py leaves out what it cannot build, and says so
  ! grep -E 'without (laminar_hpc|its GPU part)' "$LOG" || return 1
  "$VENV/bin/python" -c 'import laminar_hpc._kv, laminar_hpc._sums' || return 1
  touch "$BUILT"
}
packages() {
  "$VENV/bin/python" - "$SITE/carried.txt" <<'PROGRAM'
import importlib.metadata as metadata
import sys

for line in open(sys.argv[1]).read().split():
    name, _, version = line.partition("==")
    found = metadata.version(name)
    if found != version:
        sys.exit(f"{name} is {found} instead of {version}")
import torch
import triton
PROGRAM
}

if [ "$(cat "$STAMP" 2>/dev/null)" != "$SUMS" ]; then
  stage "check sums of $(wc -l <<<"$SUMS") parts" whole
  stage "unpacking" unpacked
fi
stage "environment" environment
stage "packages" packages  # before the extension, which asks torch for CUDA
cd "$REPOSITORY"
if [ ! -e "$BUILT" ] || [ -z "$(find src/laminar_hpc -name '_kv*.so')" ] || [ -n "$(find csrc setup.py -newer "$BUILT")" ]; then
  stage "extension" extension
fi
echo "unpack: ready: $VENV/bin/python in $REPOSITORY, with HF_HUB_OFFLINE=1 and PATH=$VENV/bin:\$PATH"
