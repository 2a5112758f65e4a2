# The two commands in a container, on the CPU:
#   docker build -t sortrl .
#   docker run --rm -v "$PWD/runs:/sortrl/runs" sortrl make demo
#   docker run --rm sortrl make test
FROM python:3.11-slim-bookworm

RUN apt-get update \
 && apt-get install -y --no-install-recommends build-essential cmake git make \
 && rm -rf /var/lib/apt/lists/*

# torch without CUDA: a tenth of the size.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \
    PIP_NO_CACHE_DIR=1

WORKDIR /sortrl
COPY . .
RUN make setup

ENV PATH=/sortrl/.venv/bin:$PATH
CMD ["make", "demo"]
