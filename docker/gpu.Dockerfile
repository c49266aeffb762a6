# A machine with GPUs: a worker of the pool gpu, and the vLLM server's own environment beside it.
#   docker build -f docker/gpu.Dockerfile -t paravt-ops:gpu .
FROM nvidia/cuda:12.9.1-runtime-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends git python3 python3-dev python3-venv build-essential tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/paravt-ops
COPY requirements requirements
RUN python3 -m venv .venv \
    && .venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check --requirement requirements/core.lock
# vllm and prefect exclude each other: the server has an environment of its own and speaks HTTP
RUN python3 -m venv .venv-vllm \
    && .venv-vllm/bin/python -m pip install --no-cache-dir --disable-pip-version-check --requirement requirements/vllm-gpu.txt
COPY . .
RUN .venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation --editable . \
    && useradd --create-home --uid 10001 paravt \
    && mkdir /work && chown paravt:paravt /work

ENV DO_NOT_TRACK=true \
    DVC_NO_ANALYTICS=1 \
    HOME=/home/paravt \
    MLFLOW_DISABLE_TELEMETRY=true \
    PARAVT_WORK=/work \
    PATH=/opt/paravt-ops/.venv/bin:$PATH \
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY=30 \
    PREFECT_WORKER_QUERY_SECONDS=2
USER paravt
VOLUME /work
ENTRYPOINT ["tini", "-g", "--"]
CMD ["prefect", "worker", "start", "--pool", "gpu", "--type", "process", "--limit", "1"]
