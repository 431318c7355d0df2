#!/usr/bin/env bash
# requirements/image.sh cuda13|cpu [TORCH_INDEX]   Fills an image of Debian 12 from /dist, where the wheel and its pins are;
# Containerfile and slurm/laminar.def call it. TORCH_INDEX: a further index, which has torch's CPU build.
set -euo pipefail
[ -f "/dist/${1-}.txt" ] || { echo "image: there is no /dist/${1-}.txt: name cuda13 or cpu, and run 'make wheel' first" >&2; exit 2; }
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
# Triton compiles its launchers with a C compiler and Python's headers; SGLang's kernels load libnuma
apt-get install -qy --no-install-recommends python3-venv python3-dev g++ libnuma1 ca-certificates
apt-get clean
rm -rf /var/lib/apt/lists/*
python3 -m venv /opt/laminar
/opt/laminar/bin/pip install --no-cache-dir --no-deps ${2:+--extra-index-url "$2"} --find-links /dist -r "/dist/$1.txt"
rm -rf /dist
