#!/usr/bin/env bash
# Rollouts by a real vLLM server at the widths of Qwen3-VL-8B, on one GPU, without network: see bench/gpu_vllm.py.
# `make setup-vllm DEVICE=gpu` first. `bash bench/gpu_vllm.sh --layers 8 --out result.json`
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-.venv/bin/python}"
export HF_HUB_OFFLINE=1 DO_NOT_TRACK=true TOKENIZERS_PARALLELISM=false
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
exec timeout 1200 "$PYTHON" -m bench.gpu_vllm "$@"
