# CPU image: docker build -t quintet . && docker run --rm -v "$PWD/runs:/work/runs" quintet train
# With CUDA: docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 -t quintet-cuda .
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=ray,service,terminal,embodied,video
# g++ compiles the kernels for the processor that the container runs on
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/quintet
COPY constraints.txt pyproject.toml setup.py README.md LICENSE ./
COPY src src
COPY examples examples
RUN pip install --no-cache-dir -c constraints.txt --index-url "$TORCH_INDEX" torch \
    && pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]"
RUN useradd --create-home user && mkdir /work && chown user /work
USER user
WORKDIR /work
ENTRYPOINT ["quintet"]
