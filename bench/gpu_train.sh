#!/usr/bin/env bash
# One SFT step and one PARA-GRPO step at the widths of Qwen3-VL-8B, on one GPU, without network: see
# bench/gpu_train.py. `bash bench/gpu_train.sh --layers 8 --out result.json`
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-.venv/bin/python}"
export HF_HUB_OFFLINE=1 DO_NOT_TRACK=true TOKENIZERS_PARALLELISM=false
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
exec timeout 1200 "$PYTHON" -m bench.gpu_train "$@"
