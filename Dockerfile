# One image for every service of the stack; docker-compose.yml says which one a container runs.
FROM python:3.13-slim AS packages
RUN python -m venv /opt/venv
COPY requirements.lock /tmp/
RUN /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --require-hashes -r /tmp/requirements.lock

FROM python:3.13-slim
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /srv/schemaless schemaless \
 && install -d -o schemaless -g schemaless -m 0700 /var/lib/schemaless /var/lib/admin /var/lib/programs
COPY --from=packages /opt/venv /opt/venv
COPY deploy/docker/schemaless deploy/docker/connected deploy/docker/ready /opt/venv/bin/
COPY . /srv/schemaless
WORKDIR /srv/schemaless
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/srv/schemaless \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    SCHEMALESS_TOPOLOGY=/var/lib/schemaless/topology.json
USER schemaless
CMD ["schemaless", "--help"]
