# docker build -t saccade .
# docker run --gpus all --ipc=host -p 8000:8000 -v saccade-models:/home/saccade/.cache/huggingface \
#     -v saccade-kernels:/home/saccade/.cache/saccade saccade serve Qwen/Qwen3-VL-8B-Instruct --host 0.0.0.0 --api-key "$KEY"
# The first volume keeps downloads, the second compiled kernels: without it every start compiles them anew.
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

# gcc and Python's headers: Triton compiles its launchers when a kernel is used for the first time.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-dev python3-venv gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/saccade
ENV PATH=/opt/saccade/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1

COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install "/src[cuda,otel,video]" && rm -rf /src

RUN useradd --create-home --uid 10001 saccade
USER saccade
WORKDIR /home/saccade
# Folders that exist give their owner to the volumes mounted there.
RUN mkdir -p .cache/saccade .cache/huggingface
ENV TRITON_CACHE_DIR=/home/saccade/.cache/saccade/triton

EXPOSE 8000
# /health tells whether the process has to be restarted; /ready, whether requests should be sent to it.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.getenv('SACCADE_PORT', '8000')}/health\", timeout=4)"]

# SIGTERM lets running requests end.
STOPSIGNAL SIGTERM
ENTRYPOINT ["saccade"]
# Without a model, the one that comes with the package.
CMD ["serve", "--host", "0.0.0.0"]
