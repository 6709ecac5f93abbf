# The command and the package, with the FP4 library for RTX 50xx inside.
#   docker build -t peft-nvfp4 .
#   docker run --gpus all -v "$PWD:/work" -v "$HOME/.cache/huggingface:/home/user/.cache/huggingface" peft-nvfp4 doctor
# The first stage needs half an hour: nvcc compiles the library. PyTorch brings CUDA's libraries, so the base image is small.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY csrc csrc
COPY src src
RUN python3 -m venv /venv \
    && /venv/bin/pip install --no-cache-dir --no-deps nvidia-cutlass==4.2.0.0 \
    && PEFT_NVFP4_BUILD=1 /venv/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM nvidia/cuda:13.0.1-base-ubuntu24.04
# Triton compiles a launcher for each kernel with the C compiler, against Python's headers
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
RUN python3 -m venv /venv \
    && /venv/bin/pip install --no-cache-dir torch \
    && for wheel in /wheels/*.whl; do /venv/bin/pip install --no-cache-dir "${wheel}[cli]"; done \
    && useradd --create-home --uid 1001 user
ENV PATH=/venv/bin:$PATH
USER 1001
WORKDIR /work
ENTRYPOINT ["peft-nvfp4"]
CMD ["--help"]
