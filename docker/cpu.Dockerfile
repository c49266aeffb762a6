# A machine without a GPU: Prefect server, MLflow server, or a worker of the pool cpu.
#   docker build -f docker/cpu.Dockerfile -t paravt-ops:cpu .
FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends git tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/paravt-ops
COPY requirements requirements
RUN python -m pip install --no-cache-dir --disable-pip-version-check \
    --requirement requirements/core.lock --requirement requirements/container.txt
COPY . .
RUN python -m pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation --editable . \
    && useradd --create-home --uid 10001 paravt \
    && mkdir /work && chown paravt:paravt /work

ENV DO_NOT_TRACK=true \
    DVC_NO_ANALYTICS=1 \
    HOME=/home/paravt \
    MLFLOW_DISABLE_TELEMETRY=true \
    MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false \
    PARAVT_WORK=/work \
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY=30 \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    PREFECT_WORKER_QUERY_SECONDS=2
USER paravt
VOLUME /work
# tini takes in orphans and passes signals on: the container's end is the end of all that ran in it
ENTRYPOINT ["tini", "-g", "--"]
CMD ["prefect", "worker", "start", "--pool", "cpu", "--type", "process"]
