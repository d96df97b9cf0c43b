# kvrelay's two images. Both run as user 10001 on a read-only root: they write to /tmp and to the volumes alone.
#
#   docker build --target coordinator -t kvrelay-coordinator .      the front door, without torch
#   docker build --target worker -t kvrelay-worker .                prefill and decode workers, and the model's conversion
#
# Build arguments
#   BASE_IMAGE        what the images stand on: any Debian or Ubuntu with Python 3.11 or newer and its venv module
#   BUILD_IMAGE       what dependencies are installed in, where that needs more than BASE_IMAGE has (a proxy's certificates,
#                     a folder of wheels); must have the same Python at the same path
#   TORCH_INDEX_URL   where torch comes from: the CPU build by default, PyPI's CUDA build with https://pypi.org/simple;
#                     empty: wherever pip looks
#   BAKE_MODEL        a model to put into the worker image, such as smollm2-135m; empty: fetched at the first start
ARG BASE_IMAGE=python:3.12-slim
ARG BUILD_IMAGE=${BASE_IMAGE}

# -- dependencies: these layers change only when pyproject.toml or the lock does ----------------------------------------
FROM ${BUILD_IMAGE} AS coordinator-deps
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/kvrelay
COPY pyproject.toml requirements.lock deploy/docker/requirements_of.py /build/
RUN python3 /build/requirements_of.py /build/pyproject.toml > /build/core.txt \
 && /opt/kvrelay/bin/python -m pip install --quiet --constraint /build/requirements.lock --requirement /build/core.txt

# -- our own code: its folders are its import paths, so it is copied rather than built ------------------------------------
FROM coordinator-deps AS source
COPY . /app/
RUN rm -rf /app/pyproject.toml /app/requirements.lock \
 && mkdir -p /app/bin \
 && mv /app/deploy/docker/entrypoint.sh /app/bin/entrypoint \
 && mv /app/deploy/docker/kvrelay.sh /app/bin/kvrelay \
 && mv /app/deploy/docker/ready.py /app/bin/ready \
 && rm -rf /app/deploy \
 && chmod 0755 /app/bin/* \
 && /opt/kvrelay/bin/python -m compileall -q -j 0 /app

FROM coordinator-deps AS coordinator-runtime
RUN /opt/kvrelay/bin/python -m pip uninstall --quiet --yes pip

# -- the coordinator's image ------------------------------------------------------------------------------------------
FROM ${BASE_IMAGE} AS coordinator
RUN groupadd --gid 10001 kvrelay \
 && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin kvrelay \
 && install -d -o kvrelay -g kvrelay /var/lib/kvrelay /run/kvrelay
COPY --from=coordinator-runtime /opt/kvrelay /opt/kvrelay
COPY --from=source /app /app
ENV PATH=/app/bin:/opt/kvrelay/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp KVRELAY_CACHE=/var/lib/kvrelay HF_HOME=/var/lib/kvrelay/hub
USER 10001:10001
WORKDIR /tmp
STOPSIGNAL SIGTERM
ENTRYPOINT ["/app/bin/entrypoint"]
CMD ["coordinator"]

# -- the worker's dependencies: torch first, from its own index -------------------------------------------------------
FROM coordinator-deps AS worker-deps
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
# What is removed last serves whoever compiles against torch: no image of ours has a compiler.
RUN torch=$(grep -E '^torch==' /build/requirements.lock) \
 && /opt/kvrelay/bin/python -m pip install --quiet --constraint /build/requirements.lock \
      ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} ${TORCH_INDEX_URL:+--extra-index-url https://pypi.org/simple} "$torch" \
 && python3 /build/requirements_of.py /build/pyproject.toml engine > /build/engine.txt \
 && /opt/kvrelay/bin/python -m pip install --quiet --constraint /build/requirements.lock --requirement /build/engine.txt \
 && cd "$(/opt/kvrelay/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
 && rm -rf torch/include torch/test torch/share/cmake && find torch -name '*.a' -delete

# -- the compiled CPU kernels: decode steps take 2 to 4 times as long without; the compiler stays behind ------------------
FROM coordinator-deps AS kernels
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY engine/__init__.py engine/errors.py /build/engine/
COPY engine/kernels /build/engine/kernels
RUN cd /build && /opt/kvrelay/bin/python -m engine.kernels.build --output /built

FROM worker-deps AS model
ARG BAKE_MODEL=
COPY --from=source /app /app
RUN mkdir -p /var/lib/kvrelay \
 && if [ -n "${BAKE_MODEL}" ]; then \
      PYTHONPATH=/app KVRELAY_CACHE=/var/lib/kvrelay HF_HOME=/var/lib/kvrelay/hub \
        /opt/kvrelay/bin/python -m cluster.cli models fetch "${BAKE_MODEL}"; \
    fi

# -- the workers' image -----------------------------------------------------------------------------------------------
FROM ${BASE_IMAGE} AS worker
RUN groupadd --gid 10001 kvrelay \
 && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin kvrelay \
 && install -d -o kvrelay -g kvrelay /run/kvrelay /run/kvrelay-gpus \
 && apt-get update && apt-get install -y --no-install-recommends libgomp1 \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
COPY --from=worker-deps /opt/kvrelay /opt/kvrelay
COPY --from=model --chown=10001:10001 /var/lib/kvrelay /var/lib/kvrelay
COPY --from=source /app /app
COPY --from=kernels /built /app/engine/kernels/built
ENV PATH=/app/bin:/opt/kvrelay/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp KVRELAY_CACHE=/var/lib/kvrelay HF_HOME=/var/lib/kvrelay/hub
USER 10001:10001
WORKDIR /tmp
STOPSIGNAL SIGTERM
ENTRYPOINT ["/app/bin/entrypoint"]
