# pinscher serve, without torch:
#     docker build -t pinscher .
#     docker run -p 8080:8080 -v ./runs/rte/export:/model:ro pinscher
FROM python:3.13-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.13-slim
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(ls /wheels/*.whl)[serve]" \
    && python -c "from pinscher import native; assert native.core() is not None"
RUN useradd --create-home pinscher
USER pinscher
EXPOSE 8080
HEALTHCHECK CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://localhost:8080/health')"]
ENTRYPOINT ["pinscher", "serve", "--host", "0.0.0.0"]
CMD ["/model"]
