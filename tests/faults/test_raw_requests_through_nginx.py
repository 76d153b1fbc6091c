"""The table of raw requests through nginx, which speaks HTTP/1.0 to a server unless it is told otherwise.

`make faults` runs it, because nginx comes from the system's packages (deploy/install-generators).
"""

import os
import subprocess
from contextlib import closing, suppress

import pytest

from schemaless.stack.plan import free_ports
from tests.integration.api.api_harness import api_process
from tests.raw_connection import PROBE, Talk, bytes_of, statuses
from tests.raw_requests import ROWS
from tests.waiting import until

pytestmark = pytest.mark.faults

LONG = bool(os.environ.get("SCHEMALESS_FAULTS_LONG"))

CONFIGURATION = """
daemon off; pid {folder}/pid; error_log stderr; worker_processes 1;
events {{}}
http {{
  access_log off; client_max_body_size 20m; client_body_buffer_size 20m; large_client_header_buffers 4 64k;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;

  upstream kept {{ server 127.0.0.1:{api}; keepalive 4; }}
  server {{ listen 127.0.0.1:{old}; location / {{
    proxy_pass http://127.0.0.1:{api}; proxy_set_header Host $http_host;
  }} }}
  server {{ listen 127.0.0.1:{new}; location / {{
    proxy_pass http://kept; proxy_http_version 1.1; proxy_request_buffering off;
    proxy_set_header Connection ""; proxy_set_header Host $http_host;
  }} }}
}}
"""
OTHERWISE = {
    200: (
        "version 1.2", "version 1.10", "absolute, foreign", "absolute, HTTP/1.0", "bare LF in the request line",
        "bare LF behind a field", "a field with a bracket in its name", "bare LF at the end", "a field without a colon",
    ),
    201: (
        "a chunk size that is with a bare LF", "a length as a trailer", "a trailer that is none", "put, version 1.2",
        "put, version 1.10",        "absolute put, foreign",
    ),
    400: (
        "options of the server", "absolute, foreign behind a user", "two expectations",
        "HTTP/1.0: chunked put", "version 0.9", "put, version 0.9",
        "target: half an escape", "target: an escape of nothing", "target: a NUL", "no Host", "put without a Host",
        "empty Host", "Host with a list", "Host with a path", "a field of 70 KB",
    ),
    405: ("connect to a path",),
    414: ("target of 70 KB", "query of 70 KB"),
    421: ("HTTP/1.0: get without a Host", "absolute, and a foreign Host"),
    431: ("99 fields",),
    501: ("chunked, chunked", "chunked, gzip"),
    505: ("version 3.0", "put, version 3.0", "version 11", "put, version 11"),
    # The API closes once it has read 16 MiB of it: the reset may reach nginx before the answer does.
    502: ("longer than what is read of it",),
}  # fmt: skip
"""What nginx answers itself, mends, or adds to, by status. It passes on Host, and not the authority of a target."""
PASSED_ON = [row for row in ROWS if not (row.half_close or row.is_open or row.name.startswith("no version"))]


@pytest.fixture(scope="module")
def proxied(running, make_datastore, tmp_path_factory):
    """An API process, its datastore, and the ports of nginx: one speaks HTTP/1.0 to the process, one HTTP/1.1."""
    datastore = make_datastore()
    folder = tmp_path_factory.mktemp("nginx")
    old, new = free_ports(2)
    with api_process(running.path) as api:
        (folder / "nginx.conf").write_text(CONFIGURATION.format(folder=folder, api=api.port, old=old, new=new))
        environment = os.environ | {"PATH": os.environ["PATH"] + ":/usr/sbin"}
        nginx = subprocess.Popen(["nginx", "-p", folder, "-c", folder / "nginx.conf"], env=environment)
        try:

            def answers():
                with suppress(ConnectionRefusedError), closing(Talk(new)) as talk:
                    talk.send(PROBE)
                    return talk.answer().status == 200

            until(answers)
            yield api, datastore, {"1.0": old, "1.1": new}
        finally:
            nginx.terminate()
            nginx.wait(60)


if LONG:

    @pytest.mark.parametrize("version", ["1.0", "1.1"])
    @pytest.mark.parametrize("row", PASSED_ON, ids=lambda row: row.name)
    def test_a_raw_request_through_a_proxy(proxied, row, version):
        """It is answered as without the proxy, or as nginx itself does, and what is stored was answered with 201."""
        api, datastore, ports = proxied
        sent, path = bytes_of(row, datastore.name)
        with closing(Talk(ports[version])) as talk:
            talk.send(*sent)
            found = statuses(talk, row)
        otherwise = [[status] for status, names in OTHERWISE.items() if row.name in names]
        assert found in [[row.answer, *row.behind], *otherwise]
        assert (api.client.get(path).status_code == 200) == (201 in found)
